"""Documents through an IngestionPipeline into Chroma, questions through `as_query_engine`: the whole way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chromadb
import pytest
from llama_index.core import QueryBundle, VectorStoreIndex
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import MetadataMode

from fusionrag_engine import Engine, EngineConfig, Request
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
    tiny_engine,
)

STYLES = ["call", "stream", "async", "async_stream"]
TEMPLATE = PromptTemplate("Some notes follow.\n{context_str}\nNow answer: {query_str}")


def ingest(engine: Engine, collection: Any, texts: list[str] = TEXTS) -> tuple[Any, FusionRAGTransform]:
    store = FusionRAGChromaVectorStore.from_engine(engine, chroma_collection=collection)
    transform = FusionRAGTransform.from_engine(engine)
    IngestionPipeline(
        transformations=[splitter(), LetterEmbedding(), transform], vector_store=store, disable_cache=True
    ).run(documents=documents(texts))
    return VectorStoreIndex.from_vector_store(store, embed_model=LetterEmbedding()), transform


def query_engine(engine: Engine, index: Any, *, streaming: bool = False, template: Any = None, **settings: Any) -> Any:
    llm = FusionRAGLLM.from_engine(engine, **settings)
    synthesizer = FusionRAGSynthesizer(llm=llm, text_qa_template=template, streaming=streaming)
    return index.as_query_engine(llm=llm, response_synthesizer=synthesizer, similarity_top_k=4)


async def ask(engine: Engine, index: Any, style: str, **settings: Any) -> tuple[str, Any]:
    asked = query_engine(engine, index, streaming="stream" in style, **settings)
    if style.startswith("async"):
        response = await asked.aquery(QUESTION)
        if style == "async":
            return str(response), response
        return "".join([token async for token in response.async_response_gen()]), response
    response = asked.query(QUESTION)
    return ("".join(response.response_gen) if style == "stream" else str(response)), response


@pytest.fixture(scope="module")
def shared() -> Iterator[Any]:
    """An engine and an index that these tests only ask."""
    engine = tiny_engine()
    index, _ = ingest(engine, new_collection())
    yield engine, index
    engine.close()


@pytest.mark.parametrize("style", STYLES)
async def test_answers_come_from_the_caches(shared: Any, style: str) -> None:
    engine, index = shared
    answer, response = await ask(engine, index, style)
    order = [node.node.node_id for node in response.source_nodes]
    assert statuses(response) == {order[0]: "prefix", **dict.fromkeys(order[1:], "enriched")}
    texts = [node.node.get_content(MetadataMode.LLM) for node in response.source_nodes]
    assert answer == engine.generate(Request(QUESTION, texts)).text
    assert response.metadata["fusionrag"]["stats"]["num_reused_tokens"] > 0


@pytest.mark.parametrize("style", STYLES)
async def test_another_template_still_hits(shared: Any, style: str) -> None:
    engine, index = shared
    _, response = await ask(engine, index, style, template=TEMPLATE)
    assert set(statuses(response).values()) == {"enriched"}, "no chunk is an exact prefix, and none is a miss"


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("template", [None, TEMPLATE])
async def test_full_recomputation_is_ordinary_prefill(shared: Any, style: str, template: Any) -> None:
    engine, index = shared
    full, _ = await ask(engine, index, style, template=template, method="full")
    ours, response = await ask(engine, index, style, template=template, recompute_ratio=1.0)
    assert ours == full
    assert "miss" not in statuses(response).values()


def test_a_second_ingestion_computes_nothing(engine: Engine) -> None:
    collection = new_collection()
    _, first = ingest(engine, collection)
    assert first.last_report.num_plain_computed == first.last_report.num_enriched_computed == len(TEXTS)
    rows = collection.get(include=["metadatas", "documents"])
    _, second = ingest(engine, collection)
    assert second.last_report.num_computed == 0
    assert second.last_report.num_enriched_reused == len(TEXTS)
    again = collection.get(include=["metadatas", "documents"])
    assert again["ids"] == rows["ids"]
    names = [name for name in rows["metadatas"][0] if name.startswith("fusionrag_")]
    assert len(names) == 7
    assert [[row[name] for name in names] for row in again["metadatas"]] == [
        [row[name] for name in names] for row in rows["metadatas"]
    ]


async def test_everything_is_found_after_a_restart(tmp_path: Path) -> None:
    for run in range(2):
        engine = tiny_engine(cache_dir=tmp_path / "caches")
        client = chromadb.PersistentClient(
            str(tmp_path / "chroma"), settings=chromadb.Settings(anonymized_telemetry=False)
        )
        index, transform = ingest(engine, client.get_or_create_collection("nodes"))
        _, response = await ask(engine, index, "call")
        assert transform.last_report.num_computed == (2 * len(TEXTS) if run == 0 else 0)
        assert "miss" not in statuses(response).values()
        engine.close()
        chromadb.api.shared_system_client.SharedSystemClient.clear_system_cache()


async def test_text_that_changed_is_a_miss_with_its_reason(engine: Engine) -> None:
    """A postprocessor may replace a node's text; its metadata still names the caches of the old one."""
    index, _ = ingest(engine, new_collection())
    asked = query_engine(engine, index)
    nodes = asked.retrieve(QueryBundle(QUESTION))
    nodes[1].node.set_content("Another text altogether.")
    response = asked.synthesize(QueryBundle(QUESTION), nodes)
    changed = response.metadata["fusionrag"]["nodes"][1]
    assert (changed["node_id"], changed["status"]) == (nodes[1].node.node_id, "miss")
    assert "the text differs from what was cached" in changed["miss_reason"]
    texts = [node.node.get_content(MetadataMode.LLM) for node in nodes]
    assert (
        engine.generate(Request(QUESTION, texts, recompute_ratio=1.0)).text
        == engine.generate(Request(QUESTION, texts, method="full")).text
    )


