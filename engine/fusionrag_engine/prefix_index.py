"""`PrefixIndex`: exact rows of prompts seen before, by the path of segments that leads to them.

Alternative Path (FusionRAG, arXiv 2601.12904, section 4.1): a request takes the longest exact prefix there is, and each
later chunk falls back to its own cache behind `P`. A path is a chain of digests, one a chunk or a block of text, so a
hit means that every token before is the same. Only rows computed by full attention over exact rows come in here; they
are kept in memory, in the model's dtype, never through a codec.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .canvas import Canvas
from .heat import HeatMap
from .keys import CacheKeys, digest, token_digest
from .layout import Prompt
from .store import Entry, MemoryTier
from .types import Request, as_chunks

BLOCK = 128
"""Tokens of a text node at most: a chat history that grew shares its first blocks with what it was."""


@dataclass(frozen=True)
class Node:
    """Tokens `start .. stop - 1` of a prompt behind one path; `chunk` is the request's, None for text.

    `chunk_keys`: plain keys of the chunks on the path, its own included. They say whether the path may still be used.
    """

    start: int
    stop: int
    key: str
    chunk: int | None
    chunk_keys: tuple[str, ...]


class PrefixIndex:
    """Exact rows in host memory, `budget` bytes at most. Thread-safe.

    Args:
        is_known: whether a chunk of that plain key still exists; a path over a deleted chunk is never used.
        reserve: told how many bytes are taken, so that they leave another budget.
    """

    def __init__(
        self, keys: CacheKeys, budget: int, is_known: Callable[[str], bool], reserve: Callable[[int], None]
    ) -> None:
        self._keys = keys
        self._is_known = is_known
        self._reserve = reserve
        self._heat = HeatMap()
        self.tier = MemoryTier("prefix", budget, torch.device("cpu"), self._heat)
        self._lock = threading.Lock()
        self._paths: dict[str, tuple[str, ...]] = {}

    def nodes(self, request: Request, prompt: Prompt) -> list[Node]:
        """The prompt's path, one node a chunk or a block of text. Empty without chunks: then no scope is known.

        The scopes of all chunks are part of the path: whoever may not see one of them shares no prefix, and cannot
        tell from the time whether one was there.
        """
        chunks = as_chunks(request.chunks)
        if not chunks:
            return []
        path = digest(namespace=self._keys.namespace, kind="path", scopes=sorted({chunk.scope for chunk in chunks}))
        nodes: list[Node] = []
        chunk_keys: tuple[str, ...] = ()
        for segment in prompt.segments:
            step = BLOCK if segment.chunk is None else max(len(segment), 1)
            for start in range(segment.start, segment.stop, step):
                stop = min(start + step, segment.stop)
                ids = prompt.token_ids[start:stop]
                scope = None
                if segment.chunk is not None:
                    scope = chunks[segment.chunk].scope
                    chunk_keys = (*chunk_keys, self._keys.plain(ids, scope))
                path = digest(behind=path, scope=scope, token_ids=token_digest(ids))
                nodes.append(Node(start, stop, path, segment.chunk, chunk_keys))
        return nodes

    def get(self, node: Node, token_ids: list[int]) -> Entry | None:
        """The exact rows of a node, or None."""
        entry = self.tier.get(node.key)
        is_hit = entry is not None and entry.token_ids == tuple(token_ids[node.start : node.stop])
        if not is_hit or not all(map(self._is_known, node.chunk_keys)):
            self.tier.counts.num_misses += 1
            return None
        self.tier.counts.num_hits += 1
        self._heat.use([node.key])
        return entry

    def offer(self, nodes: list[Node], token_ids: list[int], canvas: Canvas) -> None:
        """Keep the rows of these nodes, which must be exact and follow each other in the prompt."""
        kept, room = [], self.tier.budget
        for node in nodes:
            room -= (node.stop - node.start) * _bytes_per_token(canvas)
            if room < 0:
                break
            kept.append(node)
        with self._lock:
            self._keep(kept, token_ids, canvas)

    def _keep(self, kept: list[Node], token_ids: list[int], canvas: Canvas) -> None:
        # From the end, so that the beginning, without which the rest is of no use, is the last to go.
        for node in reversed(kept):
            self._heat.use([node.key])
            if node.key in self.tier:
                continue
            keys, values = canvas.rows(node.start, node.stop)
            ids = tuple(token_ids[node.start : node.stop])
            if self.tier.put(Entry(node.key, ids, node.start, keys.cpu(), values.cpu())):
                self._paths[node.key] = node.chunk_keys
        self._tidy()

    def forget(self, chunk_key: str) -> None:
        """Drop every path over a chunk: the rows behind it carry its traces."""
        with self._lock:
            for key, chunk_keys in self._paths.items():
                if chunk_key in chunk_keys:
                    self.tier.remove(key)
            self._tidy()

    def _tidy(self) -> None:
        self._paths = {key: chunk_keys for key, chunk_keys in self._paths.items() if key in self.tier}
        self._reserve(self.tier.num_bytes)


def _bytes_per_token(canvas: Canvas) -> int:
    return (canvas.keys.nbytes + canvas.values.nbytes) // max(canvas.capacity, 1)
