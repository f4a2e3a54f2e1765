"""Law 7: `scope` is a wall, and deleting a chunk drops its caches and every enriched cache made with it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fusionrag_engine import Chunk, ConfigError, Engine, Request
from tests.engine.support import assert_same, cache_files, documents, in_threads, ring, settle

MakeEngine = Callable[..., Engine]
COUNT = 4


def _kinds(engine: Engine, chunks: list[Chunk]) -> list[str]:
    return [engine.has(chunk).kind for chunk in chunks]


def test_the_same_text_in_another_scope_is_a_miss(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.precompute(documents(2, scope="a"), neighbours=ring(2, 1))
    for scope in ("", "b", "A", "a "):
        request = Request("Who?", documents(2, scope=scope))
        assert engine.prefill(request).stats.chunk_status == ["miss", "miss"]
    assert engine.prefill(Request("Who?", documents(2, scope="a"))).stats.chunk_status == ["prefix", "enriched"]


def test_chunks_met_online_stay_in_their_scope(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.prefill(Request("Who?", documents(1, scope="a")))
    assert engine.prefill(Request("Who?", documents(1, scope="b"))).stats.chunk_status == ["miss"]
    settle(engine)
    assert engine.stats()["num_chunks"] == 2


def test_embeddings_find_no_neighbour_in_another_scope(make_engine: MakeEngine) -> None:
    engine = make_engine()
    chunks = [*documents(2, scope="a"), *documents(2, first=2, scope="b")]
    near = np.array([[1, 0], [0, 1], [1, 0.01], [0.01, 1]], dtype=np.float32)
    records = engine.precompute(chunks, embeddings=near).records
    assert records[0].neighbours == (records[1].key,)
    assert records[1].neighbours == (records[0].key,)
    assert records[2].neighbours == (records[3].key,)
    assert records[3].neighbours == (records[2].key,)
    later = engine.precompute(documents(1, first=9, scope="b"), embeddings=[[1, 0]]).records[0]
    assert set(later.neighbours) == {records[2].key, records[3].key}


def test_a_given_neighbour_of_another_scope_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    chunks = [*documents(1, scope="a"), *documents(1, first=1, scope="b")]
    with pytest.raises(ConfigError, match="scope"):
        engine.precompute(chunks, neighbours=[[1], []])
    engine.precompute(chunks)
    with pytest.raises(ConfigError, match=r"doc-1.*not known in scope 'a'"):
        engine.precompute(chunks[:1], neighbours=[["doc-1"]])


def test_an_id_names_one_chunk_a_scope(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.precompute([Chunk("One.", id="x", scope="a"), Chunk("Two.", id="x", scope="b")])
    assert _kinds(engine, [Chunk("One.", scope="a"), Chunk("Two.", scope="b")]) == ["plain", "plain"]
    assert engine.delete([Chunk("One.", id="x", scope="a")]) == 1
    assert _kinds(engine, [Chunk("One.", scope="a"), Chunk("Two.", scope="b")]) == ["none", "plain"]


def test_deleting_drops_the_caches_and_every_enriched_cache_made_with_the_chunk(
    tmp_path: Path, make_engine: MakeEngine
) -> None:
    engine = make_engine(cache_dir=tmp_path)
    chunks = documents(COUNT)
    engine.precompute(chunks, neighbours=[[1], [2], [3], [0]])
    assert len(cache_files(tmp_path)) == 2 * COUNT
    dropped = engine.delete(["doc-1"])
    # Its plain and enriched cache, and the enriched cache of chunk 0, which was made with it.
    assert dropped == 3
    assert _kinds(engine, chunks) == ["plain", "none", "enriched", "enriched"]
    assert len(cache_files(tmp_path)) == 5
    again = make_engine(cache_dir=tmp_path)
    stats = again.prefill(Request("Who?", [chunks[2], *chunks])).stats
    assert stats.chunk_status == ["prefix", "plain", "miss", "enriched", "enriched"]


def test_deleting_by_chunk_and_by_id_are_the_same(make_engine: MakeEngine) -> None:
    for name in ("doc-1", documents(2)[1], Chunk(documents(2)[1].text)):
        engine = make_engine()
        engine.precompute(documents(3), neighbours=[[1], [0], [1]])
        assert engine.delete([name]) == 4
        assert _kinds(engine, documents(3)) == ["plain", "none", "plain"]


def test_unknown_names_are_ignored_by_delete(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.precompute(documents(2), neighbours=ring(2, 1))
    assert engine.delete(["nobody"]) == 0
    assert _kinds(engine, documents(2)) == ["enriched", "enriched"]


def test_a_text_shared_by_ids_goes_with_the_last_of_them(make_engine: MakeEngine) -> None:
    engine = make_engine()
    text, other = (chunk.text for chunk in documents(2))
    engine.precompute([Chunk(text, id="a"), Chunk(text, id="b"), Chunk(other, id="c")], neighbours=[[2], [2], [0]])
    assert engine.delete(["a"]) == 0
    assert _kinds(engine, [Chunk(text), Chunk(other)]) == ["enriched", "enriched"]
    assert engine.delete(["a"]) == 0
    assert engine.delete(["b"]) == 3
    assert _kinds(engine, [Chunk(text), Chunk(other)]) == ["none", "plain"]


def test_an_id_that_is_given_another_text_lets_go_of_the_first(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.precompute([Chunk("Old text.", id="a"), Chunk("Other.", id="b")], neighbours=[[1], [0]])
    engine.precompute([Chunk("New text.", id="a")])
    assert _kinds(engine, [Chunk("Old text."), Chunk("Other."), Chunk("New text.")]) == ["none", "plain", "plain"]
    assert engine.delete(["a"]) == 1
    assert _kinds(engine, [Chunk("New text.")]) == ["none"]


def test_ids_that_swap_their_texts_lose_no_cache(make_engine: MakeEngine) -> None:
    """Positional ids after a document moved up: every text of the call must be stored when it returns."""
    engine = make_engine()
    texts = [chunk.text for chunk in documents(3)]
    engine.precompute([Chunk(text, id=str(place)) for place, text in enumerate(texts)], neighbours=ring(3))
    moved = [Chunk(text, id=str(place)) for place, text in enumerate([texts[1], texts[2], texts[0]])]
    report = engine.precompute(moved, neighbours=ring(3))
    assert [record.kind for record in report.records] == ["enriched"] * 3
    assert engine.prefill(Request("Who?", moved)).stats.chunk_status == ["prefix", "enriched", "enriched"]
    engine.delete(["0"])
    assert [engine.has(text).kind == "none" for text in texts] == [False, True, False]


def test_deleting_a_chunk_whose_id_named_another_text_deletes_what_the_id_named(make_engine: MakeEngine) -> None:
    """The caller's document changed after it was ingested; then it is deleted. No trace of its old text may stay."""
    engine = make_engine()
    engine.precompute([Chunk("Text as ingested.", id="a")])
    engine.delete([Chunk("Text as it is now.", id="a")])
    assert _kinds(engine, [Chunk("Text as ingested.")]) == ["none"]


