"""The life of caches: refreshed when neighbours change, plain copies dropped, swept when nobody refers to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fusionrag_engine import Chunk, Engine, Request
from tests.engine.support import assert_same, cache_file, cache_files, documents, full, in_threads, ring, settle

MakeEngine = Callable[..., Engine]
COUNT = 4


def _circle(count: int, *, first: int = 0, step: float = 0.3) -> np.ndarray:
    """Embeddings on a circle: neighbours in number are neighbours in direction."""
    angles = np.arange(first, first + count) * step
    return np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)


def _neighbours(engine: Engine, chunk: Chunk) -> tuple[str, ...]:
    return engine.has(chunk).neighbours


def test_refresh_enriches_with_chunks_that_came_later(make_engine: MakeEngine) -> None:
    """Afterwards the store is the one that a single ingestion of everything gives."""
    engine = make_engine(top_n=2)
    chunks = documents(8)
    order = [0, 4, 7, 2, 6, 1, 3, 5]
    vectors = _circle(8)
    for start in (0, 3, 6):
        part = order[start : start + 3]
        engine.precompute([chunks[index] for index in part], embeddings=vectors[part])
    fresh = make_engine(top_n=2)
    fresh.precompute(chunks, embeddings=vectors)
    assert any(_neighbours(engine, chunk) != _neighbours(fresh, chunk) for chunk in chunks)
    report = engine.refresh()
    assert report.num_refreshed == len(report.stale) > 0
    assert [set(_neighbours(engine, chunk)) for chunk in chunks] == [set(_neighbours(fresh, chunk)) for chunk in chunks]
    assert engine.refresh().stale == []
    stale_free = Request("Who?", [chunks[index] for index in (5, 0, 3)])
    assert engine.prefill(stale_free).stats.chunk_status == ["prefix", "enriched", "enriched"]


def test_the_most_changed_come_first_within_the_budget(make_engine: MakeEngine) -> None:
    engine = make_engine(top_n=2)
    chunks, vectors = documents(9), _circle(9)
    engine.precompute([chunks[index] for index in (0, 1, 2, 8)], embeddings=vectors[[0, 1, 2, 8]])
    engine.precompute([chunks[index] for index in (3, 6, 7)], embeddings=vectors[[3, 6, 7]])
    found = engine.refresh(dry_run=True)
    assert found.num_refreshed == 0
    assert found.stale[0].row.key == engine.has(chunks[8]).key, "both of its neighbours are new"
    assert [chunk.change for chunk in found.stale] == [1.0, 0.5]
    before = _neighbours(engine, chunks[8])
    assert engine.refresh(budget=0).num_refreshed == 0
    assert engine.refresh(budget_s=0.0).num_refreshed == 0
    assert _neighbours(engine, chunks[8]) == before
    assert engine.refresh(budget=1).num_left == len(found.stale) - 1
    assert set(_neighbours(engine, chunks[8])) == {engine.has(chunks[index]).key for index in (6, 7)}


@pytest.mark.parametrize("has_embeddings", [True, False])
def test_a_chunk_that_lost_a_neighbour_is_enriched_again(
    tmp_path: Path, make_engine: MakeEngine, has_embeddings: bool
) -> None:
    engine, chunks = make_engine(cache_dir=tmp_path, top_n=2), documents(COUNT)
    how = {"embeddings": _circle(COUNT)} if has_embeddings else {"neighbours": ring(COUNT)}
    records = engine.precompute(chunks, **how).records
    engine.delete(["doc-1"])
    fallen = [chunk for chunk in (chunks[0], chunks[2], chunks[3]) if engine.has(chunk).kind == "plain"]
    assert fallen
    report = engine.refresh()
    assert report.num_refreshed == len(fallen)
    for chunk in fallen:
        record = engine.has(chunk)
        assert record.kind == "enriched"
        assert records[1].key not in record.neighbours
    assert engine.verify() == []
    request = Request("Who?", [chunks[2], chunks[0], chunks[3]])
    assert engine.prefill(request).stats.chunk_status == ["prefix", "enriched", "enriched"]


def test_refresh_keeps_to_a_scope(make_engine: MakeEngine) -> None:
    engine = make_engine(top_n=1)
    for scope in ("a", "b"):
        engine.precompute(documents(2, scope=scope), neighbours=ring(2, 1))
        engine.delete([Chunk(documents(2)[1].text, scope=scope)])
        engine.precompute(documents(1, first=5, scope=scope))
        engine.precompute(documents(2, scope=scope)[:1], neighbours=[[]])
    engine.precompute(documents(2, scope="a"), embeddings=_circle(2))
    engine.precompute(documents(2, scope="b"), embeddings=_circle(2))
    engine.delete([Chunk(documents(2)[1].text, scope="a"), Chunk(documents(2)[1].text, scope="b")])
    for scope in ("a", "b"):
        engine.precompute(documents(1, first=6, scope=scope), embeddings=_circle(1, first=1))
    engine.refresh(scope="a")
    kinds = [engine.has(documents(1, scope=scope)[0]).kind for scope in ("a", "b")]
    assert kinds == ["enriched", "plain"]


def test_an_enrichment_is_dropped_if_a_neighbour_is_deleted_meanwhile(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 7: it carries traces of the deleted chunk. The deletion happens between computing and recording."""
    engine, chunks = make_engine(), documents(2)
    engine.precompute(chunks)
    original = engine.library.store.put

    def put(entry: object) -> int:
        size = original(entry)  # type: ignore[arg-type]
        engine.library.delete("", engine.library.keys.plain(engine.layout.tokenize(chunks[1].text), ""), None)
        return size

    monkeypatch.setattr(engine.library.store, "put", put)
    engine.precompute(chunks[:1], neighbours=[["doc-1"]])
    assert engine.has(chunks[0]).kind == "plain"
    assert len(engine.library.store.host) == 1


