"""Chat engines whose answers come from the retrieved nodes' caches.

LlamaIndex's context chat engines build their own synthesizer and ignore the one they are given; here they build ours,
from the same templates, so history and system prompt stand before the nodes as their users expect.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.chat_engine.types import AgentChatResponse, StreamingAgentChatResponse
from llama_index.core.response_synthesizers import CompactAndRefine

from fusionrag_engine import Engine

from .llm import FusionRAGLLM
from .synthesizer import FusionRAGSynthesizer
from .trace import Trace

_Response = TypeVar("_Response", AgentChatResponse, StreamingAgentChatResponse)

_turn: ContextVar[Trace | None] = ContextVar("fusionrag_turn", default=None)
"""The trace of the turn that is being started. Read before the turn's method returns, so always in its own context."""


@contextmanager
def _new_turn() -> Iterator[Trace]:
    trace = Trace()
    token = _turn.set(trace)
    try:
        yield trace
    finally:
        _turn.reset(token)


def _with_caches(built: CompactAndRefine) -> FusionRAGSynthesizer:
    """Our synthesizer with the LLM, templates and streaming of the one that LlamaIndex built."""
    prompts = built.get_prompts()
    return FusionRAGSynthesizer(
        built._llm,
        text_qa_template=prompts["text_qa_template"],
        refine_template=prompts["refine_template"],
        streaming=built._streaming,
        callback_manager=built._callback_manager,
        trace=_turn.get(),
    )


class _Traced:
    """What the cache did for a turn, in `response.metadata["fusionrag"]` as for query engines.

    LlamaIndex's own responses of these chat engines say nothing of what the synthesizer returned.
    """

    def chat(self, *args: Any, **settings: Any) -> AgentChatResponse:
        with _new_turn() as trace:
            response: AgentChatResponse = super().chat(*args, **settings)  # type: ignore[misc]
        return _annotate(response, trace)

    def stream_chat(self, *args: Any, **settings: Any) -> StreamingAgentChatResponse:
        with _new_turn() as trace:
            response: StreamingAgentChatResponse = super().stream_chat(*args, **settings)  # type: ignore[misc]
        return _annotate(response, trace)

    async def achat(self, *args: Any, **settings: Any) -> AgentChatResponse:
        with _new_turn() as trace:
            response: AgentChatResponse = await super().achat(*args, **settings)  # type: ignore[misc]
        return _annotate(response, trace)

    async def astream_chat(self, *args: Any, **settings: Any) -> StreamingAgentChatResponse:
        with _new_turn() as trace:
            response: StreamingAgentChatResponse = await super().astream_chat(*args, **settings)  # type: ignore[misc]
        return _annotate(response, trace)


def _annotate(response: _Response, trace: Trace) -> _Response:
    """A stream fills the trace in while it runs. A streaming response has no field for it, but takes one."""
    metadata = {**(getattr(response, "metadata", None) or {}), "fusionrag": trace.info}
    response.metadata = metadata  # type: ignore[attr-defined]
    return response


class FusionRAGContextChatEngine(_Traced, ContextChatEngine):
    """`ContextChatEngine` over chunk caches; made with the same `from_defaults(retriever=, llm=, ...)`."""

    @classmethod
    def from_engine(cls, engine: Engine, **settings: Any) -> ContextChatEngine:
        """As `from_defaults(...)`, with a `FusionRAGLLM` on this engine: `from_engine(engine, retriever=...)`."""
        return cls.from_defaults(llm=FusionRAGLLM.from_engine(engine), **settings)

    def _get_response_synthesizer(self, chat_history: list[ChatMessage], streaming: bool = False) -> Any:
        return _with_caches(super()._get_response_synthesizer(chat_history, streaming))


class FusionRAGCondensePlusContextChatEngine(_Traced, CondensePlusContextChatEngine):
    """`CondensePlusContextChatEngine` over chunk caches; made with the same `from_defaults(retriever=, llm=, ...)`."""

    @classmethod
    def from_engine(cls, engine: Engine, **settings: Any) -> CondensePlusContextChatEngine:
        """As `from_defaults(...)`, with a `FusionRAGLLM` on this engine: `from_engine(engine, retriever=...)`."""
        return cls.from_defaults(llm=FusionRAGLLM.from_engine(engine), **settings)

    def _get_response_synthesizer(self, chat_history: list[ChatMessage], streaming: bool = False) -> Any:
        return _with_caches(super()._get_response_synthesizer(chat_history, streaming))
