"""`ChunkStore`: the tiers as one. An entry is found in the warmest tier that has it, and goes up when it is used.

New entries go to host memory and to the first durable tier (disk, else remote). Above its budget a tier drops its
coldest entries: out of memory to nowhere, since a durable tier has them; from disk to the remote tier, if there is one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from fusionrag_engine.catalog import Catalog
from fusionrag_engine.heat import HeatMap
from fusionrag_engine.locks import KeyLocks

from .disk import DiskTier
from .entry import Entry
from .errors import CorruptEntryError, UnavailableError
from .memory import MemoryTier
from .remote import RemoteTier

logger = logging.getLogger("fusionrag")

DurableTier = DiskTier | RemoteTier
FLUSH_USES = 256
"""Keys used before the catalog hears of them."""


class ChunkStore:
    """Entries in up to four tiers. Thread-safe; a thread that reads one key delays no other key.

    Attributes:
        device, host, disk, remote: the tiers; None where there is none. A budget of None is unlimited.
    """

    def __init__(
        self,
        catalog: Catalog,
        host_bytes: int,
        *,
        disk: DiskTier | None = None,
        disk_bytes: int | None = None,
        remote: DurableTier | None = None,
        remote_bytes: int | None = None,
        device: torch.device | None = None,
        device_bytes: int = 0,
    ) -> None:
        self._catalog = catalog
        self._heat = HeatMap()
        self._pins: Counter[str] = Counter()
        self._uses: set[str] = set()
        self._guard = threading.Lock()
        self._reading = KeyLocks()
        self._warned: set[str] = set()
        self.host = MemoryTier("host", host_bytes, torch.device("cpu"), self._heat, self._pins.__contains__)
        self.device: MemoryTier | None = None
        if device is not None and device_bytes:
            self.device = MemoryTier("device", device_bytes, device, self._heat, self._pins.__contains__)
        self.disk = disk
        for tier in (disk, remote):
            if isinstance(tier, DiskTier):
                tier.map_above = host_bytes
        self.remote = remote
        self._budgets = {"disk": disk_bytes, "remote": remote_bytes}

    @property
    def durable(self) -> list[DurableTier]:
        return [tier for tier in (self.disk, self.remote) if tier is not None]

    @property
    def _memory(self) -> list[MemoryTier]:
        return [tier for tier in (self.device, self.host) if tier is not None]

    # Reading

    def load(self, key: str) -> Entry | None:
        """The entry of a key, from the warmest tier that has it, or None."""
        self._note_use(key)
        for tier in self._memory:
            if (entry := tier.get(key)) is not None:
                return self._found(tier, entry)
        with self._reading.hold(key):  # one thread reads, the others find it in memory
            if (entry := self.host.get(key)) is not None:
                return self._found(self.host, entry)
            for tier in self._memory:
                tier.counts.num_misses += 1
            return self._load_durable(key)

    def expect(self, keys: Iterable[str]) -> None:
        """Let the system begin to read the files of several keys at once, before they are loaded one by one."""
        for key in keys:
            if self.disk is not None and not any(key in tier for tier in self._memory):
                self.disk.expect(key)

    def get(self, key: str, token_ids: Sequence[int]) -> Entry | None:
        """As `load`, if the entry holds exactly these tokens."""
        entry = self.load(key)
        if entry is not None and entry.token_ids != tuple(token_ids):
            self._warn(key, "it holds other tokens under the same key")
            return None
        return entry

    def has(self, key: str) -> bool:
        return any(key in tier for tier in self._memory) or any(tier.has(key) for tier in self.durable)

    def _found(self, tier: MemoryTier, entry: Entry) -> Entry:
        tier.counts.num_hits += 1
        if tier is self.host and self.device is not None and self.device.put(entry.to(self.device.device, copy=True)):
            tier.counts.num_promoted += 1
        return entry

    def _load_durable(self, key: str) -> Entry | None:
        for tier in self.durable:
            try:
                entry = tier.read(key)
            except (CorruptEntryError, UnavailableError) as error:
                tier.counts.num_bad += 1
                self._warn(tier.where(key), str(error))
                if isinstance(error, CorruptEntryError):
                    tier.set_aside(key)
                entry = None
            if entry is None:
                tier.counts.num_misses += 1
                continue
            tier.counts.num_hits += 1
            return self._promote(tier, entry)
        return None

    def warn_vanished(self, key: str) -> None:
        """Say that an entry which should be stored is not, unless it was said to be bad before."""
        names = [tier.where(key) for tier in self.durable]
        if not any(text.startswith(name) for name in names for text in self._warned):
            self._warn(", ".join(names) or key, "the file has vanished")

    def _promote(self, tier: DurableTier, entry: Entry) -> Entry:
        """Bring what was read into host memory, and from a remote onto the disk."""
        if entry.num_bytes <= self.host.budget - self.host.reserved:
            if entry.is_mapped:  # a file that somebody shortens in place must not pull rows from under a request
                entry = entry.to(self.host.device, copy=True)
            if self.host.put(entry):
                tier.counts.num_promoted += 1
        if tier is self.remote and self.disk is not None and self._fits("disk", entry.num_bytes):
            try:
                size = self.disk.write(entry, is_durable=False)
                self._catalog.note_promoted(entry.key, "disk", size, self._heat[entry.key])
            except OSError as error:
                logger.warning("chunk cache %s stays in the remote tier only: %s", entry.key, error)
        return entry

    def _fits(self, name: str, num_bytes: int) -> bool:
        budget = self._budgets[name]
        return budget is None or num_bytes <= budget

    def _warn(self, name: str, reason: str) -> None:
        """Once for each file and reason: a request may meet the same one again and again."""
        if (text := f"{name} {reason}") not in self._warned:
            self._warned.add(text)
            logger.warning("chunk cache %s is a miss: %s", name, reason)

    # Writing

    def put(self, entry: Entry) -> int:
        """Keep an entry; returns the bytes written to the durable tier, or held in memory where there is none.

        `make_room` is the caller's to call, once it has recorded the entry.
        """
        self._heat.use([entry.key])
        if not self.durable:
            self.host.put(entry)
            return entry.num_bytes
        tier = self.durable[0]
        self._catalog.note_stored(entry.key, tier.name, 0)  # announced, so that `gc` leaves the file alone
        size = tier.write(entry)
        self._catalog.note_stored(entry.key, tier.name, size)
        self.host.put(entry)
        return size

    def put_in_memory(self, entry: Entry) -> None:
        """Keep an entry as long as there is memory for it, and in no durable tier."""
        self._heat.use([entry.key])
        self.host.put(entry)

    def adopt(self, key: str) -> None:
        """Let the catalog know of a file that it lost."""
        for tier in self.durable:
            if not self._catalog.is_stored(key, tier.name) and (size := tier.size(key)):
                self._catalog.note_stored(key, tier.name, size)

    def remove(self, key: str) -> None:
        self.forget(key)
        self._catalog.note_removed(key)  # first, so that a death in between leaves a stray file, not a missing one
        for tier in self.durable:
            tier.remove(key)

    def forget(self, key: str) -> None:
        """Drop an entry from memory; the durable tiers keep it."""
        for tier in self._memory:
            tier.remove(key)

    # Budgets

    def make_room(self, keep: str | None = None) -> None:
        """Hand the coldest files above a tier's budget to the next tier, or drop them; `keep` and what is pinned
        stay."""
        self.flush_uses()
        for place, tier in enumerate(self.durable):
            budget = self._budgets[tier.name]
            if budget is None or (excess := self._catalog.num_bytes(tier.name) - budget) <= 0:
                continue
            for key, size in self._catalog.coldest(tier.name):
                if excess <= 0:
                    break
                if key != keep and key not in self._pins:
                    self._demote(key, tier, self.durable[place + 1 :])
                    excess -= size

    def _demote(self, key: str, tier: DurableTier, colder: Sequence[DurableTier]) -> None:
        for target in colder:
            try:
                if not self._catalog.is_stored(key, target.name):
                    entry = tier.read(key)
                    if entry is not None:
                        self._catalog.note_stored(key, target.name, target.write(entry))
            except (OSError, CorruptEntryError, UnavailableError) as error:
                logger.warning("chunk cache %s could not be demoted to %s: %s", key, target.where(key), error)
        self._catalog.note_removed(key, tier.name)
        tier.remove(key)
        tier.counts.num_demoted += 1
        if not colder:
            self.forget(key)

    # Pins and uses

    def pin(self, keys: Iterable[str]) -> None:
        """Keep these entries where they are until they are unpinned as often; they need not be stored yet."""
        with self._guard:
            self._pins.update(keys)

    def unpin(self, keys: Iterable[str]) -> None:
        with self._guard:
            self._pins.subtract(keys)
            for key in [key for key, count in self._pins.items() if count <= 0]:
                del self._pins[key]
        for tier in self._memory:
            tier.reserve(tier.reserved)  # what was pinned may stand above the budget

    @contextlib.contextmanager
    def pinned(self, keys: Sequence[str]) -> Iterator[None]:
        self.pin(keys)
        try:
            yield
        finally:
            self.unpin(keys)

    def _note_use(self, key: str) -> None:
        self._heat.use([key])
        with self._guard:
            self._uses.add(key)
            is_full = len(self._uses) >= FLUSH_USES
        if is_full and self.durable:
            self.flush_uses()

    def flush_uses(self) -> None:
        """Let the catalog, and with it other processes, know what was used."""
        with self._guard:
            uses, self._uses = self._uses, set()
        if self.durable and uses:
            self._catalog.note_uses({key: self._heat[key] for key in uses})

    def stats(self) -> dict[str, dict[str, int | None]]:
        """For each tier: entries, bytes, budget, and what it did since the store was opened."""
        result: dict[str, dict[str, Any]] = {}
        for tier in self._memory:
            held: dict[str, int | None] = {"num_entries": len(tier), "num_bytes": tier.num_bytes, "budget": tier.budget}
            result[tier.name] = {**held, **tier.counts.as_dict()}
        for durable in self.durable:
            num_entries, num_bytes = self._catalog.totals(durable.name)
            held = {"num_entries": num_entries, "num_bytes": num_bytes, "budget": self._budgets[durable.name]}
            result[durable.name] = {**held, **durable.counts.as_dict()}
        return result
