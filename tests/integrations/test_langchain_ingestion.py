"""From a text splitter through `FusionRAGDocumentTransformer` into Chroma and out again, with `index()` and without."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chromadb
import pytest
from langchain_chroma import Chroma
from langchain_classic.chains import create_retrieval_chain
from langchain_core.documents import Document
from langchain_core.indexing import InMemoryRecordManager, aindex, index
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter

from fusionrag_engine import Chunk, ConfigError, Engine, FusionRAGError, Request
from fusionrag_integrations.chroma import ChromaCacheIndex
from fusionrag_integrations.langchain import (
    CacheReport,
    ChatFusionRAG,
    FusionRAGChroma,
    FusionRAGDocumentTransformer,
    create_fusion_documents_chain,
    default_prompt,
    explain,
    release,
)
from tests.integrations.langchain_support import MODES, LetterEmbeddings, ingest, plain_documents, run
from tests.integrations.support import QUESTION, TEXTS, new_collection, settle

EDITED = "The harbour office in Lindmark is closed on Fridays."


def transformer(engine: Engine, **settings: Any) -> FusionRAGDocumentTransformer:
    return FusionRAGDocumentTransformer.from_engine(engine, embeddings=LetterEmbeddings(), **settings)


def new_store(engine: Engine, **settings: Any) -> FusionRAGChroma:
    name = new_collection("langchain").name
    return FusionRAGChroma.from_engine(
        engine,
        collection_name=name,
        embedding_function=LetterEmbeddings(),
        client=chromadb.EphemeralClient(),
        **settings,
    )


def texts_of(store: Chroma) -> set[str]:
    return set(store.get()["documents"])


async def ask(engine: Engine, store: Any, mode: str = "invoke", k: int = 5) -> tuple[list[str], list[str], str]:
    """Texts that were retrieved, their cache status, and the answer."""
    chain = create_retrieval_chain(
        store.as_retriever(search_kwargs={"k": k}),
        create_fusion_documents_chain(ChatFusionRAG(engine=engine, recompute_ratio=1.0), default_prompt(engine)),
    )
    report = CacheReport()
    result = await run(chain, {"input": QUESTION}, mode, {"callbacks": [report]})
    texts = [item.page_content for item in result["context"]]
    assert result["answer"] == engine.generate(Request(QUESTION, texts, method="full")).text
    return texts, [row.status for row in explain(report).rows], result["answer"]


# The transformer


async def test_new_documents_with_names_that_are_the_same_every_time(make_engine: Callable[..., Engine]) -> None:
    documents = plain_documents()
    before = copy.deepcopy(documents)
    first = transformer(make_engine()).transform_documents(documents)
    assert documents == before
    names = [item.metadata["fusionrag_id"] for item in first]
    assert len(set(names)) == 5
    again = transformer(make_engine(system_prompt="Be kind."))
    assert [item.metadata["fusionrag_id"] for item in again.transform_documents(documents)] == names
    assert [item.metadata["fusionrag_id"] for item in await again.atransform_documents(first)] == names
    assert [(item.id, item.page_content) for item in first] == [(item.id, item.page_content) for item in documents]
    assert {key for key in first[0].metadata if key not in before[0].metadata} == {"fusionrag_id"}
    scoped = transformer(make_engine(), scope="north").transform_documents(documents)
    assert scoped[0].metadata["fusionrag_scope"] == "north"
    assert scoped[0].metadata["fusionrag_id"] != names[0]


def test_the_report_and_what_a_second_run_computes(engine: Engine) -> None:
    made = transformer(engine)
    with pytest.raises(FusionRAGError, match="has not run yet"):
        _ = made.last_report
    made.transform_documents(plain_documents())
    assert (made.last_report.num_plain_computed, made.last_report.num_enriched_computed) == (5, 5)
    made.transform_documents(plain_documents())
    assert made.last_report.num_computed == 0
    assert made.transform_documents([]) == []


def test_without_embeddings_caches_are_plain_and_the_report_says_so(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    plain = FusionRAGDocumentTransformer.from_engine(engine)
    plain.transform_documents(plain_documents())
    assert "plain caches only" in plain.last_report.summary()
    embedding = make_engine(embed=lambda texts: LetterEmbeddings().embed_documents(list(texts)))
    FusionRAGDocumentTransformer.from_engine(embedding).transform_documents(plain_documents())
    assert embedding.stats()["num_enriched_chunks"] == 5


def test_a_failing_engine_leaves_documents_usable(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(LetterEmbeddings):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            raise OSError("no embeddings today")

    made = FusionRAGDocumentTransformer.from_engine(engine, embeddings=Failing())
    documents = made.transform_documents(plain_documents())
    assert "no embeddings today" in caplog.text
    assert "OSError" in str(made.last_report.records[0].reason)
    assert documents[0].metadata["fusionrag_id"]
    strict = FusionRAGDocumentTransformer.from_engine(engine, embeddings=Failing(), is_strict=True)
    with pytest.raises(OSError, match="no embeddings today"):
        strict.transform_documents(plain_documents())


def test_records_in_a_cache_index(engine: Engine) -> None:
    cache_index = ChromaCacheIndex.open(client=chromadb.EphemeralClient(), name="langchain-records")
    documents = transformer(engine, cache_index=cache_index).transform_documents(plain_documents())
    records = cache_index.get([item.metadata["fusionrag_id"] for item in documents])
    assert [record.kind for record in records.values()] == ["enriched"] * 5


def test_copies_share_the_engine_and_other_processes_are_refused(engine: Engine) -> None:
    made = transformer(engine, scope="north")
    copied = copy.deepcopy(made)
    assert copied.engine is engine
    assert copied.scope == "north"
    with pytest.raises(FusionRAGError, match="cannot be sent to another process"):
        pickle.dumps(made)


def test_behind_a_text_splitter(engine: Engine) -> None:
    splitter = RecursiveCharacterTextSplitter(chunk_size=90, chunk_overlap=20)
    pages = [Document(" ".join(TEXTS), metadata={"source": "all.md"})]
    documents = transformer(engine).transform_documents(splitter.split_documents(pages))
    assert len(documents) > 4
    message = ChatFusionRAG(engine=engine).invoke(QUESTION, documents=list(documents))
    statuses = [row.status for row in explain(message).rows]
    assert statuses[0] == "prefix"
    assert set(statuses[1:]) == {"enriched"}


# index()


@pytest.mark.parametrize("is_async", [False, True])
async def test_index_finds_what_is_unchanged_and_releases_what_is_gone(engine: Engine, is_async: bool) -> None:
    store, made = new_store(engine), transformer(engine)
    manager = InMemoryRecordManager("test")
    manager.create_schema()

    async def ingest_all(documents: list[Document]) -> dict[str, int]:
        ready = made.transform_documents(documents)
        settings: Any = {"cleanup": "incremental", "source_id_key": "source", "key_encoder": "sha256"}
        if is_async:
            return dict(await aindex(ready, manager, store, **settings))
        return dict(index(ready, manager, store, **settings))

    documents = plain_documents()
    assert (await ingest_all(documents))["num_added"] == 5
    assert await ingest_all(documents) == {"num_added": 0, "num_updated": 0, "num_skipped": 5, "num_deleted": 0}

    more = [*documents, Document("A new text, which becomes a neighbour of others.", metadata={"source": "new.md"})]
    assert await ingest_all(more) == {"num_added": 1, "num_updated": 0, "num_skipped": 5, "num_deleted": 0}

    changed = [Document(EDITED, metadata={"source": "0.md"}), *more[1:]]
    result = await ingest_all(changed)
    assert (result["num_added"], result["num_deleted"]) == (1, 1)
    assert engine.has(TEXTS[0]).kind == "none"
    assert engine.has(EDITED).kind != "none"
    texts, statuses, _ = await ask(engine, store, k=6)
    assert EDITED in texts
    assert TEXTS[0] not in texts
    assert "miss" not in statuses


# The vector store


@pytest.mark.parametrize("mode", [mode for mode in MODES if "stream" not in mode])
async def test_lifecycle(make_engine: Callable[..., Engine], tmp_path: Path, mode: str) -> None:
    """Ingest, ask, update one document, ask, delete, ask: no stale text or cache, and the store ends empty."""
    engine = make_engine(cache_dir=tmp_path)
    store = new_store(engine)
    ids = store.add_documents(list(transformer(engine).transform_documents(plain_documents())))
    texts, statuses, _ = await ask(engine, store, mode)
    assert sorted(texts) == sorted(TEXTS)
    assert statuses == ["prefix", *["enriched"] * 4]

    (edited,) = transformer(engine).transform_documents([Document(EDITED, metadata={"source": "0.md"})])
    store.update_document(ids[0], edited)
    assert engine.has(TEXTS[0]).kind == "none"
    texts, statuses, _ = await ask(engine, store, mode)
    assert EDITED in texts
    assert TEXTS[0] not in texts
    assert "miss" not in statuses

    await store.adelete([ids[1]]) if mode.startswith("a") else store.delete([ids[1]])
    assert engine.has(TEXTS[1]).kind == "none"
    texts, statuses, _ = await ask(engine, store, mode)
    assert TEXTS[1] not in texts
    assert "miss" not in statuses

    store.delete(ids)
    texts, statuses, _ = await ask(engine, store, mode)
    assert (texts, statuses) == ([], [])
    engine.gc()
    stats = engine.stats()
    assert (stats["num_chunks"], stats["num_enriched_chunks"], stats["disk_bytes"]) == (0, 0, 0)
    assert engine.verify() == []


@pytest.mark.parametrize("how", ["delete_collection", "reset_collection", "where", "where_document", "all ids"])
@pytest.mark.parametrize("is_ingested", [True, False])
async def test_whatever_deletes_rows_releases_caches(engine: Engine, how: str, is_ingested: bool) -> None:
    store = new_store(engine)
    documents = ingest(engine) if is_ingested else plain_documents()
    ids = store.add_documents(documents)
    await ask(engine, store)
    settle(engine)
    assert engine.stats()["num_chunks"] == 5  # ingested, or cached by the question
    if how == "where":
        store.delete(where={"source": {"$ne": "none"}})
    elif how == "where_document":
        store.delete(where_document={"$contains": "e"})
    elif how == "all ids":
        store.delete(ids)
    else:
        getattr(store, how)()
    assert engine.stats()["num_chunks"] == 0
    if how != "delete_collection":
        assert texts_of(store) == set()
        store.add_texts(["again"])


def test_caches_stay_while_another_row_has_them(engine: Engine) -> None:
    store, made = new_store(engine), transformer(engine)
    same = [Document(TEXTS[0], metadata={"source": name}) for name in ("a", "b")]
    one, other = store.add_documents(list(made.transform_documents(same)))
    store.delete([one])
    assert engine.has(TEXTS[0]).kind != "none"
    store.delete([other])
    assert engine.has(TEXTS[0]).kind == "none"
    # Equal in everything, and so in name.
    twins = store.add_documents(list(made.transform_documents([same[0], same[0].model_copy()])))
    assert len(twins) == 2
    store.delete(twins[:1])
    assert engine.has(TEXTS[0]).kind != "none"
    store.delete(twins[1:])
    assert engine.has(TEXTS[0]).kind == "none"


def test_rows_that_are_written_over_release_what_they_held(engine: Engine) -> None:
    store, made = new_store(engine), transformer(engine)
    store.add_documents(list(made.transform_documents(plain_documents())))
    store.add_documents(list(made.transform_documents([Document(EDITED, id="doc-0")])))
    assert engine.has(TEXTS[0]).kind == "none"
    store.add_documents(list(made.transform_documents(plain_documents()[1:])))  # the same again
    assert all(engine.has(text).kind != "none" for text in [EDITED, *TEXTS[1:]])


async def test_writing_the_same_again_keeps_what_a_question_cached(engine: Engine) -> None:
    store = new_store(engine)
    store.add_documents(plain_documents())
    await ask(engine, store)
    settle(engine)
    store.add_documents(plain_documents())
    assert engine.stats()["num_chunks"] == 5


def test_an_update_with_a_document_that_was_not_ingested_forgets_the_old_name(engine: Engine) -> None:
    store = new_store(engine)
    (row,) = store.add_documents(list(ingest(engine, TEXTS[:1])))
    store.update_document(row, Document(EDITED, metadata={"source": "0.md"}))
    (found,) = store.get_by_ids([row])
    assert found.metadata == {"source": "0.md"}
    assert engine.stats()["num_chunks"] == 0


def test_scopes_and_other_collections(engine: Engine) -> None:
    """Deleting in one scope leaves the same text of another alone."""
    north, south = new_store(engine), new_store(engine)
    north.add_documents(list(transformer(engine, scope="north").transform_documents(plain_documents())))
    south.add_documents(list(transformer(engine, scope="south").transform_documents(plain_documents())))
    north.delete_collection()
    assert engine.has(Chunk(TEXTS[0], scope="north")).kind == "none"
    assert engine.has(Chunk(TEXTS[0], scope="south")).kind == "enriched"
    message = ChatFusionRAG(engine=engine).invoke(QUESTION, documents=south.similarity_search(QUESTION, k=3))
    assert "miss" not in [row.status for row in explain(message).rows]


def test_from_documents_and_from_texts(engine: Engine) -> None:
    settings: Any = {"client": chromadb.EphemeralClient(), "engine": engine}
    first = FusionRAGChroma.from_documents(
        ingest(engine), LetterEmbeddings(), collection_name=new_collection("from").name, **settings
    )
    assert texts_of(first) == set(TEXTS)
    first.delete_collection()
    assert engine.stats()["num_chunks"] == 0
    second = FusionRAGChroma.from_texts(
        TEXTS, LetterEmbeddings(), collection_name=new_collection("from").name, **settings
    )
    assert texts_of(second) == set(TEXTS)


def test_deleting_nothing(engine: Engine) -> None:
    store = new_store(engine)
    store.add_documents(ingest(engine))
    store.delete(["unknown"])
    assert engine.stats()["num_chunks"] == 5
    with pytest.raises(TypeError):
        FusionRAGChroma(collection_name="no-engine")  # type: ignore[call-arg]


def test_other_vector_stores_release_by_hand(engine: Engine) -> None:
    store = InMemoryVectorStore(LetterEmbeddings())
    ids = store.add_documents(ingest(engine))
    gone = store.get_by_ids(ids[:2])
    store.delete(ids[:2])
    assert release(engine, gone) > 0
    assert engine.stats()["num_chunks"] == 3
    with pytest.raises(ConfigError, match="documents contain 1"):
        release(engine, [1])  # type: ignore[list-item]


def test_a_text_that_a_question_cached_without_a_name_goes_with_its_row(engine: Engine) -> None:
    store = new_store(engine)
    (row,) = store.add_texts(TEXTS[:1])
    ChatFusionRAG(engine=engine).invoke(QUESTION, documents=TEXTS[:1])
    settle(engine)
    assert engine.has(TEXTS[0]).kind == "plain"
    store.delete([row])
    assert engine.has(TEXTS[0]).kind == "none"
