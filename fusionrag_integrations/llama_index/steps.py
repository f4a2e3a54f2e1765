"""From the engine's token stream to LlamaIndex's responses. Streaming is the primitive; a whole answer is its last
item."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole

from fusionrag_engine import Engine, FusionRAGError, Request, TokenDelta
from fusionrag_engine.types import Stats

from .trace import count_call, node_entries

if TYPE_CHECKING:
    from .node_calls import NodeCall

Item = TypeVar("Item")


@dataclass(frozen=True)
class Step:
    """One item of a stream: the text so far, what was added, and on the last item the counts (`raw`)."""

    text: str
    delta: str
    raw: dict[str, Any] | None


def run(engine: Engine, request: Request, call: NodeCall | None) -> Iterator[Step]:
    """The steps of one answer. Closing the iterator stops the generation."""
    text = ""
    deltas: Any = engine.stream(request)
    with own_errors(), closing(deltas):
        for delta in deltas:
            text += delta.text
            yield _step(engine, text, delta, request, call)


async def arun(engine: Engine, request: Request, call: NodeCall | None) -> AsyncIterator[Step]:
    """As `run`, without blocking the event loop."""
    text = ""
    deltas: Any = engine.astream(request)
    with own_errors():
        async with aclosing(deltas):
            async for delta in deltas:
                text += delta.text
                yield _step(engine, text, delta, request, call)


def convert(steps: Iterator[Step], form: Callable[[Step], Item]) -> Iterator[Item]:
    """A stream of responses; a generator, which is what LlamaIndex looks for, and closed with its source."""
    with closing(steps):  # type: ignore[type-var]
        yield from map(form, steps)


async def aconvert(steps: AsyncIterator[Step], form: Callable[[Step], Item]) -> AsyncIterator[Item]:
    async with aclosing(steps):  # type: ignore[type-var]
        async for step in steps:
            yield form(step)


def last(steps: Iterator[Step]) -> Step:
    """The whole answer."""
    *_, step = steps
    return step


async def alast(steps: AsyncIterator[Step]) -> Step:
    step: Step | None = None
    async for item in steps:
        step = item
    assert step is not None
    return step


def _step(engine: Engine, text: str, delta: TokenDelta, request: Request, call: NodeCall | None) -> Step:
    if delta.stats is None:
        return Step(text, delta.text, None)
    nodes = call.prompt.nodes if call is not None and call.prompt is not None else []
    counts = count_call(engine, request, delta.stats, nodes)
    if call is not None:
        call.trace.add(counts)
    fusionrag = {**counts, "nodes": node_entries(counts)}
    raw = {"usage": usage(delta.stats), "finish_reason": delta.finish_reason, "fusionrag": fusionrag}
    return Step(text, delta.text, raw)


def usage(stats: Stats) -> dict[str, Any]:
    """Token counts in the form LlamaIndex reads."""
    return {
        "prompt_tokens": stats.num_prompt_tokens,
        "completion_tokens": stats.num_generated_tokens,
        "total_tokens": stats.num_prompt_tokens + stats.num_generated_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.num_reused_tokens},
    }


def chat_item(step: Step) -> ChatResponse:
    return ChatResponse(message=_message(step), delta=step.delta, raw=step.raw)


def chat_answer(step: Step) -> ChatResponse:
    return ChatResponse(message=_message(step), raw=step.raw)


def _message(step: Step) -> ChatMessage:
    return ChatMessage(role=MessageRole.ASSISTANT, content=step.text)


def completion_item(step: Step) -> CompletionResponse:
    return CompletionResponse(text=step.text, delta=step.delta, raw=step.raw)


def completion_answer(step: Step) -> CompletionResponse:
    return CompletionResponse(text=step.text, raw=step.raw)


@contextmanager
def own_errors() -> Iterator[None]:
    """LlamaIndex swallows `ValueError` and `TypeError` and answers "Empty Response": give them our type."""
    try:
        yield
    except (ValueError, TypeError) as error:
        if isinstance(error, FusionRAGError):
            raise
        raise FusionRAGError(f"the engine failed: {type(error).__name__}: {error}") from error
