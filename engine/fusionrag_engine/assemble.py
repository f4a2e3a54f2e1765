"""Assembling a request: look up each chunk, and lay its cached rows out at their places in the prompt."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from .canvas import Canvas
from .errors import CacheMissError
from .layout import Prompt, PromptLayout, Segment
from .library import ChunkLibrary
from .prefix_index import Node
from .rope import Rope
from .store import Entry
from .store.codecs import decode
from .types import ChunkStatus, Request, as_chunks


def place_entry(canvas: Canvas, rope: Rope, entry: Entry, position: int) -> None:
    """Write an entry's rows to `position ...` of the canvas: decoded, keys moved there in float32, cast once."""
    stop = position + len(entry.token_ids)
    keys, values = decode(entry.to(canvas.keys.device))
    rope.place(keys, position - entry.start, canvas.keys[:, :, position:stop])
    canvas.values[:, :, position:stop].copy_(values)


@dataclass
class Assembly:
    """What is cached of a prompt, and where.

    Attributes:
        num_prefix_tokens: leading tokens whose rows are exact: those of the cache prefix `P`, and of the longest exact
            prefix known behind it.
        num_exact_tokens: leading tokens whose rows are exact once what is missing before them is computed.
        status, miss_reason: one a chunk.
        reusable: segments whose cached rows are approximate; critical tokens are chosen among them.
        nodes: the prompt's path in the prefix index.
        load_s, assemble_s: time spent reading caches, and placing them.
    """

    num_prefix_tokens: int = 0
    num_exact_tokens: int = 0
    nodes: list[Node] = field(default_factory=list)
    status: list[ChunkStatus] = field(default_factory=list)
    miss_reason: list[str | None] = field(default_factory=list)
    reusable: list[Segment] = field(default_factory=list)
    load_s: float = 0.0
    assemble_s: float = 0.0


