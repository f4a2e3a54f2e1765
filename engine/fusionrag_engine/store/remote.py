"""`RemoteTier`: one object an entry below an fsspec URL (`s3://`, `gs://`, `memory://` ...).

Objects are compressed with zstd where that saves at least a tenth; others are left as they are. An object store shows
an object only when it is whole; what is read is checked all the same.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import zstandard

from fusionrag_engine.errors import ConfigError

from .blob import from_buffer, to_bytes
from .counts import TierCounts
from .entry import Entry
from .errors import CorruptEntryError, UnavailableError

logger = logging.getLogger("fusionrag")

WORTH = 0.9
"""A compressed object is kept if it is at most this share of the plain one."""
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


class RemoteTier:
    """Objects below `url`. Errors of the connection make a miss, never a failed request."""

    def __init__(self, url: str, name: str = "remote") -> None:
        import fsspec

        self.name = name
        self.url = url.rstrip("/")
        self.counts = TierCounts()
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{url!r} is not accepted: {error}") from error

    def path(self, key: str) -> str:
        return f"{self._root}/{key[:2]}/{key}.safetensors"

    def where(self, key: str) -> str:
        return f"{self.url}/{key[:2]}/{key}.safetensors"

    def write(self, entry: Entry, *, is_durable: bool = True) -> int:  # noqa: ARG002 # an object is always durable
        """Store an entry; returns the size of its object in bytes."""
        data = to_bytes(entry)
        compressed = zstandard.ZstdCompressor(level=3).compress(data)
        if len(compressed) <= WORTH * len(data):
            data = compressed
        path = self.path(entry.key)
        try:
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(path, data)
        except OSError:
            raise
        except Exception as error:  # each file system has its own errors
            raise OSError(f"{self.where(entry.key)} cannot be written: {error}") from error
        self.counts.num_stored += 1
        self.counts.bytes_written += len(data)
        return len(data)

    def read(self, key: str) -> Entry | None:
        """The entry, or None where there is no object.

        Raises:
            CorruptEntryError: the object cannot be trusted.
            UnavailableError: the remote did not answer.
        """
        try:
            data = self._files.cat_file(self.path(key))
        except FileNotFoundError:
            return None
        except Exception as error:  # each file system has its own errors
            raise UnavailableError(f"cannot be read now: {type(error).__name__}: {error}") from error
        self.counts.bytes_read += len(data)
        if data[:4] == _ZSTD_MAGIC:
            try:
                data = zstandard.ZstdDecompressor().decompress(data)
            except zstandard.ZstdError as error:
                raise CorruptEntryError(f"ZstdError: {error}") from error
        return from_buffer(bytearray(data), key)

    def remove(self, key: str) -> int:
        """Delete an object; returns the bytes freed, 0 where there was none or the remote did not answer."""
        size = self.size(key)
        if size:
            try:
                self._files.rm_file(self.path(key))
            except FileNotFoundError:
                return 0
            except Exception as error:
                logger.warning("cannot delete %s: %s", self.where(key), error)
                return 0
        return size

    def set_aside(self, key: str) -> None:
        """Delete a bad object: renaming would copy it."""
        self.remove(key)

    def has(self, key: str) -> bool:
        return self.size(key) > 0

    def size(self, key: str) -> int:
        """Size of an object in bytes, 0 where there is none or the remote did not answer."""
        try:
            return int(self._files.size(self.path(key)) or 0)
        except Exception:
            return 0

    def list(self) -> Iterator[tuple[str, int]]:
        """Keys and sizes of all objects."""
        self._files.invalidate_cache()
        try:
            found = self._files.find(self._root, detail=True)
        except FileNotFoundError:
            return
        for path, facts in found.items():
            if path.endswith(".safetensors"):
                yield path.rpartition("/")[2].removesuffix(".safetensors"), int(facts["size"] or 0)
