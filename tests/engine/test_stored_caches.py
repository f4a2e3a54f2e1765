"""Law 5: stored caches are immutable, and a chunk's plain cache does not depend on where it was first seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fusionrag_engine import Chunk, Engine, Request
from fusionrag_engine.store import Entry
from tests.engine.support import assert_same, cache_files, contents, documents, ring, settle
from tests.tiny_models import ARCHITECTURES

MakeEngine = Callable[..., Engine]
COUNT = 4


def _entry(engine: Engine, chunk: Chunk) -> Entry:
    entry = engine.library.plain(engine.layout.tokenize(chunk.text), chunk.scope)
    assert entry is not None
    return entry


def _requests(engine: Engine) -> list[Request]:
    """Requests of every kind, several of them over the same chunks."""
    chunks = documents(COUNT)
    around = ["Other head. ", *["\n"] * (COUNT - 1), " tail"]
    return [
        Request("Who?", chunks, method="full"),
        Request("Who?", chunks, method="reuse"),
        Request("Who?", chunks[::-1], method="reuse", recompute_ratio=0.5),
        Request("Who?", chunks),
        Request("Who?", chunks[::-1], recompute_ratio=0.7, selector="random"),
        Request("Who?", chunks, recompute_ratio=1.0),
        Request("Who?", [chunks[1], "Unseen.", chunks[1], chunks[0]], temperature=1.0, seed=3),
        Request("", chunks, text_around=around, recompute_ratio=0.4),
        Request("", chunks, text_around=[engine.layout.prefix_text[:9], *["\n"] * (COUNT - 1), ""]),
    ]


def test_requests_of_every_kind_leave_stored_caches_as_they_are(tmp_path: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(cache_dir=tmp_path)
    engine.precompute(documents(COUNT), neighbours=ring(COUNT))
    files = cache_files(tmp_path)
    assert len(files) == 2 * COUNT
    before = contents(files)
    host = {path.stem: engine.library.store.host.get(path.stem) for path in files}
    copies = {key: (entry.keys.clone(), entry.values.clone()) for key, entry in host.items() if entry is not None}
    assert len(copies) == 2 * COUNT
    for request in _requests(engine):
        engine.generate(request)
        engine.prefill(request)
    settle(engine)
    assert contents(files) == before
    for key, (keys, values) in copies.items():
        entry = engine.library.store.host.get(key)
        assert entry is not None
        assert torch.equal(entry.keys, keys)
        assert torch.equal(entry.values, values)


def test_no_request_changes_the_answer_to_the_next(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.precompute([*documents(COUNT), Chunk("Unseen.")], neighbours=[*ring(COUNT), []])
    requests = _requests(engine)
    before = [engine.prefill(request).logits for request in requests]
    for request in requests:
        engine.generate(request)
    after = [engine.prefill(request).logits for request in reversed(requests)]
    for one, other in zip(before, reversed(after), strict=True):
        assert torch.equal(one, other)


def test_the_rows_of_the_prefix_are_never_written_to(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.precompute(documents(COUNT), neighbours=ring(COUNT))
    prefix = engine._precomputer.prefix()
    keys, values = prefix.keys.clone(), prefix.values.clone()
    for request in _requests(engine):
        engine.generate(request)
    assert engine._precomputer.prefix() is prefix
    assert torch.equal(prefix.keys, keys)
    assert torch.equal(prefix.values, values)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_chunk_first_met_behind_another_gets_the_plain_cache_it_gets_alone(
    make_engine: MakeEngine, architecture: str
) -> None:
    first, second = documents(2)
    alone = make_engine(architecture)
    alone.precompute([second])
    online = make_engine(architecture)
    assert online.prefill(Request("Who?", [first, second])).stats.chunk_status == ["miss", "miss"]
    settle(online)
    ours, reference = _entry(online, second), _entry(alone, second)
    assert ours.start == reference.start
    assert_same(ours.keys, reference.keys, 1e-5)
    assert_same(ours.values, reference.values, 1e-5)


def test_a_plain_cache_is_bit_for_bit_the_same_when_computed_alone(make_engine: MakeEngine) -> None:
    first, second = documents(2)
    reference = make_engine()
    reference.precompute([second])
    online = make_engine()
    online.precompute([first])
    assert online.prefill(Request("Who?", [first, second])).stats.chunk_status == ["prefix", "miss"]
    settle(online)
    ours, expected = _entry(online, second), _entry(reference, second)
    assert torch.equal(ours.keys, expected.keys)
    assert torch.equal(ours.values, expected.values)


def test_a_plain_cache_does_not_depend_on_its_company_in_a_batch(make_engine: MakeEngine) -> None:
    chunks = documents(5)
    together, apart = make_engine(), make_engine(prefill_tokens=1)
    together.precompute(chunks)
    apart.precompute(chunks)
    for chunk in chunks:
        assert_same(_entry(together, chunk).keys, _entry(apart, chunk).keys, 1e-5)
        assert_same(_entry(together, chunk).values, _entry(apart, chunk).values, 1e-5)


@pytest.mark.parametrize("method", ["reuse", "fusionrag"])
@pytest.mark.parametrize("call", ["prefill", "generate"])
def test_a_chunk_met_online_is_a_hit_next_time_wherever_it_stands(
    make_engine: MakeEngine, call: str, method: str
) -> None:
    engine = make_engine()
    one, two, three = documents(3)
    getattr(engine, call)(Request("Who?", [one, two], method=method))
    assert engine.prefill(Request("Why?", [two, three, one], method=method)).stats.chunk_status == [
        "prefix",
        "miss",
        "plain",
    ]
    assert engine.prefill(Request("Why?", [three, two], method=method)).stats.chunk_status == ["prefix", "plain"]


def test_after_a_partial_hit_the_new_chunk_is_stored_too(tmp_path: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(cache_dir=tmp_path)
    engine.precompute(documents(1))
    engine.generate(Request("Who?", documents(3)))
    engine.close()
    again = make_engine(cache_dir=tmp_path)
    assert again.prefill(Request("Who?", documents(3))).stats.chunk_status == ["prefix", "plain", "plain"]


def test_full_attention_stores_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.generate(Request("Who?", documents(2), method="full"))
    settle(engine)
    assert engine.stats()["num_chunks"] == 0
    assert engine.stats()["host_entries"] == 0
