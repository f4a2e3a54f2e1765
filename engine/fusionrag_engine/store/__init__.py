"""Where chunk caches live: four tiers - device, host, disk, remote - behind one `ChunkStore`."""

from .disk import DiskTier, is_being_written
from .entry import Entry
from .errors import CorruptEntryError, UnavailableError
from .memory import MemoryTier
from .remote import RemoteTier
from .store import ChunkStore, DurableTier

__all__ = [
    "ChunkStore",
    "CorruptEntryError",
    "DiskTier",
    "DurableTier",
    "Entry",
    "MemoryTier",
    "RemoteTier",
    "UnavailableError",
    "is_being_written",
]
