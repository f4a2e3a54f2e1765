"""One call of the engine: its request, the answer as it comes, and what is kept of it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from langchain_core.messages.ai import InputTokenDetails, UsageMetadata

from fusionrag_engine import FusionRAGError, Request, Stats, TokenDelta

from .prompting import DocumentPrompt, call_metadata

if TYPE_CHECKING:
    from fusionrag_engine import Engine


class AnswerTimeoutError(FusionRAGError):
    """An answer took longer than the model's `timeout`; its generation was stopped."""


@dataclass(frozen=True)
class Call:
    """A request over a prompt. `timeout` in seconds, None for no limit; it is checked at each token."""

    engine: Engine
    model: str
    prompt: DocumentPrompt
    request: Request
    timeout: float | None = None

    def deltas(self) -> Iterator[TokenDelta]:
        """The answer token by token. Closing the iterator stops the generation."""
        begin = time.monotonic()
        source: Any = self.engine.stream(self.request)
        with closing(source):
            for delta in source:
                self._check(begin, delta)
                yield delta

    async def adeltas(self) -> AsyncIterator[TokenDelta]:
        """As `deltas`, without blocking the event loop."""
        begin = time.monotonic()
        source: Any = self.engine.astream(self.request)
        async with aclosing(source):
            async for delta in source:
                self._check(begin, delta)
                yield delta

    def pieces(self) -> Iterator[TokenDelta]:
        """The deltas that a user sees: those with text, and the last."""
        source: Any = self.deltas()
        with closing(source):
            yield from (delta for delta in source if delta.text or delta.stats is not None)

    async def apieces(self) -> AsyncIterator[TokenDelta]:
        """As `pieces`."""
        source: Any = self.adeltas()
        async with aclosing(source):
            async for delta in source:
                if delta.text or delta.stats is not None:
                    yield delta

    def metadata(self, last: TokenDelta) -> dict[str, Any]:
        """What is kept of the call, from its last delta."""
        assert last.stats is not None
        fusionrag = call_metadata(self.prompt, self.request, last.stats)
        return {"model_name": self.model, "finish_reason": last.finish_reason, "fusionrag": fusionrag}

    def _check(self, begin: float, delta: TokenDelta) -> None:
        if self.timeout is not None and delta.stats is None and time.monotonic() - begin > self.timeout:
            raise AnswerTimeoutError(
                f"no whole answer within timeout={self.timeout} s; raise it, or lower max_tokens or the number of "
                f"documents"
            )


def usage(stats: Stats | None) -> UsageMetadata:
    """Token counts in LangChain's form; prompt tokens whose rows came from a cache are `cache_read`."""
    assert stats is not None
    return UsageMetadata(
        input_tokens=stats.num_prompt_tokens,
        output_tokens=stats.num_generated_tokens,
        total_tokens=stats.num_prompt_tokens + stats.num_generated_tokens,
        input_token_details=InputTokenDetails(cache_read=stats.num_reused_tokens),
    )
