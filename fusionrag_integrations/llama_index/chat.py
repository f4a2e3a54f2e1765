"""Chat engines whose answers come from the retrieved nodes' caches.

LlamaIndex's context chat engines build their own synthesizer and ignore the one they are given; here they build ours,
from the same templates, so history and system prompt stand before the nodes as their users expect.
"""

from __future__ import annotations

from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.response_synthesizers import CompactAndRefine

from fusionrag_engine import Engine

from .llm import FusionRAGLLM
from .synthesizer import FusionRAGSynthesizer


def _with_caches(built: CompactAndRefine) -> FusionRAGSynthesizer:
    """Our synthesizer with the LLM, templates and streaming of the one that LlamaIndex built."""
    prompts = built.get_prompts()
    return FusionRAGSynthesizer(
        built._llm,
        text_qa_template=prompts["text_qa_template"],
        refine_template=prompts["refine_template"],
        streaming=built._streaming,
        callback_manager=built._callback_manager,
    )


class FusionRAGContextChatEngine(ContextChatEngine):
    """`ContextChatEngine` over chunk caches; made with the same `from_defaults(retriever=, llm=, ...)`."""

    @classmethod
    def from_engine(cls, engine: Engine, **settings: Any) -> ContextChatEngine:
        """As `from_defaults(...)`, with a `FusionRAGLLM` on this engine: `from_engine(engine, retriever=...)`."""
        return cls.from_defaults(llm=FusionRAGLLM.from_engine(engine), **settings)

    def _get_response_synthesizer(self, chat_history: list[ChatMessage], streaming: bool = False) -> Any:
        return _with_caches(super()._get_response_synthesizer(chat_history, streaming))


class FusionRAGCondensePlusContextChatEngine(CondensePlusContextChatEngine):
    """`CondensePlusContextChatEngine` over chunk caches; made with the same `from_defaults(retriever=, llm=, ...)`."""

    @classmethod
    def from_engine(cls, engine: Engine, **settings: Any) -> CondensePlusContextChatEngine:
        """As `from_defaults(...)`, with a `FusionRAGLLM` on this engine: `from_engine(engine, retriever=...)`."""
        return cls.from_defaults(llm=FusionRAGLLM.from_engine(engine), **settings)

    def _get_response_synthesizer(self, chat_history: list[ChatMessage], streaming: bool = False) -> Any:
        return _with_caches(super()._get_response_synthesizer(chat_history, streaming))
