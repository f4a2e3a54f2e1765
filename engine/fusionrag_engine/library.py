"""`ChunkLibrary`: keys, catalog and store as one thing - what is cached for a chunk, and how it is deleted."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .catalog import Catalog, ChunkRow
from .keys import CacheKeys
from .store import ChunkStore, Entry, is_being_written

WRITING_S = 3600.0
"""How long `gc` leaves files alone that a writer announced, in seconds."""


class ChunkLibrary:
    """The chunk caches of one namespace (`CacheKeys.namespace`): one model, tokenizer, dtype, codec and cache prefix.

    On disk a namespace has a directory of its own, so caches made under other settings are never even looked at.
    """

    def __init__(self, keys: CacheKeys, cache_dir: Path | None, host_bytes: int, disk_bytes: int | None) -> None:
        root = None if cache_dir is None else cache_dir / keys.namespace
        self.keys = keys
        self.disk_bytes = disk_bytes
        self.store = ChunkStore(host_bytes, None if root is None else root / "caches")
        self.catalog = Catalog(None if root is None else root / "catalog.sqlite")

    def close(self) -> None:
        self.catalog.close()

    def plain(self, token_ids: Sequence[int], scope: str) -> Entry | None:
        """The plain cache of a chunk, or None."""
        key = self.keys.plain(token_ids, scope)
        if self.catalog.get(key) is None:
            # Another process may have deleted the chunk: its file counts, not what this one has in memory.
            self.store.host.remove(key)
        return self._get(key, token_ids)

    def enriched(self, token_ids: Sequence[int], scope: str, top_n: int) -> Entry | None:
        """The current enriched cache of a chunk, made with this `top_n`, or None."""
        row = self.catalog.get(self.keys.plain(token_ids, scope))
        if row is None or row.enriched_key is None or row.top_n != top_n:
            return None
        return self._get(row.enriched_key, token_ids)

    def has_enriched(self, row: ChunkRow, top_n: int) -> bool:
        return row.enriched_key is not None and row.top_n == top_n and self.store.has(row.enriched_key)

    def _get(self, key: str, token_ids: Sequence[int]) -> Entry | None:
        is_expected = self.catalog.is_stored(key)
        entry = self.store.get(key, token_ids, is_expected=is_expected)
        if entry is None and is_expected:
            self.catalog.note_missing(key)
        elif entry is not None and self.disk_bytes is not None:
            self.catalog.touch([key])
        return entry

    def put_plain(self, entry: Entry, scope: str, content: str, embedding: NDArray[np.float32] | None = None) -> int:
        """Store a plain cache, then record it; returns bytes written."""
        size = self._put(entry)
        self.catalog.add(ChunkRow(entry.key, scope, content, entry.token_ids), embedding)
        return size

    def put_enriched(self, entry: Entry, plain_key: str, top_n: int, neighbours: Sequence[str]) -> int:
        """Store an enriched cache, then record it, then drop the one it replaces; returns bytes written."""
        row = self.catalog.get(plain_key)
        size = self._put(entry)
        self.catalog.set_enriched(plain_key, entry.key, top_n, neighbours)
        if row is not None and row.enriched_key not in (None, entry.key):
            self._remove_cache(row.enriched_key)
        return size

    def _put(self, entry: Entry) -> int:
        if self.store.disk is None:
            return self.store.put(entry)
        self.catalog.note_stored(entry.key, 0)  # announced, so that `gc` leaves the file alone until it counts
        size = self.store.put(entry)
        self.catalog.note_stored(entry.key, size)
        self._make_room(keep=entry.key)
        return size

    def _make_room(self, keep: str) -> None:
        """Drop the least recently used files above the disk budget; what is dropped is a miss later."""
        if self.disk_bytes is None or (excess := self.catalog.num_bytes() - self.disk_bytes) <= 0:
            return
        for key, size in self.catalog.least_recently_used():
            if excess <= 0:
                break
            if key != keep:
                self._remove_cache(key)
                excess -= size

    def _remove_cache(self, key: str | None) -> None:
        if key is not None:
            self.store.remove(key)
            self.catalog.note_removed(key)

    def delete(self, scope: str, key: str, chunk_id: str | None) -> int:
        """Forget a chunk under one id (None: under all); returns the number of caches dropped.

        Its caches go with its last id. So does every enriched cache it went into, which carries its traces.
        """
        if chunk_id is not None:
            self.catalog.remove_id(scope, chunk_id)
            if self.catalog.has_ids(key):
                return 0
        row = self.catalog.get(key)
        touched = self.catalog.enriched_with(key)
        self.catalog.clear_enriched(other.key for other in touched)
        self.catalog.remove(key)
        dropped = [key, *(other.enriched_key for other in [*touched, *([row] if row else [])] if other.enriched_key)]
        for name in dropped:
            self._remove_cache(name)
        return len(dropped)

    def gc(self) -> int:
        """Remove files that no chunk refers to, and what dead writers left behind; returns how many files."""
        if self.store.disk is None:
            return 0
        found = list(self.store.disk.list())  # before the catalog is read: what is recorded meanwhile is not stray
        leftovers = list(self.store.disk.leftovers())
        being_written = self.catalog.noted_since(time.time() - WRITING_S)
        wanted = {name for row in self.catalog.all() for name in (row.key, row.enriched_key)} | being_written
        stray = [key for key, _ in found if key not in wanted]
        for key in stray:
            self._remove_cache(key)
        dead = [path for key, path in leftovers if key not in being_written or not is_being_written(path)]
        for path in dead:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        return len(stray) + len(dead)

    def verify(self) -> list[str]:
        """Read every recorded cache; bad ones are moved aside. Returns one line a problem, none when all is well."""
        problems = []
        for row in self.catalog.all():
            for kind, key in (("plain", row.key), ("enriched", row.enriched_key)):
                if key is not None and self.store.read_fresh(key, row.token_ids) is None:
                    problems.append(f"{kind} cache {key} of scope {row.scope!r} is missing or bad")
        return problems
