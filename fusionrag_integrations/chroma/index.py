"""`ChromaCacheIndex`: chunk cache records keyed by node ID in a Chroma collection.

The tensors stay in the engine's own store; Chroma holds a few short fields a node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .record import KEYS, CacheRecord

if TYPE_CHECKING:
    from chromadb.api import ClientAPI
    from chromadb.api.models.Collection import Collection


class ChromaCacheIndex:
    """Records in a collection: one of its own, or the one that already holds the nodes.

    In a collection that already has a row for a node, the record is merged into that row's metadata and its text and
    embedding are left alone. Elsewhere a row is made for it, with a one-dimensional embedding that means nothing, so a
    collection of records should not be one that is searched.

    Args:
        collection: a Chroma collection.
    """

    def __init__(self, collection: Collection) -> None:
        self.collection = collection

    @classmethod
    def open(
        cls, path: str | Path | None = None, *, client: ClientAPI | None = None, name: str = "fusionrag_caches"
    ) -> ChromaCacheIndex:
        """A collection of records in an embedded Chroma at `path`, or behind a given client such as `HttpClient`."""
        import chromadb

        if client is None:
            from chromadb.config import Settings

            client = chromadb.PersistentClient(str(path or "chroma"), settings=Settings(anonymized_telemetry=False))
        return cls(client.get_or_create_collection(name, embedding_function=None))

    def put(self, records: Mapping[str, CacheRecord]) -> None:
        """Write records, keyed by node ID, over what was recorded for these nodes before."""
        for batch in self._batches(list(records)):
            known = set(self.collection.get(ids=batch, include=[])["ids"])
            old = [node_id for node_id in batch if node_id in known]
            new = [node_id for node_id in batch if node_id not in known]
            if old:
                # An update merges, so keys that a new record does not have are taken away by None.
                cleared: list[Any] = [{**dict.fromkeys(KEYS), **records[node_id].metadata()} for node_id in old]
                self.collection.update(ids=old, metadatas=cleared)
            if new:
                rows: list[Any] = [records[node_id].metadata() for node_id in new]
                meaningless: list[Any] = [[1.0]] * len(new)
                self.collection.upsert(ids=new, embeddings=meaningless, metadatas=rows)

    def get(self, node_ids: Sequence[str]) -> dict[str, CacheRecord]:
        """Records of these nodes; a node without one is absent."""
        found: dict[str, CacheRecord] = {}
        for batch in self._batches(list(node_ids)):
            result = self.collection.get(ids=batch, include=["metadatas"])
            for node_id, metadata in zip(result["ids"], result["metadatas"] or [], strict=True):
                record = CacheRecord.from_metadata(metadata)
                if record is not None:
                    found[node_id] = record
        return found

    def delete(self, node_ids: Sequence[str]) -> None:
        """Forget the records of these nodes, and their rows where a row holds nothing else."""
        for batch in self._batches(list(node_ids)):
            result = self.collection.get(ids=batch, include=["documents", "metadatas"])
            documents: list[Any] = result["documents"] or []
            metadatas = result["metadatas"] or []
            bare: list[str] = []
            shared: list[str] = []
            for node_id, document, metadata in zip(result["ids"], documents, metadatas, strict=True):
                is_bare = document is None and set(metadata or {}) <= set(KEYS)
                (bare if is_bare else shared).append(node_id)
            if bare:
                self.collection.delete(ids=bare)
            if shared:
                cleared: list[Any] = [dict.fromkeys(KEYS) for _ in shared]
                self.collection.update(ids=shared, metadatas=cleared)

    def _batches(self, node_ids: list[str]) -> Iterator[list[str]]:
        """Distinct ids, as many at a time as Chroma takes."""
        distinct = list(dict.fromkeys(node_ids))
        size = self.collection._client.get_max_batch_size()
        for start in range(0, len(distinct), size):
            yield distinct[start : start + size]