def test_from_documents_takes_the_transform(engine: Engine) -> None:
    """There embeddings come after the transformations, so the engine is given the embedding function."""
    transform = FusionRAGTransform.from_engine(engine)
    index = VectorStoreIndex.from_documents(
        documents(), transformations=[splitter(), LetterEmbedding(), transform], embed_model=LetterEmbedding()
    )
    response = query_engine(engine, index).query(QUESTION)
    assert "miss" not in statuses(response).values()
    assert transform.last_report.num_enriched_computed == len(TEXTS)


@pytest.fixture(scope="module")
def smollm2(smollm2_dir: Path) -> Iterator[Any]:
    """SmolLM2-135M, an index on it, and its answer by ordinary prefill."""
    engine = Engine.from_pretrained(smollm2_dir, config=EngineConfig(dtype="float32", max_new_tokens=14, top_n=2))
    index, _ = ingest(engine, new_collection())
    yield engine, index, str(query_engine(engine, index, method="full").query(QUESTION))
    engine.close()


@pytest.mark.parametrize("style", STYLES)
async def test_the_demo_model_at_ratio_1_answers_as_ordinary_prefill(smollm2: Any, style: str) -> None:
    """With a real chat template and tokenizer: word for word."""
    engine, index, full = smollm2
    assert "noon" in full
    ours, response = await ask(engine, index, style, recompute_ratio=1.0)
    assert ours == full
    assert sorted(statuses(response).values()) == ["enriched", "enriched", "enriched", "prefix"]


async def test_the_demo_model_computes_a_part_of_the_prompt(smollm2: Any) -> None:
    """Below ratio 1 the answer is the engine's own; only at 1 need it be ordinary prefill's."""
    engine, index, _ = smollm2
    answer, response = await ask(engine, index, "call")
    texts = [node.node.get_content(MetadataMode.LLM) for node in response.source_nodes]
    assert answer == engine.generate(Request(QUESTION, texts)).text
    stats = response.metadata["fusionrag"]["stats"]
    assert stats["num_computed_tokens"] + stats["num_reused_tokens"] == stats["num_prompt_tokens"]
    assert stats["num_reused_tokens"] > stats["num_computed_tokens"]
