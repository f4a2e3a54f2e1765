"""`Database`: one SQLite file that opens after a crash at any moment, is replaced when damaged, and never holds up a
reader."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .locks import FileLocks

logger = logging.getLogger("fusionrag")

BUSY_S = 60
"""How long a write waits for another process that writes, in seconds."""
READ_CACHE_KB = 32_000
"""Pages that a reader keeps, so that looking something up is no matter of the disk."""
_CLOSED = (-1, -1)
"""No file's identity: nothing is open, so the next call opens."""


class Database:
    """One file (None: in memory), which several processes and threads may use at once.

    Reading and writing have a connection each, so that a request that looks something up never waits for an ingestion.
    Whoever needs both locks takes the reader's first.
    """

    def __init__(self, path: Path | None, schema: str) -> None:
        self.path = path
        self._schema = schema
        self._lock = threading.RLock()
        self._read_lock = self._lock if path is None else threading.RLock()
        self._file_id: tuple[int, int] | None = _CLOSED
        self._has_warned = False
        try:
            self._open()
        except sqlite3.DatabaseError as error:
            self._start_again(error)

    def _open(self) -> None:
        self._file_id = _CLOSED
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        db = sqlite3.connect(self.path or ":memory:", check_same_thread=False, timeout=BUSY_S)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.executescript(self._schema)
            state = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if state != "ok":
                raise sqlite3.DatabaseError(state)
            self._reader = db
            if self.path is not None:
                self._reader = sqlite3.connect(self.path, check_same_thread=False, timeout=BUSY_S)
                self._reader.execute(f"PRAGMA cache_size = -{READ_CACHE_KB}")
        except BaseException:
            db.close()
            raise
        self._db = db
        self._file_id = _file_id(self.path)

    def _follow(self) -> None:
        """Open the file anew if another process moved a damaged one aside, or it was deleted."""
        if self.path is not None and _file_id(self.path) != self._file_id:
            with self._read_lock, self._lock:
                if _file_id(self.path) != self._file_id:
                    self._close()
                    self._open()

    def _start_again(self, error: sqlite3.DatabaseError) -> None:
        """Move a damaged file aside and open an empty catalog; errors that are no damage are raised again."""
        if self.path is None or type(error) is not sqlite3.DatabaseError:
            raise error
        with self._read_lock, self._lock, FileLocks(self.path.parent / "locks").hold("_catalog"):
            self._close()
            # Another process may have been quicker: then what lies there now is whole.
            if self._file_id in (_CLOSED, _file_id(self.path)):
                self._move_aside(self.path, error)
            self._open()

    def _move_aside(self, path: Path, error: sqlite3.DatabaseError) -> None:
        aside = path.with_suffix(f".{time.time_ns()}.corrupt")
        path.replace(aside)
        for suffix in ("-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)
        logger.warning("catalog %s is damaged (%s); moved to %s, ingest the chunks again", path, error, aside)

    def _read(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        """Rows of a query. A damaged catalog is one that holds nothing."""
        with self._read_lock:
            try:
                self._follow()
                return self._reader.execute(query, values).fetchall()
            except sqlite3.DatabaseError as error:
                self._start_again(error)
                return []

    def _look(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        """As `_read`, on the way of a request: a catalog that cannot be read now holds nothing, with one warning."""
        try:
            return self._read(query, values)
        except (sqlite3.Error, OSError) as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("catalog %s cannot be read, its chunks are misses: %s", self.path, error)
            return []

    def _write(self, *statements: tuple[str, Sequence[Any]]) -> None:
        """Run statements as one transaction."""
        self._follow()
        try:
            self._run(statements)
        except sqlite3.DatabaseError as error:
            self._start_again(error)
            self._run(statements)

    def _note(self, *statements: tuple[str, Sequence[Any]]) -> None:
        """Bookkeeping on the way of a request: skipped where the catalog cannot be written at once."""
        try:
            self._follow()
            with self._lock:
                self._db.execute("PRAGMA busy_timeout = 0")
                try:
                    self._run(statements)
                finally:
                    self._db.execute(f"PRAGMA busy_timeout = {BUSY_S * 1000}")
        except (sqlite3.Error, OSError) as error:  # read-only, a full disk, another process writes
            logger.debug("catalog %s: a note was skipped: %s", self.path, error)

    def _run(self, statements: Sequence[tuple[str, Sequence[Any]]]) -> None:
        with self._lock, self._db as db:
            for query, values in statements:
                db.execute(query, values)

    def _close(self) -> None:
        for name in ("_reader", "_db"):
            with contextlib.suppress(AttributeError, sqlite3.Error):  # it may never have been open
                getattr(self, name).close()

    def close(self) -> None:
        with self._read_lock, self._lock:
            self._close()


def _file_id(path: Path | None) -> tuple[int, int] | None:
    """What tells one file from another of the same name."""
    try:
        facts = os.stat(path or "")
    except OSError:
        return None
    return facts.st_dev, facts.st_ino
