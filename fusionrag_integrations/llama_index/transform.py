"""`FusionRAGTransform`: the last step of an ingestion pipeline computes the nodes' chunk caches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.schema import BaseNode, Document, TransformComponent

from fusionrag_engine import Chunk, ChunkRecord, Engine, FusionRAGError, PrecomputeReport
from fusionrag_integrations.chroma.record import KEYS, CacheRecord

from .pieces import node_text
from .settings import refuse_unknown

if TYPE_CHECKING:
    from chromadb.api.models.Collection import Collection

    from fusionrag_integrations.chroma import ChromaCacheIndex

logger = logging.getLogger("fusionrag")


class FusionRAGTransform(TransformComponent):
    """Computes plain and enriched caches of nodes, and notes in each node's metadata what was stored for it.

    Put it last, behind splitters, extractors and embeddings: it caches `get_content(MetadataMode.LLM)`, the text that
    reaches the prompt, and takes `node.embedding` to find neighbours. A node that has none gets a plain cache; where
    none has any, `EngineConfig(embed=...)` embeds them. Nodes are changed in place, input Documents are copied.

    An engine that fails leaves the nodes without caches, with a warning: the query computes them. `is_strict` raises
    instead.

    Args:
        cache_index: also write the records there, keyed by node ID.

    Attributes:
        last_report: the engine's report on the last call; `summary()` says what was computed and what was found.

    Raises:
        UnknownSettingError: a setting was given under a name that does not exist.
    """

    scope: str = Field(default="", description="Scope of the caches; neighbours never cross it.")
    settings_id: str = Field(default="", description="Namespace of the engine's caches: another one is another result.")
    show_progress: bool = Field(default=False, description="Show progress bars.")
    is_strict: bool = Field(default=False, description="Raise when the engine fails.")
    _engine: Engine = PrivateAttr()
    _cache_index: ChromaCacheIndex | None = PrivateAttr(default=None)
    _last_report: PrecomputeReport | None = PrivateAttr(default=None)

    def __init__(self, engine: Engine, cache_index: ChromaCacheIndex | None = None, **settings: Any) -> None:
        refuse_unknown(type(self), settings, beside=["engine", "cache_index"])
        settings["settings_id"] = f"{engine.namespace}/{engine.config.top_n}"
        super().__init__(**settings)
        self._engine = engine
        self._cache_index = cache_index

    @classmethod
    def from_engine(cls, engine: Engine, **settings: Any) -> FusionRAGTransform:
        return cls(engine, **settings)

    @classmethod
    def class_name(cls) -> str:
        return "FusionRAGTransform"

    @property
    def last_report(self) -> PrecomputeReport:
        if self._last_report is None:
            raise FusionRAGError(
                "this transform has not run yet; run the pipeline it is part of - one that answers from its own cache "
                "does not call it (disable_cache=True)"
            )
        return self._last_report

    def __deepcopy__(self, _memo: dict[int, Any] | None = None) -> FusionRAGTransform:
        return self.model_copy()  # the engine is shared: it holds the model

    def __getstate__(self) -> dict[Any, Any]:
        raise FusionRAGError(
            "FusionRAGTransform cannot be sent to another process, its engine holds a loaded model: run the pipeline "
            "with num_workers=1, or run the other transformations with workers first and this one after them"
        )

    def __call__(self, nodes: Sequence[BaseNode], **_kwargs: Any) -> Sequence[BaseNode]:
        """Compute what is missing; the nodes come back with the records in their metadata."""
        prepared = [_without_record(node) for node in nodes]
        report = self._precompute(prepared)
        self._last_report = report
        found: dict[str, CacheRecord] = {}
        for node, chunk_record in zip(prepared, report.records, strict=True):
            if (record := CacheRecord.from_chunk(chunk_record)) is not None:
                node.metadata.update(record.metadata())
                found[node.node_id] = record
        self._index(found)
        return prepared

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        return await asyncio.to_thread(self.__call__, nodes, **kwargs)

    def _precompute(self, nodes: Sequence[BaseNode]) -> PrecomputeReport:
        try:
            chunks = [Chunk(node_text(node), id=node.node_id, scope=self.scope) for node in nodes]
            vectors = [node.embedding for node in nodes]
            num_without = vectors.count(None)
            embeddings = None if num_without == len(vectors) else vectors
            if embeddings is not None and num_without:
                logger.warning(
                    "%d of %d nodes have no embedding: they get plain caches, not enriched ones; put the embedding "
                    "model before FusionRAGTransform",
                    num_without,
                    len(vectors),
                )
            report = self._engine.precompute(chunks, embeddings=embeddings, show_progress=self.show_progress)
        except Exception as error:
            if self.is_strict:
                raise
            logger.warning("no chunk caches for %d nodes, queries compute them: %s", len(nodes), error, exc_info=True)
            reason = f"{type(error).__name__}: {error}"
            records = [ChunkRecord(node.node_id, None, scope=self.scope, reason=reason) for node in nodes]
            return PrecomputeReport(records, num_chunks=len(nodes), num_skipped=len(nodes))
        logger.info("%s", report.summary())
        return report

    def backfill(self, collection: Collection, *, with_embeddings: bool = True) -> PrecomputeReport:
        """Compute the caches of the nodes that a Chroma collection holds already, and note them in its rows.

        For nodes that LlamaIndex's Chroma vector store wrote before there were caches, or whose caches are gone; run
        again, it computes nothing. Rows that LlamaIndex did not write are left alone, with a warning.

        Args:
            with_embeddings: take the rows' embeddings to find neighbours; False for embeddings that mean nothing.
        """
        from .backfill import read_nodes, write_records

        nodes = read_nodes(collection)
        if not with_embeddings:
            for node in nodes:
                node.embedding = None
        write_records(collection, self(nodes))
        return self.last_report

    def _index(self, found: dict[str, CacheRecord]) -> None:
        if self._cache_index is None:
            return
        try:
            self._cache_index.put(found)
        except Exception as error:
            if self.is_strict:
                raise
            logger.warning("%d cache records were not indexed, the caches are kept: %s", len(found), error)


def _without_record(node: BaseNode) -> BaseNode:
    """The node with our keys excluded from its texts and no record of an earlier run."""
    if isinstance(node, Document):
        # Document stores hash the input after the run: changed metadata would make it new every time.
        node = node.model_copy(update={"metadata": dict(node.metadata)})
    # New lists: sibling nodes may share the old ones.
    node.excluded_embed_metadata_keys = _with_keys(node.excluded_embed_metadata_keys)
    node.excluded_llm_metadata_keys = _with_keys(node.excluded_llm_metadata_keys)
    for key in KEYS:
        node.metadata.pop(key, None)
    return node


def _with_keys(excluded: list[str]) -> list[str]:
    return [*excluded, *(key for key in KEYS if key not in excluded)]
