"""`FusionRAGTransform`: the last step of an ingestion pipeline computes the nodes' chunk caches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.schema import BaseNode, TransformComponent

from fusionrag_engine import Chunk, Engine, FusionRAGError, PrecomputeReport

from .prompting import node_text

if TYPE_CHECKING:
    from fusionrag_integrations.chroma import ChromaCacheIndex

logger = logging.getLogger("fusionrag")


class FusionRAGTransform(TransformComponent):
    """Computes plain and enriched caches of nodes, and notes in each node's metadata what was stored for it.

    Put it last, behind splitters, extractors and embeddings: it caches `get_content(MetadataMode.LLM)`, the text that
    reaches the prompt, and takes `node.embedding` to find neighbours. Nodes without embeddings get plain caches, or are
    embedded by `EngineConfig(embed=...)`.

    An engine that fails leaves the nodes without caches, with a warning: the query computes them. `is_strict` raises
    instead.

    Attributes:
        last_report: the engine's report on the last call; `summary()` says what was computed and what was found.
    """

    scope: str = Field(default="", description="Scope of the caches; neighbours never cross it.")
    settings_id: str = Field(default="", description="Namespace of the engine's caches: another one is another result.")
    show_progress: bool = Field(default=False, description="Show progress bars.")
    is_strict: bool = Field(default=False, description="Raise when the engine fails.")
    _engine: Engine = PrivateAttr()
    _cache_index: ChromaCacheIndex | None = PrivateAttr(default=None)
    _last_report: PrecomputeReport | None = PrivateAttr(default=None)

    def __init__(self, engine: Engine, cache_index: ChromaCacheIndex | None = None, **settings: Any) -> None:
        settings["settings_id"] = f"{engine.library.keys.namespace}/{engine.config.top_n}"
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
            raise FusionRAGError("this transform has not run yet; run the pipeline it is part of")
        return self._last_report

    def __getstate__(self) -> dict[Any, Any]:
        raise FusionRAGError(
            "FusionRAGTransform cannot be sent to another process, its engine holds a loaded model: run the pipeline "
            "with num_workers=1, or run the other transformations with workers first and this one after them"
        )

    def __call__(self, nodes: Sequence[BaseNode], **_kwargs: Any) -> Sequence[BaseNode]:
        """Compute what is missing; the nodes come back with the records in their metadata."""
        from fusionrag_integrations.chroma.record import KEYS, CacheRecord

        for node in nodes:
            # New lists: sibling nodes may share the old ones.
            node.excluded_embed_metadata_keys = _with_keys(node.excluded_embed_metadata_keys, KEYS)
            node.excluded_llm_metadata_keys = _with_keys(node.excluded_llm_metadata_keys, KEYS)
            for key in KEYS:
                node.metadata.pop(key, None)
        chunks = [Chunk(node_text(node), id=node.node_id, scope=self.scope) for node in nodes]
        vectors = [node.embedding for node in nodes]
        embeddings = vectors if vectors and all(vector is not None for vector in vectors) else None
        try:
            report = self._engine.precompute(chunks, embeddings=embeddings, show_progress=self.show_progress)
        except Exception as error:
            if self.is_strict:
                raise
            logger.warning("no chunk caches for %d nodes, queries compute them: %s", len(nodes), error, exc_info=True)
            self._last_report = PrecomputeReport([], num_chunks=len(nodes), num_skipped=0)
            return nodes
        self._last_report = report
        logger.info("%s", report.summary())
        records = [CacheRecord.from_chunk(record) for record in report.records]
        for node, record in zip(nodes, records, strict=True):
            if record is not None:
                node.metadata.update(record.metadata())
        if self._cache_index is not None:
            found = {node.node_id: record for node, record in zip(nodes, records, strict=True) if record is not None}
            self._cache_index.put(found)
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        return await asyncio.to_thread(self.__call__, nodes, **kwargs)


def _with_keys(excluded: list[str], keys: Sequence[str]) -> list[str]:
    return [*excluded, *(key for key in keys if key not in excluded)]
