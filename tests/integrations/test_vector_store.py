"""`FusionRAGChromaVectorStore`: whatever deletes nodes releases their caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters
from llama_index.vector_stores.chroma import ChromaVectorStore

from fusionrag_engine import Chunk, Engine
from fusionrag_integrations.llama_index import (
    FusionRAGChromaVectorStore,
    FusionRAGLLM,
    FusionRAGSynthesizer,
    FusionRAGTransform,
)
from tests.integrations.support import (
    QUESTION,
    TEXTS,
    LetterEmbedding,
    documents,
    new_collection,
    settle,
    splitter,
)


def ingested(engine: Engine, scope: str = "") -> FusionRAGChromaVectorStore:
    store = FusionRAGChromaVectorStore.from_engine(engine, chroma_collection=new_collection())
    transform = FusionRAGTransform.from_engine(engine, scope=scope)
    IngestionPipeline(transformations=[splitter(), LetterEmbedding(), transform], vector_store=store).run(
        documents=documents()
    )
    assert store._collection.count() == len(TEXTS)
    return store


def cached(engine: Engine, scope: str = "") -> list[int]:
    """Which of the documents have a cache."""
    texts = [f"file: {index}.md\n\n{text}" for index, text in enumerate(TEXTS)]
    return [index for index, text in enumerate(texts) if engine.has(Chunk(text, scope=scope)).key]


FILE_0 = MetadataFilters(filters=[MetadataFilter(key="file", value="0.md")])

DELETIONS: dict[str, tuple[Callable[[Any], Any], list[int]]] = {
    "delete": (lambda store: store.delete("doc-0"), [1, 2, 3, 4]),
    "adelete": (lambda store: store.adelete("doc-0"), [1, 2, 3, 4]),
    "delete_nodes": (lambda store: store.delete_nodes(["doc-0-0", "nobody"]), [1, 2, 3, 4]),
    "adelete_nodes": (lambda store: store.adelete_nodes(["doc-0-0", "doc-2-0"]), [1, 3, 4]),
    "by_filter": (lambda store: store.delete_nodes(filters=FILE_0), [1, 2, 3, 4]),
    "by_both": (lambda store: store.delete_nodes(["doc-0-0", "doc-1-0"], FILE_0), [1, 2, 3, 4]),
    "neither": (lambda store: store.delete_nodes(), [0, 1, 2, 3, 4]),
    "unknown": (lambda store: store.delete("nobody"), [0, 1, 2, 3, 4]),
    "clear": (lambda store: store.clear(), []),
    "aclear": (lambda store: store.aclear(), []),
}


@pytest.mark.parametrize("name", DELETIONS)
async def test_deleting_nodes_releases_their_caches(engine: Engine, name: str) -> None:
    store = ingested(engine)
    assert cached(engine) == [0, 1, 2, 3, 4]
    delete, left = DELETIONS[name]
    result = delete(store)
    if result is not None:
        await result
    assert cached(engine) == left
    assert sorted(store._collection.get()["ids"]) == [f"doc-{index}-0" for index in left]


@pytest.mark.parametrize("name", ["clear", "delete_nodes", "delete"])
def test_an_empty_collection_has_nothing_to_delete(engine: Engine, name: str) -> None:
    store = FusionRAGChromaVectorStore.from_engine(engine, chroma_collection=new_collection())
    DELETIONS[name][0](store)


def test_caches_made_with_the_deleted_text_go_as_well(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(top_n=4)  # every other document
    store = ingested(engine)
    rows = store._collection.get(include=["metadatas"])["metadatas"]
    key = engine.has(Chunk(f"file: 0.md\n\n{TEXTS[0]}")).key
    with_it = [row["file"] for row in rows if str(key) in str(row.get("fusionrag_neighbours"))]
    assert with_it, "the control: some chunk was enriched with the deleted one"
    store.delete("doc-0")
    for name in with_it:
        index = int(name.split(".")[0])
        assert engine.has(Chunk(f"file: {name}\n\n{TEXTS[index]}")).kind == "plain"


def test_scopes_are_not_crossed(engine: Engine) -> None:
    one, _two = ingested(engine, "one"), ingested(engine, "two")
    one.delete("doc-0")
    assert cached(engine, "one") == [1, 2, 3, 4]
    assert cached(engine, "two") == [0, 1, 2, 3, 4], "the same node id, in another scope"


def test_caches_that_a_question_made_are_released_too(engine: Engine) -> None:
    """No transform ran, so no row has a record; the misses of a question were stored all the same."""
    store = FusionRAGChromaVectorStore.from_engine(engine, chroma_collection=new_collection())
    IngestionPipeline(transformations=[splitter(), LetterEmbedding()], vector_store=store).run(documents=documents())
    index = VectorStoreIndex.from_vector_store(store, embed_model=LetterEmbedding())
    llm = FusionRAGLLM.from_engine(engine)
    query_engine = index.as_query_engine(llm=llm, response_synthesizer=FusionRAGSynthesizer(llm), similarity_top_k=5)
    query_engine.query(QUESTION)
    settle(engine)
    assert cached(engine) == [0, 1, 2, 3, 4]
    store.clear()
    assert cached(engine) == []
    assert engine.stats()["num_chunks"] == 0


def test_rows_are_replaced_not_left_as_they_were(engine: Engine) -> None:
    """Chroma's `add` silently ignores an id that exists, which ChromaVectorStore inherits."""

    def node(text: str) -> TextNode:
        return TextNode(text=text, id_="one", embedding=[1.0, 2.0], metadata={"empty": None})

    for store, expected in (
        (FusionRAGChromaVectorStore.from_engine(engine, chroma_collection=new_collection()), "new"),
        (ChromaVectorStore(chroma_collection=new_collection()), "old"),
    ):
        assert store.add([node("old")]) == ["one"]
        assert store.add([node("new")]) == ["one"]
        assert store._collection.get()["documents"] == [expected]
        assert [found.get_content() for found in store.get_nodes(["one"])] == [expected]


def test_of_nodes_with_one_id_the_last_counts(engine: Engine) -> None:
    """Chroma refuses a batch with duplicate ids."""
    store = FusionRAGChromaVectorStore.from_engine(engine, chroma_collection=new_collection())
    store.add([TextNode(text=text, id_="one", embedding=[1.0, 2.0]) for text in ("old", "new")])
    assert store._collection.get()["documents"] == ["new"]


def test_many_nodes_are_written_in_batches(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FusionRAGChromaVectorStore.from_engine(engine, chroma_collection=new_collection())
    monkeypatch.setattr(store._collection._client, "get_max_batch_size", lambda: 3)
    nodes = [TextNode(text=f"text {number}", id_=f"n-{number}", embedding=[1.0, number]) for number in range(8)]
    store.add(nodes)
    assert store._collection.count() == 8
    store.clear()
    assert store._collection.count() == 0
