"""The catalog: which chunks exist, under which ids, with which embeddings, what their enriched caches were made of, and
which tiers hold their caches.

Caches themselves are found by key; the catalog adds what keys cannot tell. Losing it costs a new ingestion, never a
wrong answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .database import Database
from .heat import HALF_LIFE_S

_SCHEMA = """
CREATE TABLE IF NOT EXISTS chunks (
    key TEXT PRIMARY KEY, scope TEXT NOT NULL, content TEXT NOT NULL, token_ids BLOB NOT NULL, embedding BLOB,
    enriched_key TEXT, top_n INTEGER, neighbours TEXT NOT NULL DEFAULT '[]', added REAL NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS chunks_scope ON chunks (scope);
CREATE TABLE IF NOT EXISTS neighbours (key TEXT NOT NULL, neighbour TEXT NOT NULL, PRIMARY KEY (key, neighbour));
CREATE INDEX IF NOT EXISTS neighbours_of ON neighbours (neighbour);
CREATE TABLE IF NOT EXISTS ids (scope TEXT NOT NULL, id TEXT NOT NULL, key TEXT NOT NULL, PRIMARY KEY (scope, id));
CREATE INDEX IF NOT EXISTS ids_key ON ids (key);
CREATE TABLE IF NOT EXISTS files (key TEXT NOT NULL, tier TEXT NOT NULL, num_bytes INTEGER NOT NULL,
    heat REAL NOT NULL, noted REAL NOT NULL, PRIMARY KEY (key, tier));
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


@dataclass(frozen=True)
class ChunkRow:
    """What the catalog knows of one chunk.

    `neighbours` are plain keys, most similar first: what its enriched cache was made with, or, where it has none any
    more, what is left of them.
    """

    key: str
    scope: str
    content: str
    token_ids: tuple[int, ...]
    enriched_key: str | None = None
    top_n: int | None = None
    neighbours: tuple[str, ...] = ()


class Catalog(Database):
    """One catalog file (None: in memory). Every method is one transaction; safe to use from several threads."""

    def __init__(self, path: Path | None) -> None:
        super().__init__(path, _SCHEMA)

    def set_facts(self, facts: Mapping[str, Any]) -> None:
        """Note what the catalog's chunks were computed with, for people and commands that have no model."""
        query = "INSERT OR REPLACE INTO facts VALUES (?, ?)"
        self._note(*((query, (name, json.dumps(value, default=str))) for name, value in facts.items()))

    def facts(self) -> dict[str, Any]:
        return {name: json.loads(value) for name, value in self._read("SELECT name, value FROM facts")}

    def add(self, row: ChunkRow, embedding: NDArray[np.float32] | None) -> None:
        """Record a chunk whose plain cache is stored. An enrichment recorded before stays."""
        blob = None if embedding is None else embedding.astype("<f4").tobytes()
        tokens = np.asarray(row.token_ids, "<i4").tobytes()
        query = (
            "INSERT INTO chunks (key, scope, content, token_ids, embedding, added) VALUES (?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (key) DO UPDATE SET embedding = coalesce(excluded.embedding, embedding), "
            "added = excluded.added"
        )
        self._write((query, (row.key, row.scope, row.content, tokens, blob, time.time())))

    def set_id(self, scope: str, chunk_id: str, key: str) -> None:
        """Let `chunk_id` name that chunk, and no other one."""
        self._write(("INSERT OR REPLACE INTO ids (scope, id, key) VALUES (?, ?, ?)", (scope, chunk_id, key)))

    def set_enriched(self, key: str, enriched_key: str, top_n: int, neighbours: Sequence[str]) -> bool:
        """Record that the chunk's enriched cache is stored.

        Returns False, and records nothing, if the chunk or a neighbour was deleted meanwhile: the cache carries traces
        of it.
        """
        wanted = [key, *neighbours]
        places = ", ".join("?" * len(wanted))
        query = (
            "UPDATE chunks SET enriched_key = ?, top_n = ?, neighbours = ? WHERE key = ? AND "
            f"(SELECT count(*) FROM chunks WHERE key IN ({places})) = ?"
        )
        names = json.dumps(list(neighbours))
        owns = "(SELECT enriched_key FROM chunks WHERE key = ?) = ?"
        self._write(
            (query, (enriched_key, top_n, names, key, *wanted, len(set(wanted)))),
            (f"DELETE FROM neighbours WHERE key = ? AND {owns}", (key, key, enriched_key)),
            *(
                (f"INSERT OR IGNORE INTO neighbours SELECT ?, ? WHERE {owns}", (key, neighbour, key, enriched_key))
                for neighbour in neighbours
            ),
        )
        row = self.get(key)
        return row is not None and row.enriched_key == enriched_key

    def forget_neighbour(self, neighbour: str) -> list[ChunkRow]:
        """Take a chunk out of every enrichment it went into; returns the rows as they were."""
        touched = self.enriched_with(neighbour)
        update = "UPDATE chunks SET enriched_key = NULL, top_n = NULL, neighbours = ? WHERE key = ?"
        for row in touched:
            left = json.dumps([name for name in row.neighbours if name != neighbour])
            self._write((update, (left, row.key)))
        self._write(("DELETE FROM neighbours WHERE neighbour = ?", (neighbour,)))
        return touched

    def clear_enriched(self, key: str) -> None:
        """Note that a chunk has no enriched cache any more; its neighbours stay known, for the next one."""
        self._write(("UPDATE chunks SET enriched_key = NULL, top_n = NULL WHERE key = ?", (key,)))

    def get(self, key: str) -> ChunkRow | None:
        found = self._look(f"SELECT {_COLUMNS} FROM chunks WHERE key = ?", (key,))
        return _row(found[0]) if found else None

    def has(self, key: str) -> bool:
        return bool(self._look("SELECT 1 FROM chunks WHERE key = ?", (key,)))

    def enriched_key(self, key: str, top_n: int) -> str | None:
        """Key of the chunk's enriched cache made with this `top_n`, or None."""
        query = "SELECT enriched_key FROM chunks WHERE key = ? AND top_n = ? AND enriched_key IS NOT NULL"
        found = self._look(query, (key, top_n))
        return found[0][0] if found else None

    def is_enriched(self, key: str) -> bool:
        return bool(self._look("SELECT 1 FROM chunks WHERE key = ? AND enriched_key IS NOT NULL", (key,)))

    def all(self, scope: str | None = None) -> list[ChunkRow]:
        """Every chunk, or those of one scope."""
        where, values = ("", ()) if scope is None else (" WHERE scope = ?", (scope,))
        return [_row(found) for found in self._read(f"SELECT {_COLUMNS} FROM chunks{where} ORDER BY key", values)]

    def counts(self, scope: str | None = None) -> tuple[int, int]:
        """Numbers of chunks, and of those that have an enriched cache."""
        where, values = ("", ()) if scope is None else (" WHERE scope = ?", (scope,))
        query = f"SELECT count(*), count(enriched_key) FROM chunks{where}"
        ((num_chunks, num_enriched),) = self._read(query, values) or [(0, 0)]
        return num_chunks, num_enriched

    def scopes(self) -> list[str]:
        return [scope for (scope,) in self._read("SELECT DISTINCT scope FROM chunks ORDER BY scope")]

    def added(self) -> dict[str, float]:
        """When each chunk was last ingested, in seconds since the epoch."""
        return dict(self._read("SELECT key, added FROM chunks"))

    def ids_of(self, key: str) -> list[str]:
        return [chunk_id for (chunk_id,) in self._read("SELECT id FROM ids WHERE key = ? ORDER BY id", (key,))]

    def keys_of(self, chunk_id: str, scope: str | None = None) -> list[tuple[str, str]]:
        """`(scope, key)` of the chunks an id names, in one scope or in all."""
        if scope is None:
            return self._read("SELECT scope, key FROM ids WHERE id = ?", (chunk_id,))
        return self._read("SELECT scope, key FROM ids WHERE id = ? AND scope = ?", (chunk_id, scope))

    def remove_id(self, scope: str, chunk_id: str) -> None:
        self._write(("DELETE FROM ids WHERE scope = ? AND id = ?", (scope, chunk_id)))

    def has_ids(self, key: str) -> bool:
        return bool(self._read("SELECT 1 FROM ids WHERE key = ? LIMIT 1", (key,)))

    def enriched_with(self, key: str) -> list[ChunkRow]:
        """Chunks whose enriched cache was made with this one."""
        names = self._read("SELECT key FROM neighbours WHERE neighbour = ?", (key,))
        return [row for row in (self.get(name) for (name,) in names) if row is not None]

    def remove(self, key: str) -> None:
        self._write(*((f"DELETE FROM {table} WHERE key = ?", (key,)) for table in ("chunks", "neighbours", "ids")))

    def embeddings(self, scope: str) -> tuple[list[str], list[str], list[NDArray[np.float32]]]:
        """Keys, contents and embeddings of the scope's chunks that have one, in a fixed order."""
        query = "SELECT key, content, embedding FROM chunks WHERE scope = ? AND embedding IS NOT NULL ORDER BY key"
        rows = self._read(query, (scope,))
        return [row[0] for row in rows], [row[1] for row in rows], [np.frombuffer(row[2], "<f4") for row in rows]

    # Files of the durable tiers

    def note_stored(self, key: str, tier: str, num_bytes: int) -> None:
        """Note that a cache of that size is stored; 0 while it is being written."""
        moment = time.time()
        query = (
            "INSERT INTO files VALUES (?, ?, ?, ?, ?) ON CONFLICT (key, tier) DO UPDATE SET "
            "num_bytes = excluded.num_bytes, heat = max(heat, excluded.heat), noted = excluded.noted"
        )
        self._write((query, (key, tier, num_bytes, moment / HALF_LIFE_S, moment)))

    def note_promoted(self, key: str, tier: str, num_bytes: int, heat: float) -> None:
        """As `note_stored`, on the way of a request."""
        query = "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?)"
        self._note((query, (key, tier, num_bytes, heat, time.time())))

    def note_removed(self, key: str, tier: str | None = None) -> None:
        """Note that a tier (None: any) no longer holds a cache."""
        where, values = ("", ()) if tier is None else (" AND tier = ?", (tier,))
        self._write((f"DELETE FROM files WHERE key = ?{where}", (key, *values)))

    def note_missing(self, key: str) -> None:
        """As `note_removed`, found out by a request."""
        self._note(("DELETE FROM files WHERE key = ? AND num_bytes > 0", (key,)))

    def note_uses(self, heat: Mapping[str, float]) -> None:
        """Note how hot stored caches are now."""
        moment = time.time()
        query = "UPDATE files SET heat = max(heat, ?), noted = ? WHERE key = ?"
        self._note(*((query, (value, moment, key)) for key, value in heat.items()))

    def is_stored(self, key: str, tier: str | None = None) -> bool:
        """Whether a tier (None: any) should hold a cache; one that is only announced does not count."""
        where, values = ("", ()) if tier is None else (" AND tier = ?", (tier,))
        return bool(self._look(f"SELECT 1 FROM files WHERE key = ? AND num_bytes > 0{where}", (key, *values)))

    def stored(self) -> list[tuple[str, str, int]]:
        """`(key, tier, bytes)` of every cache that a durable tier should hold."""
        return self._read("SELECT key, tier, num_bytes FROM files WHERE num_bytes > 0 ORDER BY key, tier")

    def noted_since(self, moment: float) -> set[str]:
        """Keys whose caches were stored, announced or used since `moment` (seconds since the epoch)."""
        return {key for (key,) in self._read("SELECT key FROM files WHERE noted >= ?", (moment,))}

    def heat(self) -> dict[str, float]:
        """Heat of every stored cache."""
        return dict(self._read("SELECT key, max(heat) FROM files GROUP BY key"))

    def num_bytes(self, tier: str) -> int:
        return self.totals(tier)[1]

    def totals(self, tier: str) -> tuple[int, int]:
        """Number of caches in a tier, and their bytes."""
        query = "SELECT count(*), coalesce(sum(num_bytes), 0) FROM files WHERE tier = ?"
        ((num_entries, num_bytes),) = self._read(query, (tier,)) or [(0, 0)]
        return int(num_entries), int(num_bytes)

    def coldest(self, tier: str) -> list[tuple[str, int]]:
        """Keys and sizes of a tier's caches, coldest first."""
        return self._read("SELECT key, num_bytes FROM files WHERE tier = ? ORDER BY heat, rowid", (tier,))


_COLUMNS = "key, scope, content, token_ids, enriched_key, top_n, neighbours"


def _row(found: tuple[str, str, str, bytes, str | None, int | None, str]) -> ChunkRow:
    key, scope, content, tokens, enriched_key, top_n, neighbours = found
    token_ids = tuple(np.frombuffer(tokens, "<i4").tolist())
    return ChunkRow(key, scope, content, token_ids, enriched_key, top_n, tuple(json.loads(neighbours)))
