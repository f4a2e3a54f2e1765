"""`FusionRAGTransform`: what ingestion does to nodes, and what it must leave alone."""

from __future__ import annotations

import asyncio
import copy
import logging
import pickle
import time
from collections.abc import Callable
from typing import Any

import chromadb
import pytest
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.schema import Document, MetadataMode, TextNode

from fusionrag_engine import Chunk, Engine, FusionRAGError, UnknownSettingError
from fusionrag_integrations.chroma import CacheRecord, ChromaCacheIndex
from fusionrag_integrations.chroma.record import KEYS
from fusionrag_integrations.llama_index import FusionRAGTransform
from tests.integrations.support import TEXTS, LetterEmbedding, documents, new_collection, splitter


def nodes_with_embeddings(texts: list[str] = TEXTS) -> list[TextNode]:
    embed = LetterEmbedding()
    return [
        TextNode(text=text, id_=f"node-{index}", metadata={"file": "a.md"}, embedding=embed.get_text_embedding(text))
        for index, text in enumerate(texts)
    ]


def test_nodes_with_embeddings_get_enriched_caches_and_references(engine: Engine) -> None:
    nodes = FusionRAGTransform.from_engine(engine)(nodes_with_embeddings())
    assert [node.node_id for node in nodes] == [f"node-{index}" for index in range(len(TEXTS))]
    for node in nodes:
        record = CacheRecord.from_metadata(node.metadata)
        stored = engine.has(Chunk(node.get_content(MetadataMode.LLM), id=node.node_id))
        assert record is not None
        assert record == CacheRecord.from_chunk(stored)
        assert record.kind == "enriched"
        assert len(record.neighbours) == engine.config.top_n


def test_nodes_without_embeddings_get_plain_caches(engine: Engine) -> None:
    transform = FusionRAGTransform.from_engine(engine)
    (node,) = transform([TextNode(text=TEXTS[0])])
    assert node.metadata["fusionrag_kind"] == "plain"
    assert "plain caches only" in transform.last_report.summary()


def test_the_references_never_reach_the_text(engine: Engine) -> None:
    node = TextNode(text=TEXTS[0], metadata={"file": "a.md"})
    before = {mode: node.get_content(mode) for mode in (MetadataMode.LLM, MetadataMode.EMBED)}
    for _ in range(2):
        (node,) = FusionRAGTransform.from_engine(engine)([node])  # type: ignore[assignment]
        assert {mode: node.get_content(mode) for mode in before} == before
        assert sorted(node.excluded_llm_metadata_keys) == sorted(KEYS), "each key is excluded once"
        assert sorted(node.excluded_embed_metadata_keys) == sorted(KEYS)
    assert engine.stats()["num_chunks"] == 1


def test_lists_that_nodes_share_are_not_changed(engine: Engine) -> None:
    shared = ["file"]
    node = TextNode(text=TEXTS[0])
    node.excluded_llm_metadata_keys = shared
    FusionRAGTransform.from_engine(engine)([node])
    assert shared == ["file"]


def test_input_documents_are_not_changed(engine: Engine) -> None:
    """Document stores note their hash after the run; a changed one is ingested again every time."""
    document = Document(text=TEXTS[0], metadata={"file": "a.md"})
    before, hash_before = document.model_dump(), document.hash
    (node,) = FusionRAGTransform.from_engine(engine)([document])
    assert (document.model_dump(), document.hash) == (before, hash_before)
    assert node.node_id == document.node_id
    assert node.metadata["fusionrag_kind"] == "plain"


def test_old_references_go_where_nothing_is_stored_now(engine: Engine) -> None:
    node = TextNode(text="", metadata={"fusionrag_key": "gone", "fusionrag_kind": "plain"})
    (node,) = FusionRAGTransform.from_engine(engine)([node])  # type: ignore[assignment]
    assert node.metadata == {}


def test_no_nodes_are_fine(engine: Engine) -> None:
    transform = FusionRAGTransform.from_engine(engine)
    assert list(transform([])) == []
    assert transform.last_report.num_chunks == 0


