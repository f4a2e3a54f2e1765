"""`FusionRAGDocumentTransformer`: computes the chunk caches of documents, behind a text splitter."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.documents import BaseDocumentTransformer, Document
from langchain_core.embeddings import Embeddings

from fusionrag_engine import Chunk, ChunkRecord, Engine, FusionRAGError, PrecomputeReport
from fusionrag_integrations.chroma.record import CacheRecord

from .documents import ID_KEY, as_documents, ingested_scope, with_reference

if TYPE_CHECKING:
    from fusionrag_integrations.chroma import ChromaCacheIndex

logger = logging.getLogger("fusionrag")


class FusionRAGDocumentTransformer(BaseDocumentTransformer):
    """Computes plain and enriched caches of documents, and names them in the metadata of the copies it returns.

    Put it last, behind splitters, and store what it returns: `page_content` is the text that is cached. The name
    (`fusionrag_id`, and `fusionrag_scope` unless it is "") depends on a document's text and metadata alone, so
    `index()` finds what is unchanged.

    An engine that fails leaves the documents without caches, with a warning: the question computes them. `is_strict`
    raises instead.

    Args:
        engine: shared with the models that answer.
        embeddings: finds neighbours, with which caches are enriched. None: the engine's `EngineConfig(embed=...)`, or
            plain caches only.
        scope: of the caches; neighbours never cross it.
        cache_index: also write full records of the caches there, keyed by `fusionrag_id`.
        show_progress: show progress bars.
        is_strict: raise when the engine fails.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        embeddings: Embeddings | None = None,
        scope: str = "",
        cache_index: ChromaCacheIndex | None = None,
        show_progress: bool = False,
        is_strict: bool = False,
    ) -> None:
        self.engine = engine
        self.embeddings = embeddings
        self.scope = scope
        self.cache_index = cache_index
        self.show_progress = show_progress
        self.is_strict = is_strict
        self._last_report: PrecomputeReport | None = None

    @classmethod
    def from_engine(cls, engine: Engine, **settings: Any) -> FusionRAGDocumentTransformer:
        return cls(engine, **settings)

    @property
    def last_report(self) -> PrecomputeReport:
        """The engine's report on the last call; `summary()` says what was computed and what was found."""
        if self._last_report is None:
            raise FusionRAGError("this transformer has not run yet; call transform_documents(documents) first")
        return self._last_report

    def __deepcopy__(self, _memo: dict[int, Any] | None = None) -> FusionRAGDocumentTransformer:
        copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__)  # the engine is shared: it holds the model
        return copy

    def __getstate__(self) -> dict[str, Any]:
        raise FusionRAGError(
            "FusionRAGDocumentTransformer cannot be sent to another process, its engine holds a loaded model: split in "
            "other processes if need be, and transform in this one"
        )

    def transform_documents(self, documents: Sequence[Document], **_kwargs: Any) -> list[Document]:
        """Compute what is missing; returns copies that name their caches. (`atransform_documents` does so in a
        thread.)"""
        named = [with_reference(document, self.scope) for document in documents]
        self._last_report = report = self._precompute(named)
        if self.cache_index is not None:
            pairs = zip(named, map(CacheRecord.from_chunk, report.records), strict=True)
            self._index({str(document.metadata[ID_KEY]): record for document, record in pairs if record is not None})
        return named

    def _precompute(self, named: Sequence[Document]) -> PrecomputeReport:
        chunks = [Chunk(item.page_content, id=item.metadata[ID_KEY], scope=self.scope) for item in named]
        try:
            vectors = self.embeddings.embed_documents([chunk.text for chunk in chunks]) if self.embeddings else None
            report = self.engine.precompute(chunks, embeddings=vectors, show_progress=self.show_progress)
        except Exception as error:
            if self.is_strict:
                raise
            logger.warning("no caches for %d documents, questions compute them: %s", len(chunks), error, exc_info=True)
            reason = f"{type(error).__name__}: {error}"
            records = [ChunkRecord(chunk.id, None, scope=self.scope, reason=reason) for chunk in chunks]
            return PrecomputeReport(records, num_chunks=len(chunks), num_skipped=len(chunks))
        logger.info("%s", report.summary())
        return report

    def _index(self, records: dict[str, CacheRecord]) -> None:
        assert self.cache_index is not None
        try:
            self.cache_index.put(records)
        except Exception as error:
            if self.is_strict:
                raise
            logger.warning("%d cache records were not indexed, the caches are kept: %s", len(records), error)


def release(engine: Engine, documents: Iterable[Document]) -> int:
    """Delete the caches of documents, as they come from the transformer or from a vector store; returns how many caches
    went. `FusionRAGChroma` does this for whatever it deletes."""
    num_dropped = 0
    for document in as_documents(documents):
        for name in dict.fromkeys((document.metadata.get(ID_KEY), document.id)):
            if name is not None:
                num_dropped += engine.delete([str(name)])
        # A question may have cached the text without a name.
        chunk = Chunk(document.page_content, id=document.id, scope=ingested_scope(document, ""))
        num_dropped += engine.delete([chunk])
    return num_dropped
