"""Refreshing: enriching again the chunks whose best neighbours changed since they were enriched.

An ingestion never computes an unchanged document again for chunks that came later, and a deletion leaves the chunks it
touched with their plain caches. `refresh` catches up, the most changed first.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from .catalog import Catalog, ChunkRow
from .neighbours import most_similar


@dataclass(frozen=True)
class StaleChunk:
    """A chunk to enrich again. `change`: share of its best neighbours that its enriched cache was made without; 1 where
    it has none."""

    row: ChunkRow
    neighbours: tuple[str, ...]
    change: float


@dataclass(frozen=True)
class RefreshReport:
    """What `Engine.refresh` did. `stale` lists all chunks found, the most changed first; the first `num_refreshed` of
    them were enriched again."""

    stale: list[StaleChunk]
    num_chunks: int = 0
    num_refreshed: int = 0
    bytes_written: int = 0
    duration_s: float = 0.0

    @property
    def num_left(self) -> int:
        return len(self.stale) - self.num_refreshed

    def summary(self) -> str:
        """One line for people."""
        return (
            f"{self.num_chunks} chunks, {len(self.stale)} stale: {self.num_refreshed} enriched again, {self.num_left} "
            f"left; {self.bytes_written / 1e6:.1f} MB written in {self.duration_s:.1f} s"
        )


class Deadline:
    """A budget in chunks and in seconds; None is unlimited."""

    def __init__(self, num_chunks: int | None, seconds: float | None) -> None:
        self.num_chunks = num_chunks
        self._end = None if seconds is None else time.perf_counter() + seconds

    def is_over(self, num_done: int) -> bool:
        if self.num_chunks is not None and num_done >= self.num_chunks:
            return True
        return self._end is not None and time.perf_counter() >= self._end


def find_stale(catalog: Catalog, scope: str | None, top_n: int) -> list[StaleChunk]:
    """Chunks of a scope (None: of all) whose best neighbours are not those they were enriched with.

    Best neighbours are the most similar chunks by embedding. A chunk without an embedding keeps the neighbours it was
    given, less those that were deleted; it is stale where it lost its enriched cache.
    """
    heat = catalog.heat()
    stale = []
    for name in catalog.scopes() if scope is None else [scope]:
        rows = catalog.all(name)
        best = most_similar(catalog, name, {row.key: row.content for row in rows}, top_n)
        for row in rows:
            wanted = tuple(best.get(row.key, row.neighbours))[:top_n]
            is_enriched = row.enriched_key is not None and row.top_n == top_n
            made_with = set(row.neighbours) if is_enriched else set()
            if wanted and (change := len(set(wanted) - made_with) / len(wanted)) > 0:
                stale.append(StaleChunk(row, wanted, change))
    return sorted(stale, key=lambda chunk: (-chunk.change, -heat.get(chunk.row.key, 0.0), chunk.row.key))
