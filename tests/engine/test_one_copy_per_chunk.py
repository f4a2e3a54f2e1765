"""Law 6: one distinct chunk has one stored copy a kind, whatever order or company it came in (Alternative Path)."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from fusionrag_engine import Chunk, Engine, Request
from tests.engine.support import cache_files, documents, ring, settle

MakeEngine = Callable[..., Engine]


@pytest.mark.parametrize("method", ["reuse", "fusionrag"])
def test_ten_chunks_in_random_orders_are_ten_caches(tmp_path: Path, make_engine: MakeEngine, method: str) -> None:
    engine, order = make_engine(cache_dir=tmp_path), random.Random(0)
    chunks = documents(10)
    for _ in range(8):
        engine.prefill(Request("Who?", order.sample(chunks, order.randint(1, 10)), method=method))
    engine.prefill(Request("Who?", chunks, method=method))
    settle(engine)
    assert len(cache_files(tmp_path)) == 10
    assert engine.stats()["num_chunks"] == 10
    stats = engine.prefill(Request("Who?", order.sample(chunks, 10), method=method)).stats
    assert stats.chunk_status == ["prefix"] + ["plain"] * 9


def test_enriched_chunks_have_two_copies(tmp_path: Path, make_engine: MakeEngine) -> None:
    engine, order = make_engine(cache_dir=tmp_path), random.Random(0)
    chunks = documents(6)
    engine.precompute(chunks, neighbours=ring(6))
    for _ in range(6):
        engine.prefill(Request("Who?", order.sample(chunks, 6)))
    settle(engine)
    assert len(cache_files(tmp_path)) == 12


def test_ids_do_not_multiply_caches(tmp_path: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(cache_dir=tmp_path)
    text = documents(1)[0].text
    engine.precompute([Chunk(text, id=f"node-{index}") for index in range(5)])
    engine.precompute([Chunk(text)])
    assert len(cache_files(tmp_path)) == 1


def test_files_on_disk_are_counted(tmp_path: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(cache_dir=tmp_path)
    report = engine.precompute(documents(4), neighbours=ring(4))
    sizes = sum(path.stat().st_size for path in cache_files(tmp_path))
    assert report.bytes_written == sizes == engine.stats()["disk_bytes"]
    assert engine.stats()["num_enriched_chunks"] == 4
