"""What is recorded about a node's chunk cache, as flat metadata that Chroma accepts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusionrag_engine import ChunkRecord

PREFIX = "fusionrag_"
"""All our metadata keys begin so; adapters keep them out of what is embedded and what reaches the prompt."""

KEYS = tuple(
    PREFIX + name for name in ("key", "enriched_key", "kind", "num_tokens", "scope", "neighbours", "fingerprint")
)


@dataclass(frozen=True)
class CacheRecord:
    """The caches of one node. `key` is the content key of the plain cache, `neighbours` are content keys, and
    `fingerprint` is of the cached tokens alone (`Engine.fingerprint`), "" where it was not recorded."""

    key: str
    kind: str
    num_tokens: int
    scope: str = ""
    enriched_key: str | None = None
    neighbours: tuple[str, ...] = ()
    fingerprint: str = ""

    @classmethod
    def from_chunk(cls, record: ChunkRecord) -> CacheRecord | None:
        """The record of a chunk that the engine stored, or None for one it did not."""
        if record.key is None:
            return None
        return cls(
            record.key,
            record.kind,
            record.num_tokens,
            record.scope,
            record.enriched_key,
            tuple(record.neighbours),
            record.fingerprint,
        )

    def metadata(self) -> dict[str, str | int]:
        """Flat metadata of strings and integers. Chroma refuses None and empty lists, so what is absent has no key;
        `neighbours` is a JSON list, because LlamaIndex's flat metadata has no lists."""
        values: dict[str, str | int] = {
            PREFIX + "key": self.key,
            PREFIX + "kind": self.kind,
            PREFIX + "num_tokens": self.num_tokens,
            PREFIX + "scope": self.scope,
        }
        if self.enriched_key is not None:
            values[PREFIX + "enriched_key"] = self.enriched_key
        if self.fingerprint:
            values[PREFIX + "fingerprint"] = self.fingerprint
        if self.neighbours:
            values[PREFIX + "neighbours"] = json.dumps(self.neighbours)
        return values

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any] | None) -> CacheRecord | None:
        """Read a record back; None where the metadata holds none, or something that is not one."""
        values = metadata or {}
        key, kind, num_tokens = (values.get(PREFIX + name) for name in ("key", "kind", "num_tokens"))
        if not isinstance(key, str) or not key or not isinstance(kind, str) or not isinstance(num_tokens, int):
            return None
        return cls(
            key=key,
            kind=kind,
            num_tokens=num_tokens,
            scope=str(values.get(PREFIX + "scope") or ""),
            enriched_key=values.get(PREFIX + "enriched_key") or None,
            neighbours=_strings(values.get(PREFIX + "neighbours")),
            fingerprint=str(values.get(PREFIX + "fingerprint") or ""),
        )


def _strings(text: Any) -> tuple[str, ...]:
    """A JSON list of strings; anything else is an empty one."""
    try:
        found = json.loads(text or "[]")
    except (TypeError, ValueError):
        return ()
    return tuple(map(str, found)) if isinstance(found, list) else ()
