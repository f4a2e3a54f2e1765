"""The catalog: which chunks exist, under which ids, with which embeddings, and what their enriched caches were made of.

SQLite, so that a crash at any moment leaves a catalog that opens, and several processes may ingest into one store.
Caches themselves are found by key; the catalog adds what keys cannot tell. Losing it costs a new ingestion, never a
wrong answer.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger("fusionrag")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS chunks (
    key TEXT PRIMARY KEY, scope TEXT NOT NULL, content TEXT NOT NULL, token_ids BLOB NOT NULL, embedding BLOB,
    enriched_key TEXT, top_n INTEGER, neighbours TEXT NOT NULL DEFAULT '[]');
CREATE INDEX IF NOT EXISTS chunks_scope ON chunks (scope);
CREATE TABLE IF NOT EXISTS neighbours (key TEXT NOT NULL, neighbour TEXT NOT NULL, PRIMARY KEY (key, neighbour));
CREATE INDEX IF NOT EXISTS neighbours_of ON neighbours (neighbour);
CREATE TABLE IF NOT EXISTS ids (scope TEXT NOT NULL, id TEXT NOT NULL, key TEXT NOT NULL, PRIMARY KEY (scope, id));
CREATE INDEX IF NOT EXISTS ids_key ON ids (key);
CREATE TABLE IF NOT EXISTS uses (key TEXT PRIMARY KEY, num_bytes INTEGER NOT NULL, last_used REAL NOT NULL);
"""


BUSY_S = 60
"""How long a write waits for another process that writes, in seconds."""


@dataclass(frozen=True)
class ChunkRow:
    """What the catalog knows of one chunk. `neighbours` are plain keys, most similar first."""

    key: str
    scope: str
    content: str
    token_ids: tuple[int, ...]
    enriched_key: str | None = None
    top_n: int | None = None
    neighbours: tuple[str, ...] = ()


