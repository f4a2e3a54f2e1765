"""FusionRAG in LlamaIndex: ingestion, LLM, synthesizer, chat engines, vector store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .chat import FusionRAGCondensePlusContextChatEngine, FusionRAGContextChatEngine
from .llm import FusionRAGLLM
from .prompting import default_text_qa_template
from .synthesizer import FusionRAGSynthesizer
from .transform import FusionRAGTransform

if TYPE_CHECKING:
    from .vector_store import FusionRAGChromaVectorStore

__all__ = [
    "FusionRAGChromaVectorStore",
    "FusionRAGCondensePlusContextChatEngine",
    "FusionRAGContextChatEngine",
    "FusionRAGLLM",
    "FusionRAGSynthesizer",
    "FusionRAGTransform",
    "default_text_qa_template",
]


def __getattr__(name: str) -> Any:
    """Chroma is an extra of its own: the vector store is imported when it is asked for."""
    if name == "FusionRAGChromaVectorStore":
        from .vector_store import FusionRAGChromaVectorStore

        return FusionRAGChromaVectorStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
