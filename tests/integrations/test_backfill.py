"""`FusionRAGTransform.backfill`: a Chroma collection that LlamaIndex filled before there were caches."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.ingestion import IngestionPipeline
from llama_index.vector_stores.chroma import ChromaVectorStore

from fusionrag_engine import Engine
from fusionrag_integrations.chroma import CacheRecord
from fusionrag_integrations.llama_index import (
    FusionRAGChromaVectorStore,
    FusionRAGLLM,
    FusionRAGSynthesizer,
    FusionRAGTransform,
)
from tests.integrations.support import QUESTION, TEXTS, LetterEmbedding, documents, new_collection, splitter, statuses


@pytest.fixture
def collection() -> Any:
    """Filled by LlamaIndex's own vector store; nodes know nothing of caches."""
    found = new_collection()
    IngestionPipeline(
        transformations=[splitter(), LetterEmbedding()], vector_store=ChromaVectorStore(chroma_collection=found)
    ).run(documents=documents())
    return found


def contents(collection: Any) -> Any:
    rows = collection.get(include=["documents", "embeddings"])
    return rows["ids"], rows["documents"], rows["embeddings"].tolist()


def test_rows_get_records_in_both_copies_and_nodes_their_caches(engine: Engine, collection: Any) -> None:
    before = contents(collection)
    report = FusionRAGTransform.from_engine(engine).backfill(collection)
    assert report.num_plain_computed == report.num_enriched_computed == len(TEXTS)
    assert contents(collection) == before, "texts and embeddings stay"
    for row in collection.get(include=["metadatas"])["metadatas"]:
        inner = json.loads(row["_node_content"])
        assert CacheRecord.from_metadata(row) == CacheRecord.from_metadata(inner["metadata"]) is not None
        assert row["file"] == inner["metadata"]["file"]
        assert "fusionrag_key" in inner["excluded_llm_metadata_keys"]
    store = FusionRAGChromaVectorStore.from_engine(engine, chroma_collection=collection)
    index = VectorStoreIndex.from_vector_store(store, embed_model=LetterEmbedding())
    synthesizer = FusionRAGSynthesizer(FusionRAGLLM.from_engine(engine))
    response = index.as_query_engine(llm=synthesizer._llm, response_synthesizer=synthesizer).query(QUESTION)
    assert list(statuses(response).values()) == ["prefix", "enriched"]
    store.clear()
    assert engine.stats()["num_chunks"] == 0


def test_a_second_time_nothing_is_computed(engine: Engine, collection: Any) -> None:
    transform = FusionRAGTransform.from_engine(engine)
    transform.backfill(collection)
    rows = collection.get(include=["metadatas"])
    assert transform.backfill(collection).num_computed == 0
    assert collection.get(include=["metadatas"]) == rows


def test_caches_that_are_gone_come_back(engine: Engine, collection: Any) -> None:
    transform = FusionRAGTransform.from_engine(engine)
    transform.backfill(collection)
    engine.delete(["doc-1-0"])
    report = transform.backfill(collection)
    assert report.num_plain_computed == 1
    assert report.num_enriched_computed >= 1, "and so does what was enriched with it"
    assert engine.stats()["num_enriched_chunks"] == len(TEXTS)


def test_pages_of_rows(engine: Engine, collection: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection._client, "get_max_batch_size", lambda: 2)
    assert FusionRAGTransform.from_engine(engine).backfill(collection).num_enriched_computed == len(TEXTS)
    assert all("fusionrag_key" in row for row in collection.get(include=["metadatas"])["metadatas"])


def test_embeddings_that_mean_nothing_are_not_used(engine: Engine, collection: Any) -> None:
    report = FusionRAGTransform.from_engine(engine).backfill(collection, with_embeddings=False)
    assert (report.num_plain_computed, report.num_enriched_computed) == (len(TEXTS), 0)


def test_rows_of_others_are_left_alone(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    collection = new_collection()
    collection.add(ids=["a", "b"], embeddings=[[1.0], [2.0]], documents=["x", "y"], metadatas=[{"k": 1}, None])
    with caplog.at_level(logging.WARNING, logger="fusionrag"):
        assert FusionRAGTransform.from_engine(engine).backfill(collection).num_chunks == 0
    assert "2 rows" in caplog.text
    assert collection.get()["metadatas"] == [{"k": 1}, None]