def test_a_deleted_neighbour_is_replaced_by_the_next_ingestion(make_engine: MakeEngine) -> None:
    engine = make_engine()
    embeddings = [[1, 0], [1, 0.1], [1, 0.2]]
    first = engine.precompute(documents(3), embeddings=embeddings).records
    engine.delete(["doc-1"])
    report = engine.precompute([documents(3)[0], documents(3)[2]], embeddings=[[1, 0], [1, 0.2]])
    assert report.num_plain_computed == 0
    assert report.num_enriched_computed == 2
    assert report.records[0].neighbours == (first[2].key,)


def test_a_deletion_is_seen_by_another_engine_on_the_same_store(tmp_path: Path, make_engine: MakeEngine) -> None:
    """What the other engine keeps in memory must not outlive it."""
    one, other = make_engine(cache_dir=tmp_path), make_engine(cache_dir=tmp_path)
    one.precompute(documents(COUNT), neighbours=ring(COUNT))
    other.prefill(Request("Who?", documents(COUNT)))
    one.delete(["doc-0", "doc-1"])
    stats = other.prefill(Request("Who?", documents(COUNT))).stats
    assert stats.chunk_status[:2] == ["miss", "miss"]


def test_a_deletion_behind_a_request_wins_over_what_that_request_stores(make_engine: MakeEngine) -> None:
    """A chunk met online is stored in the background; deleted meanwhile, it must not come back."""
    engine, go = make_engine(), threading.Event()
    engine._background.submit(go.wait)  # the background is busy
    engine.prefill(Request("Who?", ["Secret text."]))
    deleting = threading.Thread(target=lambda: engine.delete([Chunk("Secret text.")]), daemon=True)
    deleting.start()
    deleting.join(0.2)
    go.set()
    deleting.join(30)
    assert not deleting.is_alive()
    settle(engine)
    assert engine.has("Secret text.").kind == "none"


