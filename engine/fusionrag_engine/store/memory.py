"""`MemoryTier`: entries in memory of one device, the coldest dropped above a budget."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable

import torch

from fusionrag_engine.heat import HeatMap

from .counts import TierCounts
from .entry import Entry


class MemoryTier:
    """Entries on `device`. Dropping one loses nothing where a colder tier holds it. Thread-safe.

    Attributes:
        budget: bytes at most, pinned entries excepted.
        reserved: bytes of the budget that something else takes.
    """

    def __init__(
        self,
        name: str,
        budget: int,
        device: torch.device,
        heat: HeatMap | None = None,
        is_pinned: Callable[[str], bool] = lambda _key: False,
    ) -> None:
        self.name = name
        self.budget = budget
        self.device = device
        self.num_bytes = self.reserved = 0
        self.counts = TierCounts()
        self._heat = heat or HeatMap()
        self._is_pinned = is_pinned
        self._entries: dict[str, Entry] = {}
        self._coldest: list[tuple[float, int, str]] = []  # one item a key; its heat may have risen since
        self._number = 0
        self._lock = threading.Lock()

    def get(self, key: str) -> Entry | None:
        return self._entries.get(key)

    def put(self, entry: Entry) -> bool:
        """Keep an entry, unless it alone is above the budget; returns whether it was kept."""
        with self._lock:
            self._drop(entry.key)
            if entry.num_bytes > self.budget - self.reserved:
                return False
            self._entries[entry.key] = entry
            self.num_bytes += entry.num_bytes
            self.counts.num_stored += 1
            self._push(entry.key)
            self._make_room()
            return entry.key in self._entries

    def remove(self, key: str) -> None:
        with self._lock:
            self._drop(key)

    def reserve(self, num_bytes: int) -> None:
        """Leave so many bytes of the budget free."""
        with self._lock:
            self.reserved = num_bytes
            self._make_room()

    def keys(self) -> list[str]:
        with self._lock:
            return list(self._entries)

    def _push(self, key: str) -> None:
        self._number += 1
        heapq.heappush(self._coldest, (self._heat[key], self._number, key))

    def _make_room(self) -> None:
        pinned = []
        while self.num_bytes > self.budget - self.reserved and self._coldest:
            heat, number, key = heapq.heappop(self._coldest)
            if key not in self._entries:
                continue
            if self._heat[key] > heat:
                heapq.heappush(self._coldest, (self._heat[key], number, key))
            elif self._is_pinned(key):
                pinned.append((heat, number, key))
            else:
                self._drop(key)
                self.counts.num_demoted += 1
        for item in pinned:
            heapq.heappush(self._coldest, item)

    def _drop(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= entry.num_bytes

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)