def test_without_keep_plain_enrichment_costs_no_second_copy(tmp_path: Path, make_engine: MakeEngine) -> None:
    engine, chunks = make_engine(cache_dir=tmp_path, keep_plain=False), documents(COUNT)
    report = engine.precompute(chunks, neighbours=ring(COUNT))
    assert [record.kind for record in report.records] == ["enriched"] * COUNT
    assert len(cache_files(tmp_path)) == COUNT
    assert engine.verify() == []
    assert engine.precompute(chunks, neighbours=ring(COUNT)).num_computed == 0
    both = make_engine()
    both.precompute(chunks, neighbours=ring(COUNT))
    request = Request("Who?", chunks, recompute_ratio=0.0)
    for expected in ("miss", "prefix"):  # the first chunk's exact rows are computed, then kept in memory
        ours = engine.prefill(request)
        settle(engine)
        assert ours.stats.chunk_status == [expected, "enriched", "enriched", "enriched"]
        assert_same(ours.logits, both.prefill(request).logits)
    assert len(cache_files(tmp_path)) == COUNT
    assert_same(engine.prefill(Request("Who?", chunks, recompute_ratio=1.0)).logits, full(engine, request).logits)


def test_without_keep_plain_a_neighbours_plain_cache_is_computed_again(tmp_path: Path, make_engine: MakeEngine) -> None:
    chunks = documents(COUNT + 1)
    entries = []
    for keep_plain in (True, False):
        directory = tmp_path / str(keep_plain)
        make_engine(cache_dir=directory, keep_plain=keep_plain).precompute(chunks[:-1], neighbours=ring(COUNT))
        engine = make_engine(cache_dir=directory, keep_plain=keep_plain)
        engine.precompute(chunks[-1:], neighbours=[["doc-0", "doc-2"]])
        key = engine.has(chunks[-1]).enriched_key
        assert key is not None
        entries.append(engine.library.store.load(key))
        assert len(cache_files(directory)) == (2 * len(chunks) if keep_plain else len(chunks))
        engine.delete(["doc-1"])
        assert engine.refresh().num_left == 0
    assert torch.allclose(entries[0].keys, entries[1].keys, atol=1e-5)  # type: ignore[union-attr]


