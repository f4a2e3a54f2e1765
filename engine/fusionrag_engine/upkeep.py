"""Upkeep of a library: what belongs to nobody is swept, what is stored is verified."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .store import CorruptEntryError, DiskTier, DurableTier, UnavailableError, is_being_written

if TYPE_CHECKING:
    from .library import ChunkLibrary

WRITING_S = 3600.0
"""How long files are left alone that a writer announced, in seconds."""


@dataclass
class Sweep:
    """What a sweep removed, or in a dry run would remove.

    Attributes:
        chunks: keys of chunks that nothing refers to any more.
        files: keys of caches that belong to no chunk.
        leftovers: what interrupted writers left, and what was set aside as bad.
        num_bytes: of all these files.
    """

    chunks: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    leftovers: list[Path] = field(default_factory=list)
    num_bytes: int = 0

    @property
    def num_removed(self) -> int:
        return len(self.chunks) + len(self.files) + len(self.leftovers)


@dataclass(frozen=True)
class Problem:
    """A cache that should be stored and is not sound. `str()` is a line for people."""

    key: str
    kind: str
    scope: str
    tier: str
    reason: str

    def __str__(self) -> str:
        where = f"of scope {self.scope!r} in tier {self.tier}"
        return f"{self.kind} cache {self.key} {where} is missing or bad: {self.reason}"


def sweep(library: ChunkLibrary, live: set[str] | None, grace_s: float, *, is_dry_run: bool) -> Sweep:
    """Mark and sweep.

    Args:
        live: keys of the chunks that somebody refers to, such as the records in Chroma; None: every chunk.
        grace_s: chunks ingested or used within this time are left alone, whatever `live` says: an ingestion records
            its references behind its caches.
    """
    result = Sweep()
    if live is not None:
        _sweep_chunks(library, live, grace_s, result, is_dry_run)
    for tier in library.store.durable:
        # Before the catalog's chunks are read: what is recorded meanwhile is not stray.
        found = _own_files(library, tier)
        leftovers = list(tier.leftovers()) if isinstance(tier, DiskTier) and tier.name == "disk" else []
        being_written = library.catalog.noted_since(time.time() - WRITING_S)
        wanted = {name for row in library.catalog.all() for name in (row.key, row.enriched_key)} | being_written
        for key, size in found:
            if key not in wanted:
                result.files.append(key)
                result.num_bytes += size
                if not is_dry_run:
                    library.store.remove(key)
        for key, path in leftovers:
            if key not in being_written or not is_being_written(path):
                result.leftovers.append(path)
                if not is_dry_run:
                    _remove_path(path)
    return result


def _own_files(library: ChunkLibrary, tier: DurableTier) -> list[tuple[str, int]]:
    """Keys and sizes of files this catalog may judge: a remote tier may hold those of other machines' catalogs."""
    if tier.name == "remote":
        return [(key, size) for key, name, size in library.catalog.stored() if name == tier.name]
    return list(tier.list())


def _sweep_chunks(library: ChunkLibrary, live: set[str], grace_s: float, result: Sweep, is_dry_run: bool) -> None:
    moment = time.time() - grace_s
    library.store.flush_uses()
    rows, added = library.catalog.all(), library.catalog.added()
    used = library.catalog.noted_since(moment)
    sizes: dict[str, int] = {}
    for key, _, size in library.catalog.stored():
        sizes[key] = sizes.get(key, 0) + size
    for row in rows:
        if row.key in live or added.get(row.key, moment) >= moment or {row.key, row.enriched_key} & used:
            continue
        result.chunks.append(row.key)
        result.num_bytes += sizes.get(row.key, 0) + sizes.get(row.enriched_key or "", 0)
        if not is_dry_run:
            library.delete(row.scope, row.key, None)


def _remove_path(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def verify(library: ChunkLibrary, *, can_repair: bool) -> list[Problem]:
    """Read back every cache that a durable tier should hold. Bad files are moved aside.

    With `can_repair` the catalog is put right as well: what is missing is forgotten, so that the next ingestion
    computes it, and files it lost sight of are counted again.
    """
    owners = {row.key: (row, "plain") for row in library.catalog.all()}
    owners |= {row.enriched_key: (row, "enriched") for row, _ in list(owners.values()) if row.enriched_key}
    problems = []
    for key, name, _ in library.catalog.stored():
        tier = next((tier for tier in library.store.durable if tier.name == name), None)
        if tier is None or key not in owners:
            continue
        row, kind = owners[key]
        try:
            entry = tier.read(key)
            reason = "there is no file" if entry is None else "it holds other tokens"
            if entry is not None and entry.token_ids == row.token_ids:
                continue
        except (CorruptEntryError, UnavailableError) as error:
            reason = str(error)
            if isinstance(error, CorruptEntryError):
                tier.set_aside(key)
        library.store.forget(key)
        problems.append(Problem(key, kind, row.scope, name, reason))
        if can_repair:
            library.catalog.note_removed(key, name)
            if kind == "enriched":
                library.catalog.clear_enriched(row.key)
    if can_repair:
        for key in owners:
            library.store.adopt(key)
    return problems
