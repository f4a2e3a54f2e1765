"""`FusionRAGChroma`: LangChain's Chroma vector store, which releases the caches of the documents it deletes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from langchain_chroma import Chroma
from langchain_core.documents import Document

from fusionrag_engine import Engine

from .documents import ID_KEY, KEYS
from .transformer import release


class FusionRAGChroma(Chroma):
    """`Chroma` with `engine=`: whatever deletes or replaces documents here also deletes their caches.

    Caches of a document go when no row of this collection names them any more. One that another collection still needs
    is computed again there.
    """

    def __init__(self, *args: Any, engine: Engine, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._engine = engine

    @classmethod
    def from_engine(cls, engine: Engine, **settings: Any) -> FusionRAGChroma:
        """As `Chroma(...)`, for instance `from_engine(engine, collection_name=..., embedding_function=...)`."""
        return cls(engine=engine, **settings)

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """As `Chroma.add_texts`; rows that are written over release what they held."""
        old = list(self._rows(ids=[name for name in ids if name])) if ids and any(ids) else []
        added = super().add_texts(texts, metadatas, ids, **kwargs)
        self._release(old)
        return added

    def update_documents(self, ids: list[str], documents: list[Document]) -> None:
        """As `Chroma.update_documents`; the rows release what they held."""
        old = list(self._rows(ids=ids))
        # Chroma merges metadata: a name that the new document does not have is taken away by None.
        cleared = [item.model_copy(update={"metadata": {**dict.fromkeys(KEYS), **item.metadata}}) for item in documents]
        super().update_documents(ids, cleared)
        self._release(old)

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> None:
        """As `Chroma.delete`: rows by ids, by `where`, by `where_document`."""
        selection = {name: kwargs[name] for name in ("where", "where_document") if kwargs.get(name)}
        old = list(self._rows(ids=ids, **selection)) if ids or selection else []
        super().delete(ids, **kwargs)
        self._release(old)

    def delete_collection(self) -> None:
        """As `Chroma.delete_collection`; also what `reset_collection` begins with."""
        old = list(self._rows())
        super().delete_collection()
        release(self._engine, old)

    def _rows(self, ids: Sequence[str] | None = None, **selection: Any) -> Iterator[Document]:
        """Documents of these rows, as many at a time as Chroma takes."""
        size = self._client.get_max_batch_size()
        for start in range(0, 1 if ids is None else len(ids), size):
            part = None if ids is None else list(dict.fromkeys(ids[start : start + size]))
            found = self._collection.get(ids=part, include=["documents", "metadatas"], **selection)
            rows = zip(found["ids"], found["documents"] or [], found["metadatas"] or [], strict=True)
            for name, text, metadata in rows:
                yield Document(text or "", id=name, metadata=dict(metadata or {}))

    def _release(self, old: Sequence[Document]) -> None:
        """Release what rows held, except what they or others still hold."""
        kept = set(map(_held, self._rows([str(row.id) for row in old])))
        gone = [row for row in old if _held(row) not in kept]
        names = list({row.metadata[ID_KEY] for row in gone if ID_KEY in row.metadata})
        size = self._client.get_max_batch_size()
        parts = [{ID_KEY: {"$in": names[start : start + size]}} for start in range(0, len(names), size)]
        still = {row.metadata[ID_KEY] for part in parts for row in self._rows(where=part)}
        release(self._engine, [row for row in gone if row.metadata.get(ID_KEY) not in still])


def _held(row: Document) -> tuple[Any, ...]:
    """What a row keeps caches for."""
    return row.id, row.page_content, row.metadata.get(ID_KEY)
