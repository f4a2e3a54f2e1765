"""What an engine's users do with its store as a whole: refresh, sweep, verify, count, plan."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from .config import EngineConfig, check_number
from .layout import PromptLayout
from .library import ChunkLibrary
from .plan import StoragePlan, plan_storage
from .precompute import Precomputer
from .progress import ProgressBars
from .refresh import Deadline, RefreshReport
from .runner import ModelRunner
from .types import Chunk, as_chunks

COUNTERS = ("num_requests", "num_prefix", "num_enriched", "num_plain", "num_miss")


class Maintenance(ABC):
    """Part of `Engine`, which sets the attributes."""

    config: EngineConfig
    runner: ModelRunner
    layout: PromptLayout
    library: ChunkLibrary
    model_name: str
    _precomputer: Precomputer
    _counts: dict[str, int]
    _scope_counts: dict[str, dict[str, int]]
    _counts_lock: threading.Lock

    @abstractmethod
    def _check_open(self) -> None:
        """Raise `EngineClosedError` if the engine was closed."""

    @abstractmethod
    def _settle(self) -> None:
        """Wait until the chunks met by earlier requests are in the store."""

    def refresh(
        self,
        *,
        budget: int | None = None,
        budget_s: float | None = None,
        scope: str | None = None,
        show_progress: bool = False,
        dry_run: bool = False,
    ) -> RefreshReport:
        """Enrich again the chunks whose best neighbours changed after later ingestions, or that lost an enriched cache
        with a deleted neighbour; the most changed first.

        Args:
            budget: chunks to enrich at most. `budget_s`: begin no more after so many seconds. None: no limit.
            scope: only this scope.
            dry_run: only find them.
        """
        self._check_open()
        for name, value in (("budget", budget), ("budget_s", budget_s)):
            if value is not None:
                check_number(name, value, lambda number: number >= 0, "None or a number of at least 0")
        self._settle()
        with ProgressBars(show_progress) as bars:
            return self._precomputer.refresh(scope, Deadline(budget, budget_s), bars.open, is_dry_run=dry_run)

    def gc(self, *, live: Iterable[str] | None = None, grace_s: float = 3600.0, dry_run: bool = False) -> int:
        """Remove files that belong to no chunk and what interrupted writers left; returns how many things went.

        Args:
            live: keys of the chunks that are still referred to, for instance `ChromaCacheIndex.keys()`: all others are
                deleted, caches met online included. None: every recorded chunk stays.
            grace_s: chunks ingested or used within so many seconds stay, whatever `live` says. An ingestion that is
                running writes its references after its caches.
            dry_run: only count.
        """
        self._check_open()
        self._settle()
        keys = None if live is None else set(live)
        return self.library.gc(keys, grace_s, is_dry_run=dry_run).num_removed

    def verify(self, *, repair: bool = False) -> list[str]:
        """Read back every stored cache. Bad files are moved aside; returns one line a problem, none when all is well.

        With `repair` the catalog forgets what is missing or bad, so that `precompute` and `refresh` make it again.
        """
        self._check_open()
        return [str(problem) for problem in self.library.verify(can_repair=repair)]

    def stats(self, *, scope: str | None = None) -> dict[str, Any]:
        """Counters since the engine was made, and what the store holds. With `scope`, those of one scope alone: what is
        to be shown to its tenant."""
        self._check_open()
        num_chunks, num_enriched = self.library.catalog.counts(scope)
        with self._counts_lock:
            counts = dict(self._counts if scope is None else self._scope_counts[scope])
        result: dict[str, Any] = {**counts, "num_chunks": num_chunks, "num_enriched_chunks": num_enriched}
        if scope is None:
            store = self.library.store
            result["host_entries"] = len(store.host)
            result["host_bytes"] = store.host.num_bytes
            result["disk_bytes"] = 0 if store.disk is None else sum(size for _, size in store.disk.list())
            result["tiers"] = store.stats()
            prefixes = self.library.prefixes.tier
            held = {"num_entries": len(prefixes), "num_bytes": prefixes.num_bytes, "budget": prefixes.budget}
            result["prefix_index"] = {**held, **prefixes.counts.as_dict()}
        return result

    def plan(self, chunks: Sequence[Chunk | str], *, codec: str | None = None) -> StoragePlan:
        """Bytes that `precompute` of these chunks would store, before anything is computed."""
        self._check_open()
        token_counts = {tuple(self.layout.tokenize(chunk.text)) for chunk in as_chunks(chunks)}
        return plan_storage(
            [len(ids) for ids in token_counts if ids],
            self.runner.shape,
            self.runner.dtype,
            codec=codec or self.config.codec,
            keep_plain=self.config.keep_plain,
        )

    def _facts(self) -> dict[str, Any]:
        """What the caches are computed with, in words; the keys hold the exact digests."""
        shape = self.runner.shape
        return {
            "model": self.model_name,
            "dtype": str(self.runner.dtype).removeprefix("torch."),
            "codec": self.config.codec,
            "top_n": self.config.top_n,
            "system_prompt": self.config.system_prompt,
            "chat_template_kwargs": dict(self.config.chat_template_kwargs),
            "keep_plain": self.config.keep_plain,
            "kv_shape": [shape.num_layers, shape.num_kv_heads, shape.key_dim, shape.value_dim],
        }
