"""Locks by key: among the threads of a process (`KeyLocks`), and among processes on one directory (`FileLocks`)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: processes are kept apart only by atomic renames and the catalog's transactions
    fcntl = None  # type: ignore[assignment]


class KeyLocks:
    """One lock a key, made when it is needed and dropped behind its last holder."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[str, tuple[threading.Lock, int]] = {}

    @contextlib.contextmanager
    def hold(self, key: str) -> Iterator[None]:
        with self._guard:
            lock, num_holders = self._locks.get(key, (threading.Lock(), 0))
            self._locks[key] = (lock, num_holders + 1)
        try:
            with lock:
                yield
        finally:
            with self._guard:
                lock, num_holders = self._locks[key]
                if num_holders == 1:
                    del self._locks[key]
                else:
                    self._locks[key] = (lock, num_holders - 1)


class FileLocks:
    """Advisory locks in `directory`, one of 256 for each key. The system frees those of a process that dies.

    Never hold two: two keys may share a lock file.
    """

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory

    @contextlib.contextmanager
    def hold(self, key: str) -> Iterator[None]:
        """Held until the block ends; where no lock file can be made, as in a store that is read only, nothing is."""
        if self.directory is None or fcntl is None:
            yield
            return
        with contextlib.ExitStack() as stack:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(open(self.directory / key[:2], "ab"))
            except OSError:
                pass
            else:
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
