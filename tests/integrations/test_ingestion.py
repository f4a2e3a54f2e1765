"""`FusionRAGTransform` in every way LlamaIndex ingests: pipelines with document stores and caches, indexes that grow
and shrink, vector stores, persisted and reloaded."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import StorageContext, VectorStoreIndex, load_index_from_storage
from llama_index.core.ingestion import DocstoreStrategy, IngestionCache, IngestionPipeline
from llama_index.core.schema import Document, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore

from fusionrag_engine import Chunk, Engine, EngineConfig
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
    splitter,
    statuses,
    tiny_model,
    tiny_tokenizer,
)

NEW_TEXT = "The harbour office in Lindmark now closes at two on Fridays, not at noon."


def cached(engine: Engine) -> set[str]:
    """Which of the documents' texts have a cache."""
    texts = {**{f"doc-{index}": text for index, text in enumerate(TEXTS)}, "new": NEW_TEXT}
    files = [f"{index}.md" for index in range(len(TEXTS))]
    return {
        name
        for name, text in texts.items()
        if any(engine.has(Chunk(f"file: {file}\n\n{text}")).key for file in files) or engine.has(text).key
    }


def changed(index: int = 0, text: str = NEW_TEXT) -> list[Document]:
    """The documents, one of them with another text."""
    result = documents()
    result[index].set_content(text)
    return result


class Ingestion:
    """A pipeline into Chroma, with a document store."""

    def __init__(self, engine: Engine, strategy: DocstoreStrategy) -> None:
        self.transform = FusionRAGTransform.from_engine(engine)
        self.store = FusionRAGChromaVectorStore.from_engine(engine, chroma_collection=new_collection())
        self.pipeline = IngestionPipeline(
            transformations=[splitter(), LetterEmbedding(), self.transform],
            docstore=SimpleDocumentStore(),
            vector_store=self.store,
            docstore_strategy=strategy,
        )

    async def run(self, given: list[Document], is_async: bool) -> int:
        """How many nodes were ingested."""
        if is_async:
            return len(await self.pipeline.arun(documents=given))
        return len(self.pipeline.run(documents=given))

    def rows(self) -> set[str]:
        return set(self.store._collection.get()["ids"])


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("strategy", list(DocstoreStrategy))
async def test_a_document_store_decides_what_is_ingested(
    engine: Engine, strategy: DocstoreStrategy, is_async: bool
) -> None:
    ingestion = Ingestion(engine, strategy)
    assert await ingestion.run(documents(), is_async) == len(TEXTS)
    assert await ingestion.run(documents(), is_async) == 0, "nothing changed"
    assert ingestion.transform.last_report.num_computed == 0
    assert cached(engine) == {f"doc-{index}" for index in range(len(TEXTS))}

    assert await ingestion.run(changed()[:4], is_async) == 1, "one changed, one is gone"
    expected = {"doc-1", "doc-2", "doc-3", "new"}
    if strategy is not DocstoreStrategy.UPSERTS_AND_DELETE:
        expected.add("doc-4")
    assert cached(engine) == expected, "the id names the new text now; the old one has no name left"
    assert ingestion.rows() == {f"doc-{index}-0" for index in range(5) if f"doc-{index}" in expected or index == 0}
    report = engine.precompute([Chunk(f"file: 0.md\n\n{NEW_TEXT}", id="doc-0-0")], embeddings=None)
    assert report.num_computed == 0
    row = ingestion.store._collection.get(ids=["doc-0-0"], include=["metadatas", "documents"])
    assert row["documents"] == [NEW_TEXT]
    assert row["metadatas"][0]["fusionrag_key"] == report.records[0].key, "the row's record is the new text's"