class Assembler:
    """Fills canvases from the library."""

    def __init__(
        self,
        rope: Rope,
        layout: PromptLayout,
        library: ChunkLibrary,
        *,
        top_n: int,
        on_miss: str,
        keep_plain: bool = True,
    ) -> None:
        self.rope = rope
        self.layout = layout
        self.library = library
        self.top_n = top_n
        self.on_miss = on_miss
        self.keep_plain = keep_plain

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
        begin_of_chunks = result.num_prefix_tokens
        self._place_path(request, prompt, canvas, result)
        self._expect(request, prompt, result)
        for segment in prompt.chunks:
            if segment.start < segment.stop <= result.num_prefix_tokens:
                result.status.append("prefix")
                result.miss_reason.append(None)
            else:
                is_first = segment.start == len(self.layout.prefix_ids) == begin_of_chunks
                self._place_chunk(request, prompt, segment, canvas, result, is_first=is_first)
        starts = [segment.start for segment in result.reusable]
        result.num_exact_tokens = min(starts, default=len(prompt.token_ids))
        return result

    def _expect(self, request: Request, prompt: Prompt, result: Assembly) -> None:
        begin = time.perf_counter()
        chunks = as_chunks(request.chunks)
        wanted = [
            (prompt.token_ids[segment.start : segment.stop], chunks[segment.chunk].scope)
            for segment in prompt.chunks
            if segment.chunk is not None and segment.stop > max(result.num_prefix_tokens, segment.start)
        ]
        self.library.expect(wanted, self.top_n if request.method == "fusionrag" else None)
        result.load_s += time.perf_counter() - begin

    def offer(self, prompt: Prompt, canvas: Canvas, assembly: Assembly) -> None:
        """Once a prompt's missing rows are computed: keep those that are exact for the prompts to come. `method="full"`
        has no nodes, and leaves nothing behind."""
        exact = [node for node in assembly.nodes if node.stop <= assembly.num_exact_tokens]
        # Up to the last chunk among them, or the text before the first one: behind it comes the question.
        ends = [node.stop for node in exact if node.chunk is not None] + [prompt.segments[0].stop]
        nodes = [node for node in exact if node.stop <= max(ends)]
        first = next((node for node in nodes if node.chunk is not None), None)
        if first is not None and first.start == len(self.layout.prefix_ids) and self._has_own_copy(first):
            nodes.remove(first)
        shared = self._num_shared(prompt)
        self.library.prefixes.offer([node for node in nodes if node.stop > shared], prompt.token_ids, canvas)

    def _has_own_copy(self, node: Node) -> bool:
        """Whether a first chunk's exact rows are kept, or about to be, as its plain cache."""
        key = node.chunk_keys[-1]
        return self.library.codec == "none" and (self.keep_plain or not self.library.catalog.is_enriched(key))

    def _num_shared(self, prompt: Prompt) -> int:
        """Leading tokens that the prompt shares with `P`."""
        shared = 0
        for ours, theirs in zip(self.layout.prefix_ids, prompt.token_ids, strict=False):
            if ours != theirs:
                break
            shared += 1
        return shared

    def _place_prefix(self, prompt: Prompt, prefix: Canvas, canvas: Canvas, result: Assembly) -> None:
        begin = time.perf_counter()
        shared = self._num_shared(prompt)
        canvas.keys[:, :, :shared] = prefix.keys[:, :, :shared]
        canvas.values[:, :, :shared] = prefix.values[:, :, :shared]
        result.num_prefix_tokens = shared
        result.assemble_s += time.perf_counter() - begin

    def _place_path(self, request: Request, prompt: Prompt, canvas: Canvas, result: Assembly) -> None:
        """Extend the exact prefix node by node, as far as its rows are known (FusionRAG, section 4.1)."""
        begin = time.perf_counter()
        result.nodes = self.library.prefixes.nodes(request, prompt)
        behind_p = len(self.layout.prefix_ids)
        is_behind_p = result.num_prefix_tokens == behind_p
        for node in result.nodes:
            if node.stop <= result.num_prefix_tokens:
                continue
            entry = self.library.prefixes.get(node, prompt.token_ids)
            if entry is None and node.chunk is not None and is_behind_p and node.start == behind_p:
                # Behind P alone a chunk's plain cache is what Full Attention computes there, unless a codec changed it.
                scope = as_chunks(request.chunks)[node.chunk].scope
                entry = self.library.plain(prompt.token_ids[node.start : node.stop], scope)
                if entry is not None and entry.is_lossy:
                    entry = None
            if entry is None:
                break
            place_entry(canvas, self.rope, entry, node.start)
            result.num_prefix_tokens = node.stop
        result.load_s += time.perf_counter() - begin

    def _place_chunk(
        self,
        request: Request,
        prompt: Prompt,
        segment: Segment,
        canvas: Canvas,
        result: Assembly,
        *,
        is_first: bool,
    ) -> None:
        assert segment.chunk is not None
        chunk = as_chunks(request.chunks)[segment.chunk]
        token_ids = prompt.token_ids[segment.start : segment.stop]
        begin = time.perf_counter()
        status, entry = self._find(request.method, token_ids, chunk.scope, is_first=is_first)
        result.load_s += time.perf_counter() - begin
        result.status.append(status)
        result.miss_reason.append(None)
        if status == "miss":
            result.miss_reason[-1] = f"no cache of this text in scope {chunk.scope!r}"
            if is_first:
                result.miss_reason[-1] = f"no plain cache of this text, which stands first, in scope {chunk.scope!r}"
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
        result.reusable.append(segment)
        result.assemble_s += time.perf_counter() - begin

    def _find(
        self, method: str, token_ids: list[int], scope: str, *, is_first: bool
    ) -> tuple[ChunkStatus, Entry | None]:
        """A chunk's cache. Where plain caches are dropped as a rule, the first chunk behind `P` is better computed than
        taken from its enriched one."""
        if not token_ids:
            return "plain", None
        if is_first and (entry := self.library.plain(token_ids, scope)) is not None:
            return "plain", entry
        if (
            method == "fusionrag"
            and (self.keep_plain or not is_first)
            and (entry := self.library.enriched(token_ids, scope, self.top_n)) is not None
        ):
            return "enriched", entry
        if not is_first and (entry := self.library.plain(token_ids, scope)) is not None:
            return "plain", entry
        return "miss", None
