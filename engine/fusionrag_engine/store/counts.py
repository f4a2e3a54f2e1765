"""What a tier did, for `Engine.stats()`."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class TierCounts:
    """Counters since the store was opened.

    Attributes:
        num_hits, num_misses: look-ups that reached this tier.
        num_stored: entries written to it, promoted ones included.
        num_promoted: entries that went from here to a warmer tier because they were used.
        num_demoted: entries dropped, or handed to the next colder tier, above the budget.
        num_bad: files that could not be used.
        bytes_read, bytes_written: of files.
    """

    num_hits: int = 0
    num_misses: int = 0
    num_stored: int = 0
    num_promoted: int = 0
    num_demoted: int = 0
    num_bad: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)