def test_without_a_vector_store_duplicates_are_left_out(engine: Engine) -> None:
    transform = FusionRAGTransform.from_engine(engine)
    pipeline = IngestionPipeline(
        transformations=[splitter(), LetterEmbedding(), transform], docstore=SimpleDocumentStore()
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # LlamaIndex says that upserts need a vector store
        assert len(pipeline.run(documents=documents())) == len(TEXTS)
        assert len(pipeline.run(documents=[*documents(), Document(text="one more", doc_id="more")])) == 1


def test_a_pipeline_persisted_and_loaded_again(tmp_path: Path) -> None:
    """Document store, pipeline cache and chunk caches all come back from disk."""
    for run in range(2):
        config = EngineConfig(cache_dir=tmp_path / "caches", top_n=2, max_new_tokens=8)
        with Engine(tiny_model(), tiny_tokenizer(), config) as engine:
            transform = FusionRAGTransform.from_engine(engine)
            pipeline = IngestionPipeline(
                transformations=[splitter(), LetterEmbedding(), transform],
                docstore=SimpleDocumentStore(),
                cache=IngestionCache(),
            )
            if run:
                pipeline.load(str(tmp_path / "pipeline"))
            nodes = pipeline.run(documents=documents())
            assert len(nodes) == (0 if run else len(TEXTS))
            pipeline.persist(str(tmp_path / "pipeline"))
            pipeline.docstore = None
            again = pipeline.run(documents=documents())  # out of the pipeline's cache
            assert [node.metadata["fusionrag_kind"] for node in again] == ["enriched"] * len(TEXTS)
            assert engine.stats()["num_chunks"] == len(TEXTS)


class Index:
    """An index on a vector store, made with `from_documents` and the transform."""

    def __init__(self, engine: Engine, kind: str) -> None:
        self.engine = engine
        self.transform = FusionRAGTransform.from_engine(engine)
        store: Any = SimpleVectorStore()
        if kind == "chroma":
            store = FusionRAGChromaVectorStore.from_engine(engine, chroma_collection=new_collection())
        self.index = VectorStoreIndex.from_documents(
            documents(),
            storage_context=StorageContext.from_defaults(vector_store=store),
            transformations=[splitter(), LetterEmbedding(), self.transform],
            embed_model=LetterEmbedding(),
        )

    def ask(self) -> Any:
        llm = FusionRAGLLM.from_engine(self.engine)
        return self.index.as_query_engine(
            llm=llm, response_synthesizer=FusionRAGSynthesizer(llm), similarity_top_k=6
        ).query(QUESTION)

    def sources(self) -> set[str]:
        """Documents behind an answer, none of whose nodes may be a miss."""
        response = self.ask()
        assert "miss" not in statuses(response).values()
        return {node.node.ref_doc_id or "" for node in response.source_nodes}


@pytest.mark.parametrize("kind", ["chroma", "simple"])
def test_an_index_grows_changes_and_shrinks(engine: Engine, kind: str) -> None:
    index = Index(engine, kind)
    names = {f"doc-{number}" for number in range(5)}
    assert index.sources() == names
    index.index.insert(Document(text="Boats are painted in May.", doc_id="more"))
    assert index.sources() == {*names, "more"}
    assert index.transform.last_report.num_plain_computed == 1

    index.index.update_ref_doc(changed()[0])
    assert "new" in cached(engine)
    assert "doc-0" not in cached(engine)
    assert NEW_TEXT in {node.node.get_content() for node in index.ask().source_nodes}

    refreshed = index.index.refresh_ref_docs(changed()) if kind == "simple" else [False] * 5
    assert refreshed == [False] * 5, "every document is as it was ingested"
    index.index.delete_ref_doc("doc-1", delete_from_docstore=True)
    assert index.sources() == {*names, "more"} - {"doc-1"}
    assert ("doc-1" in cached(engine)) == (kind == "simple"), "only our vector store knows of the caches"


def test_other_vector_stores_release_by_hand(engine: Engine) -> None:
    """A store that is not ours deletes rows only: the ids are the caches' names."""
    index = Index(engine, "simple")
    names = [node_id for node_id in index.index.docstore.docs if node_id.startswith("doc-1")]
    index.index.delete_ref_doc("doc-1", delete_from_docstore=True)
    assert "doc-1" in cached(engine)
    engine.delete(names)
    assert "doc-1" not in cached(engine)


def test_an_index_persisted_and_loaded_again(tmp_path: Path, engine: Engine) -> None:
    index = Index(engine, "simple")
    index.index.storage_context.persist(str(tmp_path))
    context = StorageContext.from_defaults(persist_dir=str(tmp_path))
    index.index = load_index_from_storage(  # type: ignore[assignment]
        context, embed_model=LetterEmbedding(), transformations=[splitter(), LetterEmbedding(), index.transform]
    )
    assert index.sources() == {f"doc-{number}" for number in range(5)}
    response = index.ask()
    assert all("fusionrag_key" in node.node.metadata for node in response.source_nodes)
    assert all("fusionrag_" not in node.node.get_content("llm") for node in response.source_nodes)


def test_a_node_without_an_embedding_costs_the_others_nothing(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    embed = LetterEmbedding()
    nodes = [TextNode(text=text, embedding=embed.get_text_embedding(text)) for text in TEXTS]
    nodes[2].embedding = None
    with caplog.at_level(logging.WARNING, logger="fusionrag"):
        done = FusionRAGTransform.from_engine(engine)(nodes)
    kinds = [node.metadata["fusionrag_kind"] for node in done]
    assert kinds == ["enriched", "enriched", "plain", "enriched", "enriched"]
    assert "1 of 5 nodes have no embedding" in caplog.text


def test_a_pipeline_may_be_cut_in_two(engine: Engine) -> None:
    """As the error of `num_workers` says: what workers can do first, the engine's part in this process."""
    nodes = IngestionPipeline(transformations=[splitter()]).run(documents=documents())
    done = IngestionPipeline(transformations=[LetterEmbedding(), FusionRAGTransform.from_engine(engine)]).run(
        nodes=nodes
    )
    assert [node.metadata["fusionrag_kind"] for node in done] == ["enriched"] * len(TEXTS)
