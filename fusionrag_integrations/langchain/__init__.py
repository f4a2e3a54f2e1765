"""FusionRAG in LangChain: chat model, completion model, documents chain, document transformer, vector store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fusionrag_integrations.explain import explain

from .callbacks import CacheReport
from .calls import AnswerTimeoutError
from .chain import create_fusion_documents_chain, default_prompt
from .chat import ChatFusionRAG, ToolsNotSupportedError
from .llm import FusionRAGLLM
from .transformer import FusionRAGDocumentTransformer, release

if TYPE_CHECKING:
    from .vector_store import FusionRAGChroma

__all__ = [
    "AnswerTimeoutError",
    "CacheReport",
    "ChatFusionRAG",
    "FusionRAGChroma",
    "FusionRAGDocumentTransformer",
    "FusionRAGLLM",
    "ToolsNotSupportedError",
    "create_fusion_documents_chain",
    "default_prompt",
    "explain",
    "release",
]


def __getattr__(name: str) -> Any:
    """Chroma is an extra of its own: the vector store is imported when it is asked for."""
    if name == "FusionRAGChroma":
        from .vector_store import FusionRAGChroma

        return FusionRAGChroma
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
