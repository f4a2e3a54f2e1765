"""Law 8: a writer killed at any moment leaves a store that opens, and nothing half-written in use."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from fusionrag_engine import Engine, Request
from tests.engine.ingest_process import COUNT
from tests.engine.support import assert_same, cache_files, documents, full, ring, tiny_engine

MakeEngine = Callable[..., Engine]
SCRIPT = Path(__file__).with_name("ingest_process.py")
# Files 1 to COUNT are the plain caches, the next COUNT the enriched ones.
DEATHS = [
    "killed:1",
    "killed:3",
    "killed:7",
    "file-half-written:1",
    "file-half-written:7",
    "file-written:1",
    "file-written:8",
    "file-renamed:1",
    "file-renamed:6",
    "file-renamed:10",
    "plain-recorded:2",
    "id-recorded:2",
    "enriched-recorded:1",
    "enriched-recorded:4",
]
TOGETHER = ["together-1", "together-2"]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one store a job, left behind by processes that died, or that ran at the same time."""
    root = tmp_path_factory.mktemp("stores")
    done = subprocess.run(
        [sys.executable, SCRIPT, root, *DEATHS, *TOGETHER], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return root


def _request(method: str, ratio: float = 0.25) -> Request:
    return Request("Who signs?", documents(COUNT), method=method, recompute_ratio=ratio)


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    with tiny_engine() as engine:
        engine.precompute(documents(COUNT), neighbours=ring(COUNT))
        return {method: engine.prefill(_request(method)).logits for method in ("reuse", "fusionrag")}


def _assert_complete(make_engine: MakeEngine, directory: Path, expected: dict[str, Tensor]) -> None:
    engine = make_engine(cache_dir=directory)
    assert engine.verify() == []
    for method, status in (("reuse", "plain"), ("fusionrag", "enriched")):
        ours = engine.prefill(_request(method))
        assert ours.stats.chunk_status == ["prefix"] + [status] * (COUNT - 1)
        assert_same(ours.logits, expected[method])
    engine.gc()
    assert len(cache_files(directory)) == 2 * COUNT
    leftovers = [path for path in directory.rglob("*") if path.is_file() and path.suffix in (".tmp", ".corrupt")]
    assert leftovers == []


@pytest.mark.parametrize("job", DEATHS)
def test_a_store_left_by_a_dead_writer_opens_and_uses_nothing_half_written(
    stores: Path, make_engine: MakeEngine, expected: dict[str, Tensor], job: str
) -> None:
    directory = stores / job.replace(":", "-")
    engine = make_engine(cache_dir=directory)
    assert engine.verify() == []
    for method in ("reuse", "fusionrag"):
        assert_same(engine.prefill(_request(method, 1.0)).logits, full(engine, _request(method)).logits)
    records = [engine.has(chunk) for chunk in documents(COUNT)]
    assert all(record.kind in ("none", "plain", "enriched") for record in records)

    report = make_engine(cache_dir=directory).precompute(documents(COUNT), neighbours=ring(COUNT))
    assert [record.kind for record in report.records] == ["enriched"] * COUNT
    assert report.num_plain_computed + report.num_plain_reused == COUNT
    _assert_complete(make_engine, directory, expected)
    again = make_engine(cache_dir=directory).precompute(documents(COUNT), neighbours=ring(COUNT))
    assert again.num_computed == 0


@pytest.mark.parametrize("job", TOGETHER)
def test_two_processes_ingest_one_corpus_into_one_store(
    stores: Path, make_engine: MakeEngine, expected: dict[str, Tensor], job: str
) -> None:
    _assert_complete(make_engine, stores / job, expected)


def test_an_ingestion_that_fails_in_the_middle_is_completed_by_the_next(
    tmp_path: Path, make_engine: MakeEngine, expected: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error instead of a death: a full disk."""
    engine = make_engine(cache_dir=tmp_path)
    calls = 0

    def full_disk(_descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 7:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(OSError, match="No space left"):
            engine.precompute(documents(COUNT), neighbours=ring(COUNT))
    assert not list(tmp_path.rglob("*.tmp"))
    assert engine.precompute(documents(COUNT), neighbours=ring(COUNT)).num_enriched_computed > 0
    engine.close()
    _assert_complete(make_engine, tmp_path, expected)


def test_a_full_disk_does_not_fail_a_request(
    tmp_path: Path, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(cache_dir=tmp_path)

    def full_disk(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    for _ in range(2):
        request = Request("Who signs?", documents(2))
        assert_same(engine.prefill(request).logits, full(engine, request).logits)


def test_cleaning_up_leaves_the_files_of_living_writers_alone(
    tmp_path: Path, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gc` in one engine while another one is between writing a file and renaming it, or recording it."""
    writer, cleaner = make_engine(cache_dir=tmp_path), make_engine(cache_dir=tmp_path)
    original = os.fsync

    def fsync(descriptor: int) -> None:
        original(descriptor)
        cleaner.gc()

    monkeypatch.setattr(os, "fsync", fsync)
    report = writer.precompute(documents(2), neighbours=ring(2, 1))
    assert [record.kind for record in report.records] == ["enriched"] * 2
