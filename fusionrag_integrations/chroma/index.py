"""`ChromaCacheIndex`: chunk cache records keyed by node ID in a Chroma collection.

The tensors stay in the engine's own store; Chroma holds a few short fields a node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .record import KEYS, CacheRecord

if TYPE_CHECKING:
    from chromadb.api import ClientAPI
    from chromadb.api.models.Collection import Collection

    from fusionrag_engine import Engine

_IS_OURS = {"fusionrag_content": "cache records"}
"""Metadata of a collection that `open` made for records alone."""


class ChromaCacheIndex:
    """Records in a collection of their own (`open`), or in one that holds the nodes (`ChromaCacheIndex(collection)`).

    A collection of its own gets a row a node, with a one-dimensional embedding that means nothing; it is not for
    searching. In a collection of nodes a record is merged into the metadata of the node's row, its text and embedding
    are left alone, and no row is ever made: the first embedding fixes the dimension of a collection for good. There,
    nodes that are written after `FusionRAGTransform` carry their records already, and need no index.

    Args:
        collection: a Chroma collection, behind any client.
    """

    def __init__(self, collection: Collection) -> None:
        self.collection = collection
        self._makes_rows = (collection.metadata or {}).items() >= _IS_OURS.items()

    @classmethod
    def open(
        cls, path: str | Path | None = None, *, client: ClientAPI | None = None, name: str = "fusionrag_caches"
    ) -> ChromaCacheIndex:
        """Records in the embedded Chroma at `path` (None: `./chroma`), or behind a given client such as `HttpClient`.

        The collection is made where it does not exist.
        """
        import chromadb
        from chromadb.config import Settings

        if client is None:
            settings = Settings(anonymized_telemetry=False)
            client = chromadb.PersistentClient(str(path or "chroma"), settings=settings)
        return cls(client.get_or_create_collection(name, embedding_function=None, metadata=dict(_IS_OURS)))

    @classmethod
    def from_engine(cls, engine: Engine, **settings: Any) -> ChromaCacheIndex:
        """As `open`; given neither `path` nor `client`, in `chroma` below the engine's `cache_dir`."""
        from fusionrag_engine.opening import catalog_directory

        directory = catalog_directory(engine.config)
        if directory is not None and not settings.keys() & {"path", "client"}:
            settings["path"] = directory / "chroma"
        return cls.open(**settings)

    def put(self, records: Mapping[str, CacheRecord]) -> int:
        """Write records, keyed by node ID, over what was recorded for these nodes before.

        Returns the number written: all, except in a collection of nodes, where nodes without a row are left out.
        """
        num_written = 0
        for batch in self._batches(records):
            known = set(self.collection.get(ids=batch, include=[])["ids"])
            old = [node_id for node_id in batch if node_id in known]
            new = [node_id for node_id in batch if node_id not in known and self._makes_rows]
            if old:
                # An update merges, so keys that a new record does not have are taken away by None.
                cleared: list[Any] = [{**dict.fromkeys(KEYS), **records[node_id].metadata()} for node_id in old]
                self.collection.update(ids=old, metadatas=cleared)
            if new:
                rows: list[Any] = [records[node_id].metadata() for node_id in new]
                meaningless: list[Any] = [[1.0]] * len(new)
                self.collection.upsert(ids=new, embeddings=meaningless, metadatas=rows)
            num_written += len(old) + len(new)
        return num_written

    def get(self, node_ids: Iterable[str]) -> dict[str, CacheRecord]:
        """Records of these nodes; a node without one is absent."""
        found: dict[str, CacheRecord] = {}
        for batch in self._batches(node_ids):
            result = self.collection.get(ids=batch, include=["metadatas"])
            for node_id, metadata in zip(result["ids"], result["metadatas"] or [], strict=True):
                record = CacheRecord.from_metadata(metadata)
                if record is not None:
                    found[node_id] = record
        return found

    def keys(self) -> set[str]:
        """Content keys of every chunk that a record refers to: what `Engine.gc(live=...)` keeps."""
        found: set[str] = set()
        size = self.collection._client.get_max_batch_size()
        for start in range(0, self.collection.count(), size):
            result = self.collection.get(limit=size, offset=start, include=["metadatas"])
            records = map(CacheRecord.from_metadata, result["metadatas"] or [])
            found.update(record.key for record in records if record is not None)
        return found

    def gc(self, engine: Engine, *, grace_s: float = 3600.0, dry_run: bool = False) -> int:
        """Delete the engine's chunks that no record here refers to; see `Engine.gc`.

        For an engine whose nodes are all recorded here: with several indexes, give `Engine.gc` all their keys.
        """
        return engine.gc(live=self.keys(), grace_s=grace_s, dry_run=dry_run)

    def delete(self, node_ids: Iterable[str]) -> None:
        """Forget the records of these nodes: their rows in a collection of its own, else only our keys of them."""
        for batch in self._batches(node_ids):
            known = self.collection.get(ids=batch, include=[])["ids"]
            if known and self._makes_rows:
                self.collection.delete(ids=known)
            elif known:
                cleared: list[Any] = [dict.fromkeys(KEYS) for _ in known]
                self.collection.update(ids=known, metadatas=cleared)

    def _batches(self, node_ids: Iterable[str]) -> Iterator[list[str]]:
        """Distinct ids, as many at a time as Chroma takes."""
        distinct = list(dict.fromkeys(node_ids))
        size = self.collection._client.get_max_batch_size()
        for start in range(0, len(distinct), size):
            yield distinct[start : start + size]
