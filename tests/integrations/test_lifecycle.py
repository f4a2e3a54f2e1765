"""A collection's whole life on Chroma and on disk: no stale text and no stale cache is ever used, and in the end the
store is empty."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.schema import MetadataMode
from llama_index.core.storage.docstore import SimpleDocumentStore

from fusionrag_engine import Engine, EngineConfig, Request
from fusionrag_integrations.chroma import ChromaCacheIndex
from fusionrag_integrations.explain import explain
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
    new_collection,
    settle,
    splitter,
    tiny_model,
    tiny_tokenizer,
)


class Life:
    """Ingestion and questions over one engine and one collection."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.collection = new_collection()
        self.store = FusionRAGChromaVectorStore.from_engine(engine, chroma_collection=self.collection)
        self.pipeline = IngestionPipeline(
            transformations=[splitter(), LetterEmbedding(), FusionRAGTransform.from_engine(engine)],
            vector_store=self.store,
            docstore=SimpleDocumentStore(),
            docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
            disable_cache=True,
        )
        self.index = VectorStoreIndex.from_vector_store(self.store, embed_model=LetterEmbedding())

    def ingest(self, texts: dict[str, str]) -> None:
        self.pipeline.run(documents=[Document(text=text, doc_id=name) for name, text in texts.items()])

    def ask(self, **settings: Any) -> Any:
        llm = FusionRAGLLM.from_engine(self.engine, **settings)
        return self.index.as_query_engine(
            llm=llm, response_synthesizer=FusionRAGSynthesizer(llm), similarity_top_k=10
        ).query(QUESTION)

    def check(self, texts: dict[str, str]) -> None:
        """An answer is over these texts and no other, at ratio 1 ordinary prefill's, and every chunk is a hit whose
        enriched cache was made with texts that are still there."""
        exact, full = self.ask(recompute_ratio=1.0), self.ask(method="full")
        contents = [node.node.get_content(MetadataMode.LLM) for node in exact.source_nodes]
        assert sorted(contents) == sorted(texts.values())
        assert exact.response == full.response == self.engine.generate(Request(QUESTION, contents, method="full")).text
        rows = explain(self.ask()).rows
        assert [row.status for row in rows].count("miss") == 0
        settle(self.engine)
        keys = {self.engine.has(text).key for text in texts.values()}
        assert None not in keys
        for text in texts.values():
            assert set(self.engine.has(text).neighbours) <= keys
        assert self.engine.stats()["num_chunks"] == len(texts)
        assert self.collection.count() == len(texts)


@pytest.mark.parametrize("top_n", [2, 4])
def test_a_life(tmp_path: Path, top_n: int) -> None:
    config = EngineConfig(cache_dir=tmp_path, top_n=top_n, max_new_tokens=8, system_prompt="Be brief.")
    with Engine(tiny_model(), tiny_tokenizer(), config) as engine:
        life = Life(engine)
        texts = {f"doc-{number}": text for number, text in enumerate(TEXTS)}
        life.ingest(texts)
        life.check(texts)

        texts["doc-0"] = "The harbour office in Lindmark now closes at two on Fridays."
        life.ingest(texts)
        life.check(texts)
        assert engine.has(TEXTS[0]).key is None

        life.index.delete_ref_doc("doc-1")
        del texts["doc-1"]
        life.check(texts)
        life.ingest(texts)  # what was enriched with them may be enriched again
        life.check(texts)
        assert engine.verify() == []

        for name in list(texts):
            life.index.delete_ref_doc(name)
        engine.gc()
        stats = engine.stats()
        assert life.collection.count() == stats["num_chunks"] == stats["disk_bytes"] == stats["host_entries"] == 0
        assert not list(tmp_path.rglob("*.safetensors"))
        assert life.ask().response == "Empty Response"


def test_records_in_a_collection_of_their_own_can_be_cleared(engine: Engine) -> None:
    life = Life(engine)
    index = ChromaCacheIndex(life.collection)
    life.ingest({"doc-0": TEXTS[0]})
    (node_id,) = life.collection.get()["ids"]
    assert index.get([node_id])[node_id].fingerprint == engine.fingerprint(TEXTS[0])
    index.delete([node_id])
    assert index.get([node_id]) == {}
