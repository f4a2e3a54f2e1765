"""Law 3: a bad, missing or foreign cache file is a miss with a warning; never a wrong row, never a crash."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from fusionrag_engine import Chunk, Engine, Request
from fusionrag_engine.store import CorruptEntryError, DiskTier, Entry
from tests.engine.support import assert_differs, assert_same, cache_file, documents, full, ring, settle, tiny_engine

MakeEngine = Callable[..., Engine]
COUNT = 4
VICTIM = 2
"""Index of the chunk whose file is damaged; it stands in the middle of the prompt."""
QUESTION = "Who signs the report?"


def _flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(bytes(data))


def _header_size(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def _tensor_place(path: Path, name: str) -> int:
    """Offset of a byte in the middle of one tensor."""
    import json

    data = path.read_bytes()
    header = json.loads(data[8 : _header_size(path)])
    start, stop = header[name]["data_offsets"]
    return _header_size(path) + (start + stop) // 2


def _truncate(path: Path, size: int) -> None:
    with open(path, "r+b") as file:
        file.truncate(size)


def _replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "something").write_text("in the way")


def _replace_by_endless_link(path: Path) -> None:
    """Unreadable for every user, the superuser included."""
    path.unlink()
    path.symlink_to(path)


def _save_foreign(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None) -> None:
    path.write_bytes(safetensors.torch.save(tensors, metadata=metadata))


def _keep_metadata(path: Path) -> dict[str, str]:
    with safetensors.safe_open(path, "pt") as file:
        return dict(file.metadata())


DAMAGES: dict[str, Callable[[Path], None]] = {
    "byte flipped in the keys": lambda path: _flip(path, _tensor_place(path, "keys")),
    "byte flipped in the values": lambda path: _flip(path, _tensor_place(path, "values")),
    "byte flipped in the token ids": lambda path: _flip(path, _tensor_place(path, "token_ids")),
    "last byte flipped": lambda path: _flip(path, -1),
    "header length garbled": lambda path: _flip(path, 6),
    "truncated to nothing": lambda path: _truncate(path, 0),
    "truncated in the length": lambda path: _truncate(path, 5),
    "truncated behind the length": lambda path: _truncate(path, 8),
    "truncated in the header": lambda path: _truncate(path, _header_size(path) // 2),
    "truncated behind the header": lambda path: _truncate(path, _header_size(path)),
    "truncated in a tensor": lambda path: _truncate(path, (_header_size(path) + path.stat().st_size) // 2),
    "truncated by one byte": lambda path: _truncate(path, path.stat().st_size - 1),
    "grown by one byte": lambda path: path.write_bytes(path.read_bytes() + b"x") and None,
    "zeros of the same size": lambda path: path.write_bytes(bytes(path.stat().st_size)) and None,
    "garbage of the same size": lambda path: path.write_bytes(random.Random(0).randbytes(path.stat().st_size)) and None,
    "text": lambda path: path.write_text("this is not a cache") and None,
    "foreign safetensors": lambda path: _save_foreign(path, {"weight": torch.ones(3, 4)}, None),
    "foreign safetensors with metadata": lambda path: _save_foreign(path, {"w": torch.ones(3)}, {"format": "pt"}),
    "our header on foreign tensors": lambda path: _save_foreign(path, {"keys": torch.ones(3)}, _keep_metadata(path)),
    "a directory": _replace_by_directory,
    "unreadable": _replace_by_endless_link,
    "vanished": lambda path: path.unlink(),
}


def _ingested(directory: Path) -> tuple[str, str]:
    """Store `COUNT` enriched chunks; the keys of the victim's plain and enriched cache."""
    with tiny_engine(cache_dir=directory) as engine:
        record = engine.precompute(documents(COUNT), neighbours=ring(COUNT)).records[VICTIM]
    assert record.key is not None
    assert record.enriched_key is not None
    return record.key, record.enriched_key


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    directory = tmp_path_factory.mktemp("pristine")
    return directory, *_ingested(directory)


@pytest.fixture
def damaged(pristine: tuple[Path, str, str], tmp_path: Path) -> Callable[[str, str], tuple[Path, Path]]:
    """`(kind, damage)` -> a copy of the store with that cache of the victim damaged, and the file's path."""

    def make(kind: str, damage: str) -> tuple[Path, Path]:
        original, plain_key, enriched_key = pristine
        directory = tmp_path / "store"
        shutil.copytree(original, directory)
        key = plain_key if kind == "plain" else enriched_key
        (path,) = directory.rglob(f"{key}.safetensors")
        DAMAGES[damage](path)
        return directory, path

    return make


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    """What fresh engines compute that never had the damaged cache."""
    results = {}
    others = [chunk for index, chunk in enumerate(documents(COUNT)) if index != VICTIM]
    with tiny_engine() as engine:
        engine.precompute(others)
        results["plain"] = engine.prefill(_request("reuse")).logits
    with tiny_engine() as engine:
        lists = ring(COUNT)
        lists[VICTIM] = []
        engine.precompute(documents(COUNT), neighbours=lists)
        results["enriched"] = engine.prefill(_request("fusionrag")).logits
    with tiny_engine() as engine:
        engine.precompute(documents(COUNT), neighbours=ring(COUNT))
        results["reuse"] = engine.prefill(_request("reuse")).logits
        results["fusionrag"] = engine.prefill(_request("fusionrag")).logits
        results["full"] = full(engine, _request("reuse")).logits
    return results


