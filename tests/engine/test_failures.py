"""Law 3 under failing input and output: an error, a short read, a full disk, no permission, slowness - wherever one
happens while a request is answered, the answer is what an engine without caches gives."""

from __future__ import annotations

import builtins
import mmap
import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import fusionrag_engine.store.disk as disk_module
from fusionrag_engine import Engine, Request
from tests.engine.support import assert_same, documents, in_threads, ring, settle, tiny_engine

MakeEngine = Callable[..., Engine]
COUNT = 3
ERRORS = {
    "error": OSError(5, "Input/output error"),
    "permission": PermissionError(13, "Permission denied"),
    "full disk": OSError(28, "No space left on device"),
    "too many files": OSError(24, "Too many open files"),
}


class _FailingDatabase:
    """A connection that fails as SQLite does when its file cannot be read."""

    def __init__(self, original: sqlite3.Connection, message: str) -> None:
        self._original, self._message = original, message

    def execute(self, query: str, *values: Any) -> Any:
        if "chunks" in query or "files" in query:
            raise sqlite3.OperationalError(self._message)
        return self._original.execute(query, *values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _raising(error: OSError, original: Callable[..., Any], concerns: Callable[..., bool]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if concerns(*args):
            raise error
        return original(*args, **kwargs)

    return call


def _is_cache(path: Any, *_rest: Any) -> bool:
    return isinstance(path, (str, Path)) and ".safetensors" in str(path)


def _break(patch: pytest.MonkeyPatch, call: str, kind: str, engine: Engine) -> None:
    """Let every call of one kind fail in one way, for cache files and the catalog only."""
    error = ERRORS.get(kind, ERRORS["error"])
    if call == "open":
        patch.setattr(builtins, "open", _raising(error, open, _is_cache))
    elif call == "map":
        patch.setattr(mmap, "mmap", _raising(error, mmap.mmap, lambda *_args: True))
    elif call == "fsync":
        patch.setattr(os, "fsync", _raising(error, os.fsync, lambda *_args: True))
    elif call == "replace":
        patch.setattr(os, "replace", _raising(error, os.replace, lambda *_args: True))
    elif call == "stat":
        patch.setattr(os, "stat", _raising(error, os.stat, lambda path, *_rest: "fusion" in str(path)))
    else:
        catalog = engine.library.catalog
        message = {"permission": "attempt to write a readonly database", "full disk": "database or disk is full"}
        name = "_reader" if call == "catalog read" else "_db"
        broken = _FailingDatabase(getattr(catalog, name), message.get(kind, "disk I/O error"))
        patch.setattr(catalog, name, broken)


@pytest.fixture(scope="module")
def expected() -> Tensor:
    with tiny_engine() as engine:
        return engine.prefill(Request("Who?", [*documents(COUNT), "Unseen."], method="full")).logits


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("call", ["open", "map", "fsync", "replace", "stat", "catalog read", "catalog write"])
def test_a_failing_call_changes_no_answer(
    tmp_path: Path, make_engine: MakeEngine, expected: Tensor, call: str, kind: str
) -> None:
    make_engine(cache_dir=tmp_path).precompute(documents(COUNT), neighbours=ring(COUNT))
    settings = {"host_bytes": 0} if call == "map" else {}  # what memory does not keep is mapped
    engine = make_engine(cache_dir=tmp_path, disk_bytes=1 << 30, **settings)
    request = Request("Who?", [*documents(COUNT), "Unseen."], recompute_ratio=1.0)
    with pytest.MonkeyPatch.context() as patch:
        _break(patch, call, kind, engine)
        for _ in range(2):
            assert_same(engine.prefill(request).logits, expected)
            settle(engine)
    assert_same(engine.prefill(request).logits, expected)
    settle(engine)
    engine.precompute(documents(COUNT), neighbours=ring(COUNT))
    repaired = make_engine(cache_dir=tmp_path)
    assert repaired.prefill(request).stats.chunk_status[:COUNT] == ["prefix", "enriched", "enriched"]


def test_a_store_that_is_deleted_under_an_open_engine_is_begun_anew(
    tmp_path: Path, make_engine: MakeEngine, expected: Tensor
) -> None:
    directory = tmp_path / "store"
    engine = make_engine(cache_dir=directory, host_bytes=0)
    engine.precompute(documents(COUNT), neighbours=ring(COUNT))
    shutil.rmtree(directory)
    request = Request("Who?", [*documents(COUNT), "Unseen."], recompute_ratio=1.0)
    assert_same(engine.prefill(request).logits, expected)
    settle(engine)
    engine.precompute(documents(COUNT), neighbours=ring(COUNT))
    assert make_engine(cache_dir=directory).prefill(request).stats.chunk_status[:COUNT] == [
        "prefix",
        "enriched",
        "enriched",
    ]


def test_too_many_open_files_spoils_no_cache(tmp_path: Path, make_engine: MakeEngine) -> None:
    """An error that says nothing about the file: it is left where it is, and used as soon as it can be read."""
    make_engine(cache_dir=tmp_path).precompute(documents(COUNT), neighbours=ring(COUNT))
    engine = make_engine(cache_dir=tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        _break(patch, "open", "too many files", engine)
        assert engine.library.plain(engine.layout.tokenize(documents(1)[0].text), "") is None
    assert not list(tmp_path.rglob("*.corrupt"))
    assert engine.library.plain(engine.layout.tokenize(documents(1)[0].text), "") is not None


@pytest.mark.parametrize("keep", [1, 7, 100, 2000])
@pytest.mark.parametrize("is_mapped", [True, False])
def test_a_short_read_changes_no_answer(
    tmp_path: Path, make_engine: MakeEngine, expected: Tensor, keep: int, is_mapped: bool
) -> None:
    make_engine(cache_dir=tmp_path).precompute(documents(COUNT), neighbours=ring(COUNT))
    engine = make_engine(cache_dir=tmp_path, **({"host_bytes": 0} if is_mapped else {}))
    original, original_read = mmap.mmap, disk_module._read

    def short(descriptor: int, _length: int, **settings: Any) -> Any:
        return original(descriptor, keep, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mmap, "mmap", short)
        patch.setattr(disk_module, "_read", lambda file, size: original_read(file, min(size, keep)))
        request = Request("Who?", [*documents(COUNT), "Unseen."], recompute_ratio=1.0)
        assert_same(engine.prefill(request).logits, expected)
        settle(engine)


def test_a_slow_read_changes_no_answer(tmp_path: Path, make_engine: MakeEngine, expected: Tensor) -> None:
    make_engine(cache_dir=tmp_path).precompute(documents(COUNT), neighbours=ring(COUNT))
    engine = make_engine(cache_dir=tmp_path)
    disk = engine.library.store.disk
    assert disk is not None
    original = disk.read

    def slow(key: str) -> Any:
        time.sleep(0.05)
        return original(key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "read", slow)
        request = Request("Who?", [*documents(COUNT), "Unseen."], recompute_ratio=1.0)
        for logits in in_threads([lambda: engine.prefill(request).logits] * 2):
            assert_same(logits, expected)


def test_an_engine_follows_when_another_moves_a_damaged_catalog_aside(tmp_path: Path, make_engine: MakeEngine) -> None:
    """What it ingests afterwards is in the new catalog, not in the one that was moved away."""
    one, other = make_engine(cache_dir=tmp_path), make_engine(cache_dir=tmp_path)
    one.precompute(documents(COUNT), neighbours=ring(COUNT))
    one.library.catalog._start_again(sqlite3.DatabaseError("file is not a database"))
    assert len(list(tmp_path.rglob("*.corrupt"))) == 1
    other.precompute(documents(COUNT), neighbours=ring(COUNT))
    assert one.stats()["num_enriched_chunks"] == COUNT
    assert one.prefill(Request("Who?", documents(COUNT))).stats.chunk_status == ["prefix", "enriched", "enriched"]


def test_only_the_first_of_two_engines_moves_a_damaged_catalog_aside(tmp_path: Path, make_engine: MakeEngine) -> None:
    one, other = make_engine(cache_dir=tmp_path), make_engine(cache_dir=tmp_path)
    one.library.catalog._start_again(sqlite3.DatabaseError("file is not a database"))
    one.precompute(documents(COUNT), neighbours=ring(COUNT))
    other.library.catalog._start_again(sqlite3.DatabaseError("file is not a database"))
    assert other.stats()["num_enriched_chunks"] == COUNT
    assert len(list(tmp_path.rglob("*.corrupt"))) == 1


def test_files_of_a_lost_catalog_count_in_the_budget_again(tmp_path: Path, make_engine: MakeEngine) -> None:
    make_engine(cache_dir=tmp_path).precompute(documents(COUNT), neighbours=ring(COUNT))
    for path in tmp_path.rglob("catalog.sqlite*"):
        path.unlink()
    engine = make_engine(cache_dir=tmp_path)
    assert engine.precompute(documents(COUNT), neighbours=ring(COUNT)).num_plain_computed == 0
    assert engine.stats()["tiers"]["disk"]["num_bytes"] == engine.stats()["disk_bytes"]
