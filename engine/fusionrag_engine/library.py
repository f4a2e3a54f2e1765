"""`ChunkLibrary`: keys, catalog and store as one thing - what is cached for a chunk, and how it is deleted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from .catalog import Catalog, ChunkRow
from .keys import CacheKeys
from .locks import FileLocks
from .prefix_index import PrefixIndex
from .store import ChunkStore, Entry
from .store.codecs import encode
from .upkeep import Problem, Sweep, sweep, verify


class ChunkLibrary:
    """The chunk caches of one namespace (`CacheKeys.namespace`): one model, tokenizer, dtype, codec and cache prefix.

    Args:
        keys, catalog, store: of one namespace.
        locks: held while a chunk's caches are stored or deleted, so that processes do not cross each other.
        codec: how entries are kept; they come in as they were computed and go out as they are kept.
        scope_sharing: scope -> other scopes whose caches it may read, in this order, where it has none itself.
    """

    def __init__(
        self,
        keys: CacheKeys,
        catalog: Catalog,
        store: ChunkStore,
        locks: FileLocks,
        *,
        codec: str = "none",
        scope_sharing: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.keys = keys
        self.catalog = catalog
        self.store = store
        self.codec = codec
        self._locks = locks
        self.prefixes = PrefixIndex(keys, store.host.budget // 4, catalog.has, store.host.reserve)
        self._sharing = dict(scope_sharing or {})

    def close(self) -> None:
        self.store.flush_uses()
        self.catalog.close()

    def plain(self, token_ids: Sequence[int], scope: str) -> Entry | None:
        """The plain cache of a chunk, or None."""
        for readable in self.readable(scope):
            key = self.keys.plain(token_ids, readable)
            if not self.catalog.has(key):
                # Another process may have deleted the chunk: its file counts, not what this one has in memory.
                self.store.forget(key)
            if (entry := self._get(key, token_ids)) is not None:
                return entry
        return None

    def enriched(self, token_ids: Sequence[int], scope: str, top_n: int) -> Entry | None:
        """The current enriched cache of a chunk, made with this `top_n`, or None."""
        for readable in self.readable(scope):
            key = self.catalog.enriched_key(self.keys.plain(token_ids, readable), top_n)
            if key is not None and (entry := self._get(key, token_ids)) is not None:
                return entry
        return None

    def readable(self, scope: str) -> list[str]:
        """The scope itself, and those it may read."""
        return [scope, *self._sharing.get(scope, ())]

    def expect(self, chunks: Iterable[tuple[Sequence[int], str]], top_n: int | None) -> None:
        """Let the system begin to read what a request loads next, for chunks given as token ids and scope: enriched
        caches made with `top_n`, plain ones where there is none or it is None."""
        if self.store.disk is None:
            return
        keys = [self.keys.plain(token_ids, scope) for token_ids, scope in chunks]
        if top_n is not None:
            keys = [self.catalog.enriched_key(key, top_n) or key for key in keys]
        self.store.expect(keys)

    def has_enriched(self, row: ChunkRow, top_n: int) -> bool:
        return row.enriched_key is not None and row.top_n == top_n and self.store.has(row.enriched_key)

    def _get(self, key: str, token_ids: Sequence[int]) -> Entry | None:
        if (entry := self.store.get(key, token_ids)) is not None:
            return entry
        if self.catalog.is_stored(key):
            self.store.warn_vanished(key)
            self.catalog.note_missing(key)
        return None

    def put_plain(self, entry: Entry, scope: str, content: str, embedding: NDArray[np.float32] | None = None) -> int:
        """Store a plain cache, and record it; returns bytes written."""
        with self._locks.hold(entry.key):
            size = self.store.put(encode(entry, self.codec))
            self.catalog.add(ChunkRow(entry.key, scope, content, entry.token_ids), embedding)
        self.store.make_room(keep=entry.key)
        return size

    def put_enriched(self, entry: Entry, plain_key: str, top_n: int, neighbours: Sequence[str]) -> int:
        """Store an enriched cache, record it, and drop the one it replaces; returns bytes written.

        Nothing is kept, and 0 is returned, if a chunk that it was made with was deleted meanwhile.
        """
        with self._locks.hold(plain_key):
            row = self.catalog.get(plain_key)
            size = self.store.put(encode(entry, self.codec))
            if not self.catalog.set_enriched(plain_key, entry.key, top_n, neighbours):
                self.store.remove(entry.key)
                return 0
            if row is not None and row.enriched_key not in (None, entry.key):
                self.store.remove(row.enriched_key)
        self.store.make_room(keep=entry.key)
        return size

    def drop_plain(self, key: str) -> None:
        """Drop a plain cache that can be computed again; the chunk stays known."""
        with self._locks.hold(key):
            self.store.remove(key)

    def delete(self, scope: str, key: str, chunk_id: str | None) -> int:
        """Forget a chunk under one id (None: under all); returns the number of caches dropped.

        Its caches go with its last id. So does every enriched cache it went into, which carries its traces.
        """
        if chunk_id is not None:
            self.catalog.remove_id(scope, chunk_id)
            if self.catalog.has_ids(key):
                return 0
        with self._locks.hold(key):
            row = self.catalog.get(key)
            # First the chunk, so that no enrichment with it can be recorded any more.
            self.catalog.remove(key)
            touched = self.catalog.forget_neighbour(key)
            owners = [*touched, *([row] if row else [])]
            dropped = [key, *(owner.enriched_key for owner in owners if owner.enriched_key)]
            for name in dropped:
                self.store.remove(name)
        self.prefixes.forget(key)
        return len(dropped)

    def gc(self, live: set[str] | None = None, grace_s: float = 0.0, *, is_dry_run: bool = False) -> Sweep:
        return sweep(self, live, grace_s, is_dry_run=is_dry_run)

    def verify(self, *, can_repair: bool = False) -> list[Problem]:
        return verify(self, can_repair=can_repair)