def _request(method: str, ratio: float = 0.25) -> Request:
    return Request(QUESTION, documents(COUNT), method=method, recompute_ratio=ratio)


def test_the_expectations_differ_from_each_other(expected: dict[str, Tensor]) -> None:
    """The control: an answer from a bad file or from the wrong fallback would be noticed."""
    names = list(expected)
    for index, name in enumerate(names):
        for other in names[index + 1 :]:
            assert_differs(expected[name], expected[other], 1e-3)


@pytest.mark.parametrize("kind", ["plain", "enriched"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_the_answer_is_what_an_engine_without_that_file_gives(
    damaged: Callable[[str, str], tuple[Path, Path]],
    expected: dict[str, Tensor],
    make_engine: MakeEngine,
    caplog: pytest.LogCaptureFixture,
    damage: str,
    kind: str,
) -> None:
    directory, path = damaged(kind, damage)
    method = {"plain": "reuse", "enriched": "fusionrag"}[kind]
    engine = make_engine(cache_dir=directory)
    with caplog.at_level(logging.WARNING, "fusionrag"):
        ours = engine.prefill(_request(method))
        settle(engine)
    assert_same(ours.logits, expected[kind])
    # Without its enriched cache a chunk falls back to its plain one; without that, it is computed.
    assert ours.stats.chunk_status[VICTIM] == {"plain": "miss", "enriched": "plain"}[kind]
    assert any(path.stem in record.getMessage() for record in caplog.records), "no warning names the file"
    assert_same(engine.prefill(_request(method, 1.0)).logits, expected["full"])

    caplog.clear()
    report = engine.precompute(documents(COUNT), neighbours=ring(COUNT))
    assert [record.kind for record in report.records] == ["enriched"] * COUNT
    again = make_engine(cache_dir=directory)
    repaired = again.prefill(_request(method))
    assert "miss" not in repaired.stats.chunk_status
    assert_same(repaired.logits, expected[method])
    assert again.verify() == []
    assert not caplog.records, "the ingestion must have repaired the store"
    again.gc()
    assert not list(directory.rglob("*.corrupt"))


@pytest.mark.parametrize("kind", ["plain", "enriched"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_an_ingestion_over_a_damaged_store_neither_crashes_nor_uses_the_file(
    damaged: Callable[[str, str], tuple[Path, Path]],
    expected: dict[str, Tensor],
    make_engine: MakeEngine,
    damage: str,
    kind: str,
) -> None:
    directory, _ = damaged(kind, damage)
    engine = make_engine(cache_dir=directory)
    engine.precompute(documents(COUNT), neighbours=ring(COUNT))
    for method in ("reuse", "fusionrag"):
        ours = engine.prefill(_request(method))
        reference = expected[method]
        if ours.stats.chunk_status[VICTIM] != {"reuse": "plain", "fusionrag": "enriched"}[method]:
            reference = expected[kind]  # damage that only a reader can see is found here
        assert_same(ours.logits, reference)


@pytest.mark.parametrize("damage", ["byte flipped in the keys", "truncated in a tensor", "a directory", "vanished"])
def test_a_damaged_neighbour_is_computed_again_for_enrichment(
    damaged: Callable[[str, str], tuple[Path, Path]], make_engine: MakeEngine, damage: str
) -> None:
    directory, _ = damaged("plain", damage)
    new = Chunk("A new chunk, enriched with the damaged one.", id="new")
    names = [documents(COUNT)[VICTIM].id, documents(COUNT)[0].id]
    request = Request(QUESTION, [*documents(1), new])
    logits = []
    for engine in (make_engine(cache_dir=directory), make_engine()):
        if engine.config.cache_dir is None:
            engine.precompute(documents(COUNT), neighbours=ring(COUNT))
        assert engine.precompute([new], neighbours=[names]).records[0].kind == "enriched"
        logits.append(engine.prefill(request).logits)
    assert_same(logits[0], logits[1])


@pytest.mark.parametrize("kind", ["plain", "enriched"])
def test_a_file_that_vanishes_between_lookup_and_load_is_a_miss(
    pristine: tuple[Path, str, str],
    tmp_path: Path,
    expected: dict[str, Tensor],
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    directory = shutil.copytree(pristine[0], tmp_path / "store")
    victim = pristine[1] if kind == "plain" else pristine[2]
    engine = make_engine(cache_dir=directory)
    original, lost = DiskTier.read, []

    def read(self: DiskTier, key: str) -> Entry | None:
        if key == victim and not lost:
            lost.append(key)
            self.path(key).unlink()
        return original(self, key)

    monkeypatch.setattr(DiskTier, "read", read)
    ours = engine.prefill(_request("reuse" if kind == "plain" else "fusionrag"))
    assert lost
    assert_same(ours.logits, expected[kind])


def test_no_byte_of_a_file_can_change_without_notice(tmp_path: Path) -> None:
    """Header and contents alike: with a bit flipped the file is refused, or what it says is the same."""
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 2, 3, 4, generator=generator)
    entry = Entry("ab" * 32, (5, 6, 7), 23, keys, values)
    tier = DiskTier(tmp_path)
    tier.write(entry)
    path = tier.path(entry.key)
    pristine = path.read_bytes()
    for place in range(len(pristine)):
        for bit in (0, 1, 4, 5):
            data = bytearray(pristine)
            data[place] ^= 1 << bit
            path.write_bytes(bytes(data))
            try:
                found = tier.read(entry.key)
            except CorruptEntryError:
                continue
            assert found is not None
            same = (found.key, found.token_ids, found.start) == (entry.key, entry.token_ids, entry.start)
            same = same and torch.equal(found.keys, entry.keys) and torch.equal(found.values, entry.values)
            assert same, f"bit {bit} of byte {place} changed the entry (start {entry.start} -> {found.start})"


def test_every_truncation_of_a_file_is_noticed(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path)
    keys, values = torch.randn(2, 2, 2, 3, 4)
    entry = Entry("cd" * 32, (5, 6, 7), 23, keys, values)
    tier.write(entry)
    path = tier.path(entry.key)
    pristine = path.read_bytes()
    for size in range(len(pristine)):
        path.write_bytes(pristine[:size])
        assert not tier.has(entry.key)
        with pytest.raises(CorruptEntryError):
            tier.read(entry.key)


def test_a_file_of_another_key_is_a_miss(
    damaged: Callable[[str, str], tuple[Path, Path]], expected: dict[str, Tensor], make_engine: MakeEngine
) -> None:
    """A backup restored under wrong names: whole files, of other chunks."""
    directory, path = damaged("plain", "vanished")
    other = next(file for file in directory.rglob("*.safetensors") if file != path)
    shutil.copy(other, path)
    ours = make_engine(cache_dir=directory).prefill(_request("reuse"))
    assert_same(ours.logits, expected["plain"])


def test_a_file_of_the_same_chunk_but_another_kind_is_a_miss(
    pristine: tuple[Path, str, str], tmp_path: Path, expected: dict[str, Tensor], make_engine: MakeEngine
) -> None:
    """Its enriched rows under the name of its plain ones: the tokens are the same, only the key tells."""
    directory = shutil.copytree(pristine[0], tmp_path / "store")
    plain, enriched = (next(directory.rglob(f"{key}.safetensors")) for key in pristine[1:])
    shutil.copy(enriched, plain)
    ours = make_engine(cache_dir=directory).prefill(_request("reuse"))
    assert_same(ours.logits, expected["plain"])


def test_verify_names_every_bad_file_and_gc_removes_them(
    damaged: Callable[[str, str], tuple[Path, Path]], make_engine: MakeEngine
) -> None:
    for damage in ("byte flipped in the keys", "a directory"):
        directory, path = damaged("enriched", damage)
        engine = make_engine(cache_dir=directory)
        problems = engine.verify()
        assert len(problems) == 1
        assert path.stem in problems[0]
        engine.gc()
        assert not list(directory.rglob("*.corrupt"))
        shutil.rmtree(directory)


def test_a_bad_file_beside_a_good_one_in_memory_does_no_harm(
    damaged: Callable[[str, str], tuple[Path, Path]],
    expected: dict[str, Tensor],
    make_engine: MakeEngine,
    tmp_path: Path,
) -> None:
    engine = make_engine(cache_dir=tmp_path / "live")
    record = engine.precompute(documents(COUNT), neighbours=ring(COUNT)).records[VICTIM]
    path = cache_file(engine, record.enriched_key)
    _flip(path, _tensor_place(path, "keys"))
    assert_same(engine.prefill(_request("fusionrag")).logits, expected["fusionrag"])
    assert len(engine.verify()) == 1
    assert_same(engine.prefill(_request("fusionrag")).logits, expected["enriched"])
