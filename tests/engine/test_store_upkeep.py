"""The store over time: budgets, prefetching, garbage, counters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fusionrag_engine import Chunk, Engine, Request
from tests.engine.support import assert_same, cache_file, cache_files, documents, full, in_threads, ring, settle

MakeEngine = Callable[..., Engine]
COUNT = 4


def _request(ratio: float = 0.25) -> Request:
    return Request("Who?", documents(COUNT), recompute_ratio=ratio)


@pytest.mark.parametrize(
    "settings", [{"host_bytes": 0}, {"host_bytes": 0, "disk_bytes": 0}, {"disk_bytes": 1}, {"disk_bytes": 100_000}]
)
def test_small_budgets_change_no_answer(tmp_path: Path, make_engine: MakeEngine, settings: dict[str, int]) -> None:
    engine = make_engine(cache_dir=tmp_path, **settings)
    engine.precompute(documents(COUNT), neighbours=ring(COUNT))
    for _ in range(3):
        assert_same(engine.prefill(_request(1.0)).logits, full(engine, _request()).logits)
        settle(engine)
    assert engine.precompute(documents(COUNT), neighbours=ring(COUNT)).num_chunks == COUNT


def test_memory_only_with_no_memory_computes_everything(make_engine: MakeEngine) -> None:
    engine = make_engine(host_bytes=0)
    report = engine.precompute(documents(COUNT), neighbours=ring(COUNT))
    assert [record.kind for record in report.records] == ["none"] * COUNT
    done = engine.prefill(_request())
    assert done.stats.chunk_status == ["miss"] * COUNT
    assert_same(done.logits, full(engine, _request()).logits)


def test_host_memory_stays_within_its_budget(tmp_path: Path, make_engine: MakeEngine) -> None:
    probe = make_engine()
    probe.precompute(documents(10))
    budget = probe.stats()["host_bytes"] // 3
    engine = make_engine(cache_dir=tmp_path, host_bytes=budget)
    engine.precompute(documents(10))
    assert 0 < engine.stats()["host_bytes"] <= budget
    status = engine.prefill(Request("Who?", documents(10), method="reuse")).stats.chunk_status
    assert status == ["prefix"] + ["plain"] * 9  # the rest comes from disk
    assert engine.stats()["host_bytes"] <= budget


def test_the_disk_stays_within_its_budget_and_keeps_what_was_used_last(tmp_path: Path, make_engine: MakeEngine) -> None:
    chunks = [Chunk("Z" * 20 + str(index)) for index in range(8)]
    probe = make_engine(cache_dir=tmp_path / "probe")
    probe.precompute(chunks)
    budget = probe.stats()["disk_bytes"] * 5 // 8
    engine = make_engine(cache_dir=tmp_path / "small", disk_bytes=budget, host_bytes=0)
    engine.precompute(chunks[:4])
    engine.prefill(Request("Who?", chunks[:1]))
    engine.precompute(chunks[4:])
    assert engine.stats()["disk_bytes"] <= budget
    kept = [engine.has(chunk).kind == "plain" for chunk in chunks]
    assert kept == [True, False, False, False, True, True, True, True]


def test_prefetch_brings_caches_into_memory(tmp_path: Path, make_engine: MakeEngine) -> None:
    make_engine(cache_dir=tmp_path).precompute(documents(COUNT), neighbours=ring(COUNT))
    engine = make_engine(cache_dir=tmp_path)
    engine.prefetch([*documents(COUNT), "Unknown."])
    settle(engine)
    assert engine.stats()["host_entries"] == COUNT
    for path in cache_files(tmp_path):
        path.unlink()
    # The first chunk is exact only with its plain cache; the others are there as they were prefetched.
    assert engine.prefill(_request()).stats.chunk_status[1:] == ["enriched"] * (COUNT - 1)


def test_a_prefetched_prompt_reads_nothing_from_disk(tmp_path: Path, make_engine: MakeEngine) -> None:
    """Prefetching in prompt order: whatever the request needs is in memory, the first chunk's plain cache included."""
    make_engine(cache_dir=tmp_path).precompute(documents(COUNT), neighbours=ring(COUNT))
    engine = make_engine(cache_dir=tmp_path)
    engine.prefetch(documents(COUNT))
    settle(engine)
    for path in cache_files(tmp_path):
        path.unlink()
    assert "miss" not in engine.prefill(_request()).stats.chunk_status


def test_gc_removes_what_belongs_to_no_chunk(tmp_path: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(cache_dir=tmp_path)
    record = engine.precompute(documents(COUNT), neighbours=ring(COUNT)).records[0]
    path = cache_file(engine, record.key)
    stray = path.parent.parent / "00" / ("00" * 32 + ".safetensors")
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(path.read_bytes())
    foreign = path.with_name("notes.txt")
    foreign.write_text("not ours")
    assert engine.gc() == 1
    assert not stray.exists()
    assert foreign.exists()
    assert engine.gc() == 0
    assert engine.verify() == []


def test_gc_and_verify_work_without_a_disk(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.precompute(documents(COUNT), neighbours=ring(COUNT))
    assert engine.gc() == 0
    assert engine.verify() == []
    assert engine.prefill(_request()).stats.chunk_status == ["prefix", "enriched", "enriched", "enriched"]


def test_counters_count(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.precompute(documents(COUNT), neighbours=ring(COUNT))
    engine.prefill(_request())
    engine.generate(Request("Who?", ["Unseen.", documents(1)[0]], method="reuse"))
    engine.prefill(Request("Who?", documents(2), method="full"))
    stats = engine.stats()
    counters = ("num_requests", "num_prefix", "num_enriched", "num_plain", "num_miss")
    assert [stats[name] for name in counters] == [3, 1, 3, 1, 1]


def test_two_engines_share_a_store_while_both_are_open(tmp_path: Path, make_engine: MakeEngine) -> None:
    one, other = make_engine(cache_dir=tmp_path), make_engine(cache_dir=tmp_path)
    one.precompute(documents(COUNT), neighbours=ring(COUNT))
    assert other.prefill(_request()).stats.chunk_status == ["prefix", "enriched", "enriched", "enriched"]
    assert other.precompute(documents(COUNT), neighbours=ring(COUNT)).num_computed == 0
    in_threads(
        [
            lambda: one.precompute(documents(6, first=4), neighbours=ring(6)),
            lambda: other.precompute(documents(6, first=4), neighbours=ring(6)),
            lambda: other.prefill(_request()),
        ]
    )
    assert one.verify() == []


def test_two_configurations_share_a_directory_without_meeting(tmp_path: Path, make_engine: MakeEngine) -> None:
    engines = [
        make_engine(cache_dir=tmp_path),
        make_engine("qwen2", cache_dir=tmp_path),
        make_engine(cache_dir=tmp_path, system_prompt="Else."),
    ]
    for engine in engines:
        assert engine.precompute(documents(COUNT), neighbours=ring(COUNT)).num_plain_computed == COUNT
    engines[0].delete([chunk.id for chunk in documents(COUNT)])  # type: ignore[misc]
    assert [engine.stats()["num_chunks"] for engine in engines] == [0, COUNT, COUNT]
    assert engines[1].verify() == engines[2].verify() == []