def test_requests_and_deletions_at_the_same_time_do_no_harm(tmp_path: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(cache_dir=tmp_path, host_bytes=0)
    chunks = documents(COUNT)
    engine.precompute(chunks, neighbours=ring(COUNT))
    request = Request("Who?", chunks, recompute_ratio=1.0)
    reference = engine.prefill(request).logits

    def ask() -> None:
        for _ in range(6):
            assert_same(engine.prefill(request).logits, reference)

    def delete_and_ingest() -> None:
        for _ in range(3):
            engine.delete(["doc-1", "doc-2"])
            engine.precompute(chunks, neighbours=ring(COUNT))

    in_threads([ask, ask, delete_and_ingest])
    settle(engine)
    engine.precompute(chunks, neighbours=ring(COUNT))
    assert engine.verify() == []


def test_sharing_between_scopes_is_explicit_and_one_way(tmp_path: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(cache_dir=tmp_path, scope_sharing={"team": ["company"]})
    engine.precompute(documents(2, scope="company"), neighbours=ring(2, 1))
    engine.precompute(documents(2, first=2, scope="team"), neighbours=ring(2, 1))
    shared = Request("Who?", documents(4, scope="team"))
    assert engine.prefill(shared).stats.chunk_status == ["prefix", "enriched", "enriched", "enriched"]
    assert engine.prefill(Request("Who?", documents(4, scope="company"))).stats.chunk_status[2:] == ["miss", "miss"]
    assert engine.prefill(Request("Who?", documents(2, scope="other"))).stats.chunk_status == ["miss", "miss"]
    settle(engine)
    engine.delete([Chunk(documents(1)[0].text, scope="company")])
    assert engine.prefill(shared).stats.chunk_status[0] == "miss"


@pytest.mark.parametrize("sharing", ["a", {"a": "b"}, {"a": [1]}, {1: ["a"]}], ids=str)
def test_sharing_that_is_no_map_of_lists_is_refused(make_engine: MakeEngine, sharing: object) -> None:
    with pytest.raises(ConfigError, match="scope_sharing"):
        make_engine(scope_sharing=sharing)


def test_the_counters_of_a_scope_tell_nothing_of_another(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.precompute(documents(2, scope="a"), neighbours=ring(2, 1))
    before = engine.stats(scope="b")
    engine.prefill(Request("Who?", documents(2, scope="a")))
    assert engine.stats(scope="b") == before
    stats = engine.stats(scope="a")
    assert (stats["num_requests"], stats["num_prefix"], stats["num_enriched"]) == (1, 1, 1)
    assert (stats["num_chunks"], stats["num_enriched_chunks"]) == (2, 2)
    assert (before["num_chunks"], before["num_requests"]) == (0, 0)