class Catalog:
    """One catalog file (None: in memory). Every method is one transaction; safe to use from several threads."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lock = threading.RLock()
        try:
            self._db = self._open()
        except sqlite3.DatabaseError as error:
            self._start_again(error)

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path or ":memory:", check_same_thread=False, timeout=BUSY_S)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.executescript(_SCHEMA)
        state = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if state != "ok":
            db.close()
            raise sqlite3.DatabaseError(state)
        return db

    def _start_again(self, error: sqlite3.DatabaseError) -> None:
        """Move a damaged file aside and open an empty catalog; errors that are no damage are raised again."""
        if self.path is None or type(error) is not sqlite3.DatabaseError:
            raise error
        with contextlib.suppress(AttributeError, sqlite3.Error):  # it may never have been open
            self._db.close()
        aside = self.path.with_suffix(f".{time.time_ns()}.corrupt")
        self.path.replace(aside)
        for suffix in ("-wal", "-shm"):
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        logger.warning("catalog %s is damaged (%s); moved to %s, ingest the chunks again", self.path, error, aside)
        self._db = self._open()

    def _read(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        """Rows of a query. A damaged catalog is one that holds nothing."""
        with self._lock:
            try:
                return self._db.execute(query, values).fetchall()
            except sqlite3.DatabaseError as error:
                self._start_again(error)
                return []

    def _write(self, *statements: tuple[str, Sequence[Any]]) -> None:
        """Run statements as one transaction."""
        with self._lock:
            try:
                self._run(statements)
            except sqlite3.DatabaseError as error:
                self._start_again(error)
                self._run(statements)

    def _note(self, *statements: tuple[str, Sequence[Any]]) -> None:
        """Bookkeeping on the way of a request: skipped where the catalog cannot be written at once."""
        with self._lock:
            self._db.execute("PRAGMA busy_timeout = 0")
            try:
                self._write(*statements)
            except sqlite3.OperationalError as error:  # read-only, a full disk, or another process writes
                logger.debug("catalog %s: a note was skipped: %s", self.path, error)
            finally:
                self._db.execute(f"PRAGMA busy_timeout = {BUSY_S * 1000}")

    def _run(self, statements: Sequence[tuple[str, Sequence[Any]]]) -> None:
        with self._db as db:
            for query, values in statements:
                db.execute(query, values)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def add(self, row: ChunkRow, embedding: NDArray[np.float32] | None) -> None:
        """Record a chunk whose plain cache is stored. An enrichment recorded before stays."""
        blob = None if embedding is None else embedding.astype("<f4").tobytes()
        tokens = np.asarray(row.token_ids, "<i4").tobytes()
        query = (
            "INSERT INTO chunks (key, scope, content, token_ids, embedding) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (key) DO UPDATE SET embedding = coalesce(excluded.embedding, embedding)"
        )
        self._write((query, (row.key, row.scope, row.content, tokens, blob)))

    def set_id(self, scope: str, chunk_id: str, key: str) -> None:
        """Let `chunk_id` name that chunk, and no other one."""
        self._write(("INSERT OR REPLACE INTO ids (scope, id, key) VALUES (?, ?, ?)", (scope, chunk_id, key)))

    def set_enriched(self, key: str, enriched_key: str, top_n: int, neighbours: Sequence[str]) -> None:
        """Record that the chunk's enriched cache is stored."""
        update = "UPDATE chunks SET enriched_key = ?, top_n = ?, neighbours = ? WHERE key = ?"
        self._write(
            (update, (enriched_key, top_n, json.dumps(list(neighbours)), key)),
            ("DELETE FROM neighbours WHERE key = ?", (key,)),
            *(("INSERT INTO neighbours VALUES (?, ?)", (key, neighbour)) for neighbour in neighbours),
        )

    def clear_enriched(self, keys: Iterable[str]) -> None:
        update = "UPDATE chunks SET enriched_key = NULL, top_n = NULL, neighbours = '[]' WHERE key = ?"
        for key in keys:
            self._write((update, (key,)), ("DELETE FROM neighbours WHERE key = ?", (key,)))

    def get(self, key: str) -> ChunkRow | None:
        found = self._read(f"SELECT {_COLUMNS} FROM chunks WHERE key = ?", (key,))
        return _row(found[0]) if found else None

    def all(self) -> list[ChunkRow]:
        return [_row(found) for found in self._read(f"SELECT {_COLUMNS} FROM chunks")]

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

    def touch(self, keys: Iterable[str]) -> None:
        """Note that stored caches were used now."""
        now = time.time()
        self._note(*(("UPDATE uses SET last_used = ? WHERE key = ?", (now, key)) for key in keys))

    def note_stored(self, key: str, num_bytes: int) -> None:
        """Note that a cache of that size is stored; 0 while it is being written."""
        self._write(("INSERT OR REPLACE INTO uses VALUES (?, ?, ?)", (key, num_bytes, time.time())))

    def note_removed(self, key: str) -> None:
        self._write(("DELETE FROM uses WHERE key = ?", (key,)))

    def note_missing(self, key: str) -> None:
        """As `note_removed`, found out by a request."""
        self._note(("DELETE FROM uses WHERE key = ?", (key,)))

    def is_stored(self, key: str) -> bool:
        return bool(self._read("SELECT 1 FROM uses WHERE key = ?", (key,)))

    def noted_since(self, moment: float) -> set[str]:
        """Keys whose caches were stored, announced or used since `moment` (seconds since the epoch)."""
        return {key for (key,) in self._read("SELECT key FROM uses WHERE last_used >= ?", (moment,))}

    def num_bytes(self) -> int:
        return int(self._read("SELECT coalesce(sum(num_bytes), 0) FROM uses")[0][0])

    def least_recently_used(self) -> list[tuple[str, int]]:
        """Keys and sizes of all stored caches, oldest use first."""
        return self._read("SELECT key, num_bytes FROM uses ORDER BY last_used, rowid")


_COLUMNS = "key, scope, content, token_ids, enriched_key, top_n, neighbours"


def _row(found: tuple[str, str, str, bytes, str | None, int | None, str]) -> ChunkRow:
    key, scope, content, tokens, enriched_key, top_n, neighbours = found
    token_ids = tuple(np.frombuffer(tokens, "<i4").tolist())
    return ChunkRow(key, scope, content, token_ids, enriched_key, top_n, tuple(json.loads(neighbours)))