def test_a_sweep_removes_chunks_that_nobody_refers_to(tmp_path: Path, make_engine: MakeEngine) -> None:
    engine, chunks = make_engine(cache_dir=tmp_path), documents(COUNT)
    keys = [record.key for record in engine.precompute(chunks, neighbours=[[1], [0], [3], [2]]).records]
    live = {str(key) for key in keys[:3]}
    assert engine.gc(live=live) == 0, "all within the grace period"
    assert engine.gc(live=live, grace_s=0.0, dry_run=True) == 1
    assert len(cache_files(tmp_path)) == 2 * COUNT
    assert engine.gc(live=live, grace_s=0.0) == 1
    assert [engine.has(chunk).kind for chunk in chunks] == ["enriched", "enriched", "plain", "none"]
    assert engine.verify() == []


def test_verify_repairs_what_it_finds(tmp_path: Path, make_engine: MakeEngine) -> None:
    engine, chunks = make_engine(cache_dir=tmp_path), documents(COUNT)
    records = engine.precompute(chunks, neighbours=ring(COUNT)).records
    cache_file(engine, records[1].enriched_key).unlink()
    cache_file(engine, records[2].key).write_bytes(b"nonsense")
    problems = engine.verify(repair=True)
    assert len(problems) == 2
    assert any("no file" in problem and str(records[1].enriched_key) in problem for problem in problems)
    assert engine.verify() == []
    assert engine.has(chunks[1]).kind == "plain"
    assert engine.refresh().num_refreshed == 1
    assert engine.precompute(chunks, neighbours=ring(COUNT)).num_computed == 0, "refreshing needed the plain one too"
    assert [engine.has(chunk).kind for chunk in chunks] == ["enriched"] * COUNT


def test_refresh_beside_requests_and_deletions(tmp_path: Path, make_engine: MakeEngine) -> None:
    engine, chunks = make_engine(cache_dir=tmp_path, top_n=2), documents(6)
    for index in range(6):
        engine.precompute([chunks[index]], embeddings=_circle(1, first=index))
    request = Request("Who?", chunks, recompute_ratio=1.0)
    reference = full(engine, request).logits

    def ask() -> None:
        for _ in range(3):
            assert_same(engine.prefill(request).logits, reference)

    def delete() -> None:
        engine.delete(["doc-2"])
        engine.delete(["doc-4"])

    in_threads([engine.refresh, ask, delete])
    settle(engine)
    rows = engine.library.catalog.all()
    # A question that met a deleted chunk again made it known again.
    gone = {engine._key(chunks[2]), engine._key(chunks[4])} - {row.key for row in rows}
    for row in rows:
        assert not set(row.neighbours) & gone, "an enriched cache carries traces of a deleted chunk"
    assert engine.verify() == []


def test_a_plan_tells_the_bytes_before_they_are_written(tmp_path: Path, make_engine: MakeEngine) -> None:
    for codec in ("none", "int8", "int4"):
        for keep_plain in (True, False):
            engine = make_engine(cache_dir=tmp_path / f"{codec}{keep_plain}", codec=codec, keep_plain=keep_plain)
            chunks = [*documents(COUNT), documents(1)[0]]
            plan = engine.plan(chunks)
            engine.precompute(chunks, neighbours=[*ring(COUNT), ring(COUNT)[0]])
            written = engine.stats()["disk_bytes"]
            assert plan.num_chunks == COUNT
            assert abs(plan.disk_bytes - written) < 0.05 * written
            assert plan.host_bytes < plan.disk_bytes