def test_a_second_run_computes_nothing_and_says_so(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    transform = FusionRAGTransform.from_engine(engine)
    transform(nodes_with_embeddings())
    assert transform.last_report.num_computed == 2 * len(TEXTS)
    with caplog.at_level(logging.INFO, logger="fusionrag"):
        transform(nodes_with_embeddings())
    assert transform.last_report.num_computed == 0
    assert transform.last_report.num_enriched_reused == len(TEXTS)
    assert f"0 plain caches computed, {len(TEXTS)} reused" in caplog.text


def test_a_report_before_the_first_run_is_refused(engine: Engine) -> None:
    with pytest.raises(FusionRAGError, match="has not run"):
        _ = FusionRAGTransform.from_engine(engine).last_report


def test_an_engine_that_fails_leaves_nodes_without_caches(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    nodes = nodes_with_embeddings()
    nodes[0].embedding = [float("nan")] * len(nodes[0].embedding or [])
    transform = FusionRAGTransform.from_engine(engine)
    with caplog.at_level(logging.WARNING, logger="fusionrag"):
        got = transform(nodes)
    assert len(got) == len(nodes)
    assert all("fusionrag_key" not in node.metadata for node in got)
    assert "no chunk caches for 5 nodes" in caplog.text
    assert "5 skipped" in transform.last_report.summary(), "a failure must not read like a run with nothing to do"
    with pytest.raises(FusionRAGError):
        FusionRAGTransform.from_engine(engine, is_strict=True)(nodes)


def test_records_go_to_the_index_as_well(engine: Engine) -> None:
    index = ChromaCacheIndex.open(client=chromadb.EphemeralClient(), name=new_collection("x").name + "-records")
    nodes = FusionRAGTransform.from_engine(engine, cache_index=index)(nodes_with_embeddings())
    found = index.get([node.node_id for node in nodes])
    assert found == {node.node_id: CacheRecord.from_metadata(node.metadata) for node in nodes}


def test_an_index_that_fails_costs_no_cache(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    client = chromadb.EphemeralClient()
    index = ChromaCacheIndex.open(client=client, name=new_collection("x").name + "-records")
    client.delete_collection(index.collection.name)
    nodes = FusionRAGTransform.from_engine(engine, cache_index=index)(nodes_with_embeddings())
    assert all(node.metadata["fusionrag_kind"] == "enriched" for node in nodes)
    assert "cache records" in caplog.text
    with pytest.raises(Exception, match="does not exist"):
        FusionRAGTransform.from_engine(engine, cache_index=index, is_strict=True)(nodes_with_embeddings())


async def test_async_does_not_block_the_event_loop(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    own = engine.precompute

    def slow(*args: Any, **settings: Any) -> Any:
        time.sleep(0.3)
        return own(*args, **settings)

    monkeypatch.setattr(engine, "precompute", slow)
    task = asyncio.create_task(FusionRAGTransform.from_engine(engine).acall(nodes_with_embeddings()))
    num_turns = 0
    while not task.done():
        await asyncio.sleep(0.01)
        num_turns += 1
    assert num_turns > 10
    assert all(node.metadata["fusionrag_kind"] == "enriched" for node in await task)


def test_what_changes_the_result_changes_the_pipeline_cache_key(
    engine: Engine, make_engine: Callable[..., Engine]
) -> None:
    def key(transform: FusionRAGTransform) -> str:
        return str(transform.to_dict())

    first = key(FusionRAGTransform.from_engine(engine))
    assert key(FusionRAGTransform.from_engine(engine)) == first
    assert key(FusionRAGTransform.from_engine(engine, scope="team")) != first
    assert key(FusionRAGTransform.from_engine(make_engine(top_n=3))) != first
    assert key(FusionRAGTransform.from_engine(make_engine(system_prompt="Be long."))) != first
    assert FusionRAGTransform.class_name() == "FusionRAGTransform"


def test_a_copy_shares_the_engine_and_a_pickle_is_refused(engine: Engine) -> None:
    transform = FusionRAGTransform.from_engine(engine, scope="team")
    twin = copy.deepcopy(transform)
    assert twin.scope == "team"
    (node,) = twin([TextNode(text=TEXTS[0])])
    assert engine.has(Chunk(TEXTS[0], scope="team")).key == node.metadata["fusionrag_key"]
    with pytest.raises(FusionRAGError, match="num_workers=1"):
        pickle.dumps(transform)


def test_a_pipeline_with_workers_says_what_to_do(engine: Engine) -> None:
    pipeline = IngestionPipeline(transformations=[FusionRAGTransform.from_engine(engine)])
    with pytest.raises(FusionRAGError, match="num_workers=1"):
        pipeline.run(nodes=[TextNode(text=text) for text in TEXTS], num_workers=2)


def test_unknown_settings_are_refused(engine: Engine) -> None:
    with pytest.raises(UnknownSettingError, match=r"show_progess.*show_progress"):
        FusionRAGTransform.from_engine(engine, show_progess=True)


def test_progress_is_shown_when_asked_for(engine: Engine, capfd: pytest.CaptureFixture[str]) -> None:
    FusionRAGTransform.from_engine(engine)(nodes_with_embeddings(TEXTS[:2]))
    assert "enrich" not in capfd.readouterr().err
    FusionRAGTransform.from_engine(engine, show_progress=True)(nodes_with_embeddings(TEXTS[2:4]))
    assert "enrich" in capfd.readouterr().err


def test_scopes_are_separate(engine: Engine) -> None:
    FusionRAGTransform.from_engine(engine, scope="one")([TextNode(text=TEXTS[0])])
    other = FusionRAGTransform.from_engine(engine, scope="two")
    other([TextNode(text=TEXTS[0])])
    assert other.last_report.num_plain_computed == 1


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_pipeline_with_its_cache(engine: Engine, is_async: bool) -> None:
    transform = FusionRAGTransform.from_engine(engine)
    pipeline = IngestionPipeline(transformations=[splitter(), LetterEmbedding(), transform])
    for _ in range(2):
        nodes = await pipeline.arun(documents=documents()) if is_async else pipeline.run(documents=documents())
        assert [node.metadata["fusionrag_kind"] for node in nodes] == ["enriched"] * len(TEXTS)
        assert [node.metadata["file"] for node in nodes] == [f"{index}.md" for index in range(len(TEXTS))]
