"""Records of chunk caches in Chroma, keyed by node ID. Needs only `chromadb`."""

from .index import ChromaCacheIndex
from .record import CacheRecord

__all__ = ["CacheRecord", "ChromaCacheIndex"]
