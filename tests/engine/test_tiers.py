"""Tiers: where an entry is found, where it goes when it is used, and what gives way above a budget."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from fusionrag_engine import Engine, Request
from fusionrag_engine.catalog import Catalog
from fusionrag_engine.errors import ConfigError
from fusionrag_engine.heat import HALF_LIFE_S, HeatMap, heated
from fusionrag_engine.store import ChunkStore, DiskTier, Entry, MemoryTier, RemoteTier
from tests.engine.support import assert_same, cache_files, documents, full, in_threads, ring, tiny_engine

MakeEngine = Callable[..., Engine]
COUNT = 4
ROWS = 2 * 2 * 2 * 8 * 4 * 4
"""Bytes of one test entry."""


def _entry(number: int) -> Entry:
    rows = torch.full((2, 2, 8, 4), float(number))
    return Entry(f"{number:02d}" * 32, tuple(range(8)), 3, rows, -rows)


def _key(number: int) -> str:
    return f"{number:02d}" * 32


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def make_store(tmp_path: Path, url: str) -> Iterator[Callable[..., ChunkStore]]:
    catalogs = []

    def make(host: int = 100, *, has_disk: bool = True, has_remote: bool = False, **settings: Any) -> ChunkStore:
        catalogs.append(Catalog(tmp_path / "catalog.sqlite"))
        disk = DiskTier(tmp_path / "caches") if has_disk else None
        remote = RemoteTier(url) if has_remote else None
        return ChunkStore(catalogs[-1], host * ROWS, disk=disk, remote=remote, **settings)

    yield make
    for catalog in catalogs:
        catalog.close()


def _put(store: ChunkStore, *numbers: int) -> None:
    for number in numbers:
        store.put(_entry(number))
        store.make_room(keep=_key(number))


def test_what_is_expected_may_be_missing_or_known(make_store: Callable[..., ChunkStore]) -> None:
    _put(make_store(), 1)
    store = make_store()
    store.expect([_key(1), _key(2)])
    entry = store.load(_key(1))
    store.expect([_key(1)])
    assert entry is not None
    assert store.load(_key(2)) is None


@pytest.mark.parametrize("method", ["fusionrag", "reuse"])
def test_a_request_expects_the_files_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    chunks = documents(4)
    with tiny_engine(cache_dir=tmp_path, host_bytes=0) as engine:
        records = engine.precompute(chunks, neighbours=ring(4)).records
        expected: list[str] = []
        disk = engine.library.store.disk
        assert disk is not None
        monkeypatch.setattr(disk, "expect", expected.append)
        engine.prefill(Request("Who?", chunks, method=method, recompute_ratio=0.0))
        wanted = [record.enriched_key if method == "fusionrag" else record.key for record in records]
        assert expected == wanted[1:]


def test_heat_counts_uses_and_forgets_them() -> None:
    often = None
    for _ in range(8):
        often = heated(often, 1e9)
    once_later = heated(None, 1e9 + 2 * HALF_LIFE_S)
    once_much_later = heated(None, 1e9 + 4 * HALF_LIFE_S)
    assert often is not None
    assert heated(None, 1e9) < once_later < often < once_much_later


def test_memory_drops_the_coldest_first() -> None:
    heat = HeatMap()
    tier = MemoryTier("host", 3 * ROWS, torch.device("cpu"), heat)
    for number in (1, 2, 3):
        heat.use([_key(number)])
        assert tier.put(_entry(number))
    heat.use([_key(1), _key(1), _key(3)])
    heat.use([_key(4), _key(4), _key(4)])
    tier.put(_entry(4))
    assert set(tier.keys()) == {_key(1), _key(3), _key(4)}
    assert tier.num_bytes == 3 * ROWS
    assert tier.counts.num_demoted == 1


def test_what_is_pinned_stays_and_goes_when_it_is_unpinned(make_store: Callable[..., ChunkStore]) -> None:
    store = make_store(host=1)
    with store.pinned([_key(1), _key(2)]):
        _put(store, 1, 2)
        store.load(_key(1))
        store.load(_key(2))
        assert set(store.host.keys()) == {_key(1), _key(2)}, "above the budget, while they are in use"
    assert len(store.host) == 1
    store.pin([_key(1)])
    store.pin([_key(1)])
    store.unpin([_key(1)])
    store.load(_key(1))
    store.load(_key(2))
    assert store.host.keys() == [_key(1)]


def test_a_pinned_file_is_not_demoted(make_store: Callable[..., ChunkStore]) -> None:
    store = make_store(disk_bytes=1)
    with store.pinned([_key(1)]):
        _put(store, 1, 2)
        assert store.disk is not None
        assert store.disk.has(_key(1))
    _put(store, 3)
    assert [store.disk.has(_key(number)) for number in (1, 2, 3)] == [False, False, True]


def test_an_entry_goes_up_when_it_is_used(make_store: Callable[..., ChunkStore]) -> None:
    _put(make_store(), 1)
    store = make_store(device=torch.device("cpu"), device_bytes=2 * ROWS)
    assert store.device is not None
    found = [store.load(_key(1)) for _ in range(3)]
    for entry in found:
        assert entry is not None
        assert torch.equal(entry.keys, _entry(1).keys)
    assert _key(1) in store.device
    stats = store.stats()
    assert (stats["disk"]["num_hits"], stats["host"]["num_hits"], stats["device"]["num_hits"]) == (1, 1, 1)
    assert (stats["disk"]["num_promoted"], stats["host"]["num_promoted"]) == (1, 1)
    assert stats["disk"]["num_entries"] == 1
    assert stats["disk"]["num_bytes"] == stats["disk"]["bytes_read"]


def test_above_the_disk_budget_the_coldest_move_to_the_remote_tier_and_come_back(
    make_store: Callable[..., ChunkStore], url: str
) -> None:
    size = make_store().put(_entry(1))
    store = make_store(host=0, has_remote=True, disk_bytes=2 * size)
    _put(store, 1, 2)
    store.load(_key(1))
    _put(store, 3)
    assert store.disk is not None
    assert store.remote is not None
    assert [store.disk.has(_key(number)) for number in (1, 2, 3)] == [True, False, True]
    assert [key for key, _ in store.remote.list()] == [_key(2)]
    assert store.stats()["disk"]["num_demoted"] == 1
    found = store.load(_key(2))
    assert found is not None
    assert torch.equal(found.keys, _entry(2).keys)
    assert store.disk.has(_key(2)), "promoted by use"
    store.remove(_key(2))
    assert not store.has(_key(2))
    assert list(store.remote.list()) == []


def test_a_mapped_entry_does_not_change_with_its_file_once_it_is_in_memory(
    make_store: Callable[..., ChunkStore], tmp_path: Path
) -> None:
    _put(make_store(), 1)
    store = make_store()
    assert store.disk is not None
    store.disk.map_above = 0
    entry = store.load(_key(1))
    (path,) = cache_files(tmp_path)
    with open(path, "r+b") as file:  # shortened in place: a map of it would end this process
        file.truncate(10)
    assert entry is not None
    assert torch.equal(entry.keys, _entry(1).keys)


def test_one_thread_reads_and_others_are_not_held_up(
    make_store: Callable[..., ChunkStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    _put(make_store(), 1, 2)
    store, original = make_store(), DiskTier.read
    has_begun, go = threading.Event(), threading.Event()
    reads = []

    def read(self: DiskTier, key: str) -> Entry | None:
        reads.append(key)
        if key == _key(1):
            has_begun.set()
            assert go.wait(20), "the other key waits for this one"
        return original(self, key)

    monkeypatch.setattr(DiskTier, "read", read)

    def load_other() -> Entry | None:
        assert has_begun.wait(20)
        entry = store.load(_key(2))  # while the other key is being read
        go.set()
        return entry

    entries = in_threads([lambda: store.load(_key(1)), lambda: store.load(_key(1)), load_other], timeout=40)
    assert all(entry is not None for entry in entries)
    assert sorted(reads) == [_key(1), _key(2)]


@pytest.mark.parametrize("number", [1, 2])
def test_objects_are_compressed_where_that_pays(url: str, number: int) -> None:
    tier = RemoteTier(url)
    entry = _entry(number)
    noise = Entry(entry.key, entry.token_ids, 3, torch.randn(2, 2, 8, 4), torch.randn(2, 2, 8, 4))
    stored = entry if number == 1 else noise
    size = tier.write(stored)
    assert (size < stored.num_bytes) == (number == 1)
    found = tier.read(entry.key)
    assert found is not None
    assert torch.equal(found.keys, stored.keys)


def test_caches_in_a_remote_directory(tmp_path: Path, url: str, make_engine: MakeEngine) -> None:
    settings: dict[str, Any] = {"cache_dir": url, "catalog_dir": tmp_path}
    engine = make_engine(**settings)
    engine.precompute(documents(COUNT), neighbours=ring(COUNT))
    again = make_engine(**settings)
    ours = again.prefill(Request("Who?", documents(COUNT)))
    assert ours.stats.chunk_status == ["prefix", "enriched", "enriched", "enriched"]
    assert again.stats()["tiers"]["remote"]["num_hits"] == COUNT
    assert again.verify() == []
    assert again.gc() == 0
    assert again.delete(["doc-1"]) > 0
    assert again.precompute(documents(COUNT), neighbours=ring(COUNT)).num_plain_computed == 1
    request = Request("Who?", documents(COUNT), recompute_ratio=1.0)
    assert_same(again.prefill(request).logits, full(again, request).logits)
    # On another machine there is no catalog: plain caches are found by their keys all the same.
    elsewhere = make_engine(cache_dir=url, catalog_dir=tmp_path / "elsewhere")
    status = elsewhere.prefill(Request("Who?", documents(COUNT))).stats.chunk_status
    assert status == ["prefix", "plain", "plain", "plain"]
    elsewhere.gc()
    assert make_engine(**settings).verify() == [], "a sweep leaves the objects of other catalogs alone"


@pytest.mark.parametrize("damage", ["vanished", "shortened", "nonsense", "compressed nonsense", "unreachable"])
def test_a_bad_remote_object_is_a_miss(
    tmp_path: Path,
    url: str,
    make_engine: MakeEngine,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    damage: str,
) -> None:
    settings: dict[str, Any] = {"cache_dir": url, "catalog_dir": tmp_path, "host_bytes": 0}
    engine = make_engine(**settings)
    record = engine.precompute(documents(COUNT), neighbours=ring(COUNT)).records[2]
    files = fsspec.filesystem("memory")
    (path,) = [name for name in files.find(url.removeprefix("memory:/")) if str(record.enriched_key) in name]
    data = files.cat_file(path)
    if damage == "vanished":
        files.rm_file(path)
    elif damage == "unreachable":
        original = type(files).cat_file

        def cat_file(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
            if str(record.enriched_key) in name:
                raise RuntimeError("no route to host")
            return original(self, name, *args, **kwargs)

        monkeypatch.setattr(type(files), "cat_file", cat_file)
    else:
        bad = {"shortened": data[:-9], "nonsense": b"x" * 500, "compressed nonsense": b"\x28\xb5\x2f\xfd" + b"x" * 90}
        files.pipe_file(path, bad[damage])
    with caplog.at_level(logging.WARNING, "fusionrag"):
        for _ in range(3):
            ours = engine.prefill(Request("Who?", documents(COUNT), recompute_ratio=0.3))
    assert ours.stats.chunk_status == ["prefix", "enriched", "plain", "enriched"]
    assert len([item for item in caplog.records if str(record.enriched_key) in item.getMessage()]) == 1
    request = Request("Who?", documents(COUNT), recompute_ratio=1.0)
    assert_same(engine.prefill(request).logits, full(engine, request).logits)


def test_a_device_tier_changes_no_answer(make_engine: MakeEngine) -> None:
    engine = make_engine(device_bytes=1 << 20)
    engine.precompute(documents(COUNT), neighbours=ring(COUNT))
    answers = [engine.prefill(Request("Who?", documents(COUNT))).logits for _ in range(3)]
    assert torch.equal(answers[0], answers[2])
    assert engine.stats()["tiers"]["device"]["num_hits"] > 0
    engine.delete(["doc-1"])
    assert engine.prefill(Request("Who?", documents(COUNT))).stats.chunk_status[1] == "miss"


def test_a_remote_tier_needs_a_local_one_in_front(tmp_path: Path, make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match=r"remote_dir.*cache_dir"):
        make_engine(remote_dir="memory://x")
    engine = make_engine(cache_dir=tmp_path / "near", remote_dir=f"file://{tmp_path}/far", disk_bytes=0, host_bytes=0)
    engine.precompute(documents(COUNT), neighbours=ring(COUNT))
    assert len(cache_files(tmp_path / "far")) >= 2 * COUNT - 1
    status = engine.prefill(Request("Who?", documents(COUNT))).stats.chunk_status
    assert status == ["prefix", "enriched", "enriched", "enriched"]
    assert engine.verify() == []
