"""`FusionRAGChromaVectorStore`: a Chroma vector store that releases the chunk caches of the nodes it deletes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseNode, MetadataMode
from llama_index.core.vector_stores.types import MetadataFilters
from llama_index.core.vector_stores.utils import node_to_metadata_dict
from llama_index.vector_stores.chroma import ChromaVectorStore
from llama_index.vector_stores.chroma.base import _to_chroma_filter

from fusionrag_engine import Engine
from fusionrag_integrations.chroma import CacheRecord


class FusionRAGChromaVectorStore(ChromaVectorStore):
    """`ChromaVectorStore` with `engine=`: whatever deletes nodes here also deletes their caches.

    Nodes are written over rows of the same ID, which Chroma's own `add` would silently leave as they were.
    """

    _engine: Engine = PrivateAttr()

    def __init__(self, *args: Any, engine: Engine, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._engine = engine

    @classmethod
    def from_engine(cls, engine: Engine, **settings: Any) -> FusionRAGChromaVectorStore:
        """As `ChromaVectorStore(...)`, for instance `from_engine(engine, chroma_collection=collection)`."""
        return cls(engine=engine, **settings)

    @classmethod
    def class_name(cls) -> str:
        return "FusionRAGChromaVectorStore"

    def add(self, nodes: Sequence[BaseNode], **_add_kwargs: Any) -> list[str]:
        size = self._collection._client.get_max_batch_size()
        last = {node.node_id: node for node in nodes}  # of nodes with the same ID the last one counts
        rows = list(last.values())
        for start in range(0, len(rows), size):
            batch = rows[start : start + size]
            metadatas = [
                node_to_metadata_dict(node, remove_text=True, flat_metadata=self.flat_metadata) for node in batch
            ]
            embeddings: list[Any] = [node.get_embedding() for node in batch]
            self._collection.upsert(
                ids=[node.node_id for node in batch],
                embeddings=embeddings,
                metadatas=[
                    {key: "" if value is None else value for key, value in metadata.items()} for metadata in metadatas
                ],
                documents=[node.get_content(metadata_mode=MetadataMode.NONE) for node in batch],
            )
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        references = self._references(where={"document_id": ref_doc_id})
        super().delete(ref_doc_id, **delete_kwargs)
        self._release(references)

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        await asyncio.to_thread(self.delete, ref_doc_id, **delete_kwargs)

    def delete_nodes(  # type: ignore[override] # the base class annotates filters as a list, but takes one object
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **_delete_kwargs: Any
    ) -> None:
        """Delete nodes by ids, by filters, or those of the ids that pass the filters; neither deletes nothing."""
        where = None if filters is None else _to_chroma_filter(filters)
        if not node_ids and where is None:
            return
        references = self._references(ids=node_ids or None, where=where)
        self._delete_rows(references)
        self._release(references)

    async def adelete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        await asyncio.to_thread(self.delete_nodes, node_ids, filters, **delete_kwargs)

    def clear(self) -> None:
        references = self._references()
        self._delete_rows(references)
        self._release(references)

    async def aclear(self) -> None:
        await asyncio.to_thread(self.clear)

    def _references(self, **selection: Any) -> dict[str, str | None]:
        """Scope of each row about to go. None, which is every scope, where no record tells it: a node that was never
        ingested by the transform may have been cached by a question."""
        result = self._collection.get(**selection, include=["metadatas"])
        records = map(CacheRecord.from_metadata, result["metadatas"] or [])
        pairs = zip(result["ids"], records, strict=True)
        return {node_id: None if record is None else record.scope for node_id, record in pairs}

    def _delete_rows(self, node_ids: Iterable[str]) -> None:
        ids = list(node_ids)
        size = self._collection._client.get_max_batch_size()
        for start in range(0, len(ids), size):  # Chroma refuses an empty list
            self._collection.delete(ids=ids[start : start + size])

    def _release(self, references: dict[str, str | None]) -> None:
        for node_id, scope in references.items():
            self._engine.delete([node_id], scope=scope)
