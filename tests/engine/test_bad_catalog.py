"""Law 3: losing or damaging the catalog costs a new ingestion, never a wrong answer and never a crash."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from fusionrag_engine import Engine, Request
from tests.engine.support import assert_same, documents, full, in_threads, ring, tiny_engine

MakeEngine = Callable[..., Engine]
COUNT = 4


def _overwrite(path: Path, start: int, stop: int) -> None:
    data = bytearray(path.read_bytes())
    data[start:stop] = random.Random(0).randbytes(len(data[start:stop]))
    path.write_bytes(bytes(data))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "vanished": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b"") and None,
    "garbage": lambda path: path.write_bytes(random.Random(0).randbytes(5000)) and None,
    "text": lambda path: path.write_text("not a database") and None,
    "first page garbled": lambda path: _overwrite(path, 100, 4096),
    "all pages but the first garbled": lambda path: _overwrite(path, 4096, path.stat().st_size),
    "second half garbled": lambda path: _overwrite(path, path.stat().st_size // 2, path.stat().st_size),
    "truncated to half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]) and None,
    "truncated to one page": lambda path: path.write_bytes(path.read_bytes()[:4096]) and None,
    "a stale log beside it": lambda path: Path(f"{path}-wal").write_bytes(random.Random(0).randbytes(5000)) and None,
}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pristine")
    with tiny_engine(cache_dir=directory) as engine:
        engine.precompute(documents(COUNT), neighbours=ring(COUNT))
    return directory


@pytest.fixture
def damaged(pristine: Path, tmp_path: Path) -> Callable[[str], Path]:
    def make(damage: str) -> Path:
        directory = shutil.copytree(pristine, tmp_path / "store")
        (path,) = directory.rglob("catalog.sqlite")
        DAMAGES[damage](path)
        return directory

    return make


@pytest.fixture(scope="module")
def expected(pristine: Path) -> dict[tuple[str, ...], Tensor]:
    """Chunk status -> logits, from stores that are whole and hold only plain, or enriched, caches."""
    results = {}
    for lists in (None, ring(COUNT)):
        with tiny_engine() as engine:
            engine.precompute(documents(COUNT), neighbours=lists)
            done = engine.prefill(_request())
            results[tuple(done.stats.chunk_status)] = done.logits
    return results


def _request(ratio: float = 0.25) -> Request:
    return Request("Who signs?", documents(COUNT), recompute_ratio=ratio)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_request_over_a_damaged_catalog_is_answered_right(
    damaged: Callable[[str], Path],
    expected: dict[tuple[str, ...], Tensor],
    make_engine: MakeEngine,
    damage: str,
) -> None:
    engine = make_engine(cache_dir=damaged(damage))
    ours = engine.prefill(_request())
    assert_same(ours.logits, expected[tuple(ours.stats.chunk_status)])
    assert_same(engine.prefill(_request(1.0)).logits, full(engine, _request()).logits)
    assert engine.stats()["num_requests"] == 3


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_ingestion_repairs_a_damaged_catalog(
    damaged: Callable[[str], Path],
    expected: dict[tuple[str, ...], Tensor],
    make_engine: MakeEngine,
    damage: str,
) -> None:
    directory = damaged(damage)
    engine = make_engine(cache_dir=directory)
    report = engine.precompute(documents(COUNT), neighbours=ring(COUNT))
    assert [record.kind for record in report.records] == ["enriched"] * COUNT
    assert report.num_plain_computed == 0, "the caches themselves were whole"
    again = make_engine(cache_dir=directory)
    ours = again.prefill(_request())
    assert ours.stats.chunk_status == ["prefix"] + ["enriched"] * (COUNT - 1)
    assert_same(ours.logits, expected[tuple(ours.stats.chunk_status)])
    assert again.verify() == []


def test_a_catalog_that_vanishes_under_an_open_engine_does_no_harm(
    damaged: Callable[[str], Path], make_engine: MakeEngine
) -> None:
    directory = damaged("a stale log beside it")
    engine = make_engine(cache_dir=directory)
    engine.prefill(_request())
    for path in directory.rglob("catalog.sqlite*"):
        path.unlink()
    assert engine.prefill(_request()).logits.isfinite().all()
    engine.precompute(documents(6), neighbours=ring(6))
    again = make_engine(cache_dir=directory)
    assert_same(again.prefill(_request(1.0)).logits, full(again, _request()).logits)


def test_a_store_that_cannot_be_written_still_answers(
    damaged: Callable[[str], Path], expected: dict[tuple[str, ...], Tensor], make_engine: MakeEngine
) -> None:
    """A read-only catalog, a full disk: hits, misses and vanished files are read, and nothing needs to be noted."""
    directory = damaged("a stale log beside it")
    engine = make_engine(cache_dir=directory, disk_bytes=1 << 30)
    engine.library.catalog._db.execute("PRAGMA query_only = ON")
    ours = engine.prefill(_request())
    assert_same(ours.logits, expected[tuple(ours.stats.chunk_status)])
    for _ in range(2):
        request = Request("Who signs?", [*documents(2), "Unseen."], recompute_ratio=1.0)
        assert_same(engine.prefill(request).logits, full(engine, request).logits)
    for path in directory.rglob("*.safetensors"):
        path.unlink()
    again = make_engine(cache_dir=directory)
    again.library.catalog._db.execute("PRAGMA query_only = ON")
    assert_same(again.prefill(_request(1.0)).logits, full(again, _request()).logits)


@pytest.mark.parametrize("settings", [{}, {"disk_bytes": 1 << 30}], ids=str)
def test_a_request_does_not_wait_for_another_process_that_writes(
    damaged: Callable[[str], Path], make_engine: MakeEngine, settings: dict[str, int]
) -> None:
    """Ingestion in another process holds the catalog's write lock: hits and misses are answered all the same."""
    directory = damaged("a stale log beside it")
    engine = make_engine(cache_dir=directory, **settings)
    (path,) = directory.rglob("catalog.sqlite")
    writer = sqlite3.connect(path)
    writer.execute("BEGIN IMMEDIATE")
    try:
        in_threads([lambda: engine.prefill(Request("Who signs?", [*documents(2), "Unseen."]))], timeout=10)
    finally:
        writer.rollback()
        writer.close()
