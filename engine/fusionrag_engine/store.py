"""Where chunk caches live: in host memory and, with a directory, on disk. Content-addressed and immutable.

A file is written under a temporary name, flushed, and renamed, so a file that has its final name is whole. What is
read is checked all the same (header, shapes, token ids, checksum): anything bad is moved aside and is a miss, with one
warning.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
import xxhash
from torch import Tensor

from .keys import FORMAT_VERSION, tensor_bytes

logger = logging.getLogger("fusionrag")


@dataclass(frozen=True)
class Entry:
    """Rows of one chunk as they were computed.

    Attributes:
        key: its content key.
        token_ids: the chunk's tokens, compared on every hit.
        start: position of its first row when it was computed.
        keys, values: `[num_layers, num_kv_heads, num_tokens, dim]` in the model's dtype, in host memory.
    """

    key: str
    token_ids: tuple[int, ...]
    start: int
    keys: Tensor
    values: Tensor

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


_HOST = xxhash.xxh32_hexdigest(platform.node().encode())


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


class CorruptEntryError(Exception):
    """A stored file is not what its name says. Caught inside the store, where it becomes a miss."""


class HostTier:
    """Entries in memory, the least recently used dropped above the budget."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.num_bytes = 0
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> Entry | None:
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def put(self, entry: Entry) -> None:
        with self._lock:
            self._drop(entry.key)
            self._entries[entry.key] = entry
            self.num_bytes += entry.num_bytes
            while self.num_bytes > self.budget and self._entries:
                self._drop(next(iter(self._entries)))

    def remove(self, key: str) -> None:
        with self._lock:
            self._drop(key)

    def _drop(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= entry.num_bytes

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)


class DiskTier:
    """One safetensors file an entry, below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.root.mkdir(parents=True, exist_ok=True)

    def path(self, key: str) -> Path:
        return self.root / key[:2] / f"{key}.safetensors"

    def write(self, entry: Entry) -> int:
        """Store an entry durably; returns the size of its file in bytes."""
        path = self.path(entry.key)
        path.parent.mkdir(exist_ok=True)
        tensors = {
            "keys": entry.keys.contiguous(),
            "values": entry.values.contiguous(),
            "token_ids": torch.tensor(entry.token_ids, dtype=torch.int32),
        }
        header = {
            "format": str(FORMAT_VERSION),
            "key": entry.key,
            "start": str(entry.start),
        }
        header["checksum"] = _checksum(tensors, header)
        data = safetensors.torch.save(tensors, metadata=header)
        temporary = path.with_name(f".{entry.key}.{_HOST}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.replace(temporary, path)
            except IsADirectoryError:
                self.set_aside(entry.key)
                os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return len(data)

    def read(self, key: str) -> Entry | None:
        """The entry, or None where there is no file. Raises `CorruptEntryError` for a file that cannot be trusted."""
        try:
            data = self.path(key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CorruptEntryError(f"unreadable: {error}") from error
        try:
            tensors = safetensors.torch.load(data)
            header = _header(data)
            checksum = header.pop("checksum")
            token_ids = tuple(tensors["token_ids"].tolist())
            entry = Entry(header["key"], token_ids, int(header["start"]), tensors["keys"], tensors["values"])
        except (safetensors.SafetensorError, KeyError, ValueError, TypeError, IndexError) as error:
            raise CorruptEntryError(f"{type(error).__name__}: {error}") from error
        if header.get("format") != str(FORMAT_VERSION) or entry.key != key:
            raise CorruptEntryError(f"holds key {entry.key} in format {header.get('format')}")
        if checksum != _checksum(tensors, header):
            raise CorruptEntryError("checksum differs")
        return entry

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
        path = self.path(key)
        try:
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if not 0 < length < 1 << 26:
                    return False
                tensors = json.loads(file.read(length))
                end = max(item["data_offsets"][1] for name, item in tensors.items() if name != "__metadata__")
                return os.fstat(file.fileno()).st_size == 8 + length + int(end)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False

    def list(self) -> Iterator[tuple[str, int]]:
        """Keys and sizes of all files."""
        for path in self.root.glob("??/*.safetensors"):
            try:
                yield path.name.removesuffix(".safetensors"), path.stat().st_size
            except FileNotFoundError:  # removed by another process meanwhile
                continue

    def leftovers(self) -> Iterator[tuple[str, Path]]:
        """Temporary files of writers, and what was set aside, with the key each belongs to."""
        for pattern in ("??/.*.tmp", "??/*.corrupt"):
            for path in self.root.glob(pattern):
                yield path.name.lstrip(".").split(".")[0], path


class ChunkStore:
    """The tiers together. Safe to use from several threads."""

    def __init__(self, host_bytes: int, root: Path | None) -> None:
        self.host = HostTier(host_bytes)
        self.disk = DiskTier(root) if root is not None else None

    def has(self, key: str) -> bool:
        return key in self.host or (self.disk is not None and self.disk.has(key))

    def get(self, key: str, token_ids: Sequence[int], *, is_expected: bool = False) -> Entry | None:
        """The entry of that key if it holds exactly these tokens, else None; `is_expected` warns if it is gone."""
        entry = self.host.get(key)
        if entry is None:
            entry = self._read_disk(key, is_expected)
        if entry is not None and entry.token_ids != tuple(token_ids):
            logger.warning("chunk cache %s is a miss: it holds other tokens under the same key", key)
            return None
        return entry

    def read_fresh(self, key: str, token_ids: Sequence[int]) -> Entry | None:
        """As `get`, but from the file where there is one, whatever memory holds."""
        if self.disk is not None:
            self.host.remove(key)
        return self.get(key, token_ids)

    def _read_disk(self, key: str, is_expected: bool) -> Entry | None:
        if self.disk is None:
            return None
        try:
            entry = self.disk.read(key)
        except CorruptEntryError as error:
            logger.warning("chunk cache %s is a miss: %s; it was moved aside", self.disk.path(key), error)
            self.disk.set_aside(key)
            return None
        if entry is not None:
            self.host.put(entry)
        elif is_expected:
            logger.warning("chunk cache %s is a miss: the file has vanished", self.disk.path(key))
        return entry

    def put(self, entry: Entry) -> int:
        """Keep an entry; returns the bytes written to disk, or held in memory where there is no disk."""
        self.host.put(entry)
        return self.disk.write(entry) if self.disk is not None else entry.num_bytes

    def remove(self, key: str) -> None:
        self.host.remove(key)
        if self.disk is not None:
            self.disk.remove(key)


def _checksum(tensors: dict[str, Tensor], header: dict[str, str]) -> str:
    """Over every tensor, and every other field of the header."""
    state = xxhash.xxh3_128(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        state.update(f"{name}:{tuple(tensors[name].shape)}:{tensors[name].dtype}".encode())
        state.update(tensor_bytes(tensors[name]))
    return state.hexdigest()


def _header(data: bytes) -> dict[str, str]:
    length = int.from_bytes(data[:8], "little")
    header: dict[str, str] = json.loads(data[8 : 8 + length])["__metadata__"]
    return header
