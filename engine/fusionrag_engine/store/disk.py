"""`DiskTier`: one file an entry below a local directory, read into memory or through a memory map.

A file is written under a temporary name, flushed, and renamed, so a file that has its final name is whole. What is
read is checked all the same.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import platform
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

import torch
import xxhash

from .blob import from_buffer, header_length, to_bytes, told_size
from .counts import TierCounts
from .entry import Entry
from .errors import CorruptEntryError, UnavailableError

logger = logging.getLogger("fusionrag")

_HOST = xxhash.xxh32_hexdigest(platform.node().encode())
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT)
"""Errors that say nothing about the file."""


def is_being_written(path: Path) -> bool:
    """Whether the writer of a temporary file may still be alive: it is, or it is of another machine."""
    parts = path.name.split(".")
    if path.suffix != ".tmp" or len(parts) != 6 or not parts[3].isdigit():
        return False
    if parts[2] != _HOST:
        return True
    try:
        os.kill(int(parts[3]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # alive, and another user's
        return True
    return True


class DiskTier:
    """Files below `root`, one an entry.

    Attributes:
        map_above: files of more bytes are mapped, others are read into memory of their own: those that host memory
            keeps. What is mapped costs no memory, and is for use at once.
    """

    def __init__(self, root: Path, name: str = "disk") -> None:
        self.name = name
        self.root = root
        self.counts = TierCounts()
        self.map_above = 0
        self.root.mkdir(parents=True, exist_ok=True)

    def path(self, key: str) -> Path:
        return self.root / key[:2] / f"{key}.safetensors"

    def where(self, key: str) -> str:
        return str(self.path(key))

    def write(self, entry: Entry, *, is_durable: bool = True) -> int:
        """Store an entry, durably unless another tier holds it too; returns the size of its file in bytes."""
        path = self.path(entry.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        data = to_bytes(entry)
        temporary = path.with_name(f".{entry.key}.{_HOST}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                if is_durable:
                    os.fsync(file.fileno())
            try:
                os.replace(temporary, path)
            except IsADirectoryError:
                self.set_aside(entry.key)
                os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if is_durable:
            _flush_directory(path.parent)
        self.counts.num_stored += 1
        self.counts.bytes_written += len(data)
        return len(data)

    def read(self, key: str) -> Entry | None:
        """The entry, or None where there is no file.

        Raises:
            CorruptEntryError: the file cannot be trusted.
            UnavailableError: the system could not read now.
        """
        try:
            with open(self.path(key), "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size == 0:
                    raise CorruptEntryError("the file is empty")
                is_mapped = size > self.map_above
                data = _map(file) if is_mapped else _read(file, size)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in _PASSING:
                raise UnavailableError(f"cannot be read now: {error}") from error
            raise CorruptEntryError(f"unreadable: {error}") from error
        entry = from_buffer(data, key)
        self.counts.bytes_read += size
        return replace(entry, is_mapped=is_mapped)

    def expect(self, key: str) -> None:
        """Let the system begin to read a file that is about to be read; does nothing where it cannot."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError), open(self.path(key), "rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def remove(self, key: str) -> int:
        """Delete a file; returns the bytes freed, 0 where there was none."""
        path = self.path(key)
        try:
            size = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            return 0
        return size

    def set_aside(self, key: str) -> None:
        """Rename a bad file so that it is never read again but can be looked at."""
        path = self.path(key)
        try:
            os.replace(path, path.with_suffix(f".{time.time_ns()}.corrupt"))
        except OSError as error:
            logger.warning("cannot move bad cache file %s aside: %s", path, error)

    def has(self, key: str) -> bool:
        """Whether a file of that name and of the size its own header tells is there; content is checked when read."""
        try:
            with open(self.path(key), "rb") as file:
                head = file.read(8)
                head += file.read(header_length(head))
                return os.fstat(file.fileno()).st_size == told_size(head)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
            return False

    def size(self, key: str) -> int:
        """Size of a file in bytes, 0 where there is none."""
        try:
            return self.path(key).stat().st_size
        except OSError:
            return 0

    def list(self) -> Iterator[tuple[str, int]]:
        """Keys and sizes of all files; one that lies where we would not have put it is not ours."""
        for path in self.root.glob("??/*.safetensors"):
            if path.name[:2] != path.parent.name:
                continue
            try:
                yield path.name.removesuffix(".safetensors"), path.stat().st_size
            except FileNotFoundError:  # removed by another process meanwhile
                continue

    def leftovers(self) -> Iterator[tuple[str, Path]]:
        """Temporary files of writers, and what was set aside, with the key each belongs to."""
        for pattern in ("??/.*.tmp", "??/*.corrupt"):
            for path in self.root.glob(pattern):
                yield path.name.lstrip(".").split(".")[0], path


def _map(file: FileIO) -> mmap.mmap:
    """A private map: its pages are writable, which torch asks for, and nobody writes to them."""
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_WILLNEED"):
        mapped.madvise(mmap.MADV_WILLNEED)
    return mapped


def _read(file: FileIO, size: int) -> memoryview:
    """All bytes of a file; fewer, if that is all there are."""
    buffer: Any = torch.empty(size, dtype=torch.uint8).numpy()
    view = memoryview(buffer)
    done = 0
    while done < size and (count := file.readinto(view[done:])):
        done += count
    return view[:done]


def _flush_directory(directory: Path) -> None:
    """Make a rename durable, where the system can open directories."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError:
        return
    try:
        with contextlib.suppress(OSError):  # some network file systems refuse it
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
