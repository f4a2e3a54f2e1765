"""What a tier raises; caught inside the store, where both become a miss."""

from __future__ import annotations


class CorruptEntryError(Exception):
    """A stored file is not what its name says, or cannot be read: it is moved aside."""


class UnavailableError(Exception):
    """A tier cannot answer now (too many open files, no network): its file may be whole and is left alone."""
