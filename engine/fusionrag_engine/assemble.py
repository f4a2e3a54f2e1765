"""Assembling a request: look up each chunk, and lay its cached rows out at their places in the prompt."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from .canvas import Canvas
from .errors import CacheMissError
from .layout import Prompt, PromptLayout, Segment
from .library import ChunkLibrary
from .rope import Rope
from .store import Entry
from .types import ChunkStatus, Request, as_chunks


def place_entry(canvas: Canvas, rope: Rope, entry: Entry, position: int) -> None:
    """Write an entry's rows to `position ...` of the canvas, its keys moved there."""
    stop = position + len(entry.token_ids)
    rope.place(entry.keys.to(canvas.keys.device), position - entry.start, canvas.keys[:, :, position:stop])
    canvas.values[:, :, position:stop].copy_(entry.values)


@dataclass
class Assembly:
    """What is cached of a prompt, and where.

    Attributes:
        num_prefix_tokens: leading tokens the prompt shares with the cache prefix `P`; exact.
        status, miss_reason: one a chunk.
        reusable: segments whose cached rows are approximate; critical tokens are chosen among them.
        exact: segments (beside the prefix) whose cached rows equal Full Attention's.
        load_s, assemble_s: time spent reading caches, and placing them.
    """

    num_prefix_tokens: int = 0
    status: list[ChunkStatus] = field(default_factory=list)
    miss_reason: list[str | None] = field(default_factory=list)
    reusable: list[Segment] = field(default_factory=list)
    exact: list[Segment] = field(default_factory=list)
    load_s: float = 0.0
    assemble_s: float = 0.0


class Assembler:
    """Fills canvases from the library."""

    def __init__(self, rope: Rope, layout: PromptLayout, library: ChunkLibrary, *, top_n: int, on_miss: str) -> None:
        self.rope = rope
        self.layout = layout
        self.library = library
        self.top_n = top_n
        self.on_miss = on_miss

    def assemble(self, request: Request, prompt: Prompt, prefix: Callable[[], Canvas], canvas: Canvas) -> Assembly:
        """Place everything cached. `prefix()` gives the rows of `P`. `method="full"` uses no cache at all.

        Raises:
            CacheMissError: a chunk has no cache and the engine was configured with `on_miss="error"`.
        """
        result = Assembly()
        if request.method == "full":
            result.status = ["miss"] * len(request.chunks)
            result.miss_reason = ["method 'full' uses no cache"] * len(request.chunks)
            return result
        self._place_prefix(prompt, prefix(), canvas, result)
        for segment in prompt.chunks:
            self._place_chunk(request, prompt, segment, canvas, result)
        return result

    def _place_prefix(self, prompt: Prompt, prefix: Canvas, canvas: Canvas, result: Assembly) -> None:
        begin = time.perf_counter()
        shared = 0
        for ours, theirs in zip(self.layout.prefix_ids, prompt.token_ids, strict=False):
            if ours != theirs:
                break
            shared += 1
        canvas.keys[:, :, :shared] = prefix.keys[:, :, :shared]
        canvas.values[:, :, :shared] = prefix.values[:, :, :shared]
        result.num_prefix_tokens = shared
        result.assemble_s += time.perf_counter() - begin

    def _place_chunk(
        self, request: Request, prompt: Prompt, segment: Segment, canvas: Canvas, result: Assembly
    ) -> None:
        assert segment.chunk is not None
        chunk = as_chunks(request.chunks)[segment.chunk]
        token_ids = prompt.token_ids[segment.start : segment.stop]
        # Behind P alone a chunk's plain cache is what Full Attention computes there.
        is_behind_prefix = segment.start == len(self.layout.prefix_ids) == result.num_prefix_tokens
        begin = time.perf_counter()
        status, entry = self._find(request.method, token_ids, chunk.scope, is_behind_prefix)
        result.load_s += time.perf_counter() - begin
        result.status.append(status)
        result.miss_reason.append(None)
        if status == "miss":
            result.miss_reason[-1] = f"no cache of this text in scope {chunk.scope!r}"
            if self.on_miss == "error":
                raise CacheMissError(
                    f"chunk {segment.chunk} (id={chunk.id!r}, scope={chunk.scope!r}) has no cache; precompute it, or "
                    f"set on_miss='compute'"
                )
            return
        if entry is None:
            return
        begin = time.perf_counter()
        place_entry(canvas, self.rope, entry, segment.start)
        (result.exact if status == "prefix" else result.reusable).append(segment)
        result.assemble_s += time.perf_counter() - begin

    def _find(
        self, method: str, token_ids: list[int], scope: str, is_behind_prefix: bool
    ) -> tuple[ChunkStatus, Entry | None]:
        if not token_ids:
            return "plain", None
        if is_behind_prefix and (entry := self.library.plain(token_ids, scope)) is not None:
            return "prefix", entry
        if method == "fusionrag" and (entry := self.library.enriched(token_ids, scope, self.top_n)) is not None:
            return "enriched", entry
        if not is_behind_prefix and (entry := self.library.plain(token_ids, scope)) is not None:
            return "plain", entry
        return "miss", None
