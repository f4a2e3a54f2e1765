"""What is recorded about a node's chunk cache, as flat metadata that Chroma accepts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fusionrag_engine import ChunkRecord

PREFIX = "fusionrag_"
"""All our metadata keys begin so; adapters keep them out of what is embedded and what reaches the prompt."""

KEYS = tuple(PREFIX + name for name in ("key", "enriched_key", "kind", "num_tokens", "scope", "neighbours"))


@dataclass(frozen=True)
class CacheRecord:
    """The caches of one node. `key` is the content key of the plain cache, `neighbours` are content keys."""

    key: str
    kind: str
    num_tokens: int
    scope: str = ""
    enriched_key: str | None = None
    neighbours: tuple[str, ...] = ()

    @classmethod
    def from_chunk(cls, record: ChunkRecord) -> CacheRecord | None:
        """The record of a chunk that the engine stored, or None for one it did not."""
        if record.key is None:
            return None
        return cls(
            record.key, record.kind, record.num_tokens, record.scope, record.enriched_key, tuple(record.neighbours)
        )

    def metadata(self) -> dict[str, str | int]:
        """Flat metadata: Chroma refuses None and empty lists, so what is absent has no key."""
        values: dict[str, str | int] = {
            PREFIX + "key": self.key,
            PREFIX + "kind": self.kind,
            PREFIX + "num_tokens": self.num_tokens,
            PREFIX + "scope": self.scope,
        }
        if self.enriched_key is not None:
            values[PREFIX + "enriched_key"] = self.enriched_key
        if self.neighbours:
            values[PREFIX + "neighbours"] = ",".join(self.neighbours)
        return values

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any] | None) -> CacheRecord | None:
        """Read a record back; None where the metadata holds none."""
        if not metadata or not metadata.get(PREFIX + "key"):
            return None
        neighbours = str(metadata.get(PREFIX + "neighbours") or "")
        return cls(
            key=str(metadata[PREFIX + "key"]),
            kind=str(metadata[PREFIX + "kind"]),
            num_tokens=int(metadata[PREFIX + "num_tokens"]),
            scope=str(metadata.get(PREFIX + "scope") or ""),
            enriched_key=metadata.get(PREFIX + "enriched_key") or None,
            neighbours=tuple(neighbours.split(",")) if neighbours else (),
        )
