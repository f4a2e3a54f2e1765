"""Alternative Path: the longest exact prefix is taken, and only what is exact ever enters it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fusionrag_engine import Chunk, Engine, Request
from tests.engine.support import assert_differs, assert_same, documents, forget, full, ring, settle

MakeEngine = Callable[..., Engine]
HISTORY = "A long conversation before. " * 30


def _behind(history: str, chunks: list[Chunk], question: str = "Who signs?") -> Request:
    return Request(question, chunks, text_around=[history, *["\n"] * (len(chunks) - 1), "\n" + question])


def _settled(engine: Engine, request: Request) -> list[str]:
    status = engine.prefill(request).stats.chunk_status
    settle(engine)
    return list(status)


def test_a_prompt_computed_once_is_an_exact_prefix_for_the_next(make_engine: MakeEngine) -> None:
    engine, chunks = make_engine(), documents(4)
    assert _settled(engine, Request("Who?", chunks[:3])) == ["miss"] * 3
    # The first three exactly as computed; the fourth was never seen.
    again = engine.prefill(Request("Who else?", chunks, recompute_ratio=0.0))
    assert again.stats.chunk_status == ["prefix", "prefix", "prefix", "miss"]
    assert_same(again.logits, full(engine, Request("Who else?", chunks)).logits)


def test_behind_another_chunk_a_chunk_falls_back_to_its_own_cache(make_engine: MakeEngine) -> None:
    engine, (one, two, three) = make_engine(), documents(3)
    _settled(engine, Request("Who?", [one, two, three]))
    assert _settled(engine, Request("Who?", [one, three, two])) == ["prefix", "plain", "plain"]
    assert _settled(engine, Request("Who?", [two, three])) == ["prefix", "plain"]
    assert _settled(engine, Request("Who?", [one, two, documents(9)[8]])) == ["prefix", "prefix", "miss"]


def test_approximate_rows_never_become_a_prefix(make_engine: MakeEngine) -> None:
    """Of a request over enriched caches nothing behind its first chunk is exact, whatever was recomputed."""
    engine, chunks = make_engine(), documents(4)
    engine.precompute(chunks, neighbours=ring(4))
    for ratio in (0.0, 0.5, 1.0):
        for method in ("fusionrag", "reuse"):
            request = Request("Who?", [*chunks, "Unseen."], method=method, recompute_ratio=ratio)
            engine.prefill(request)
            forget(engine, ["Unseen."])
    assert engine.stats()["prefix_index"]["num_entries"] == 0
    request = Request("Who?", chunks, recompute_ratio=0.0)
    assert engine.prefill(request).stats.chunk_status == ["prefix", "enriched", "enriched", "enriched"]
    assert_differs(engine.prefill(request).logits, full(engine, request).logits, 1e-3)


def test_rows_in_front_of_the_first_approximate_one_are_exact(make_engine: MakeEngine) -> None:
    engine, (one, two, three) = make_engine(), documents(3)
    engine.precompute([three])
    assert _settled(engine, Request("Who?", [one, two, three])) == ["miss", "miss", "plain"]
    request = Request("Who?", [one, two])
    ours = engine.prefill(request)
    assert ours.stats.chunk_status == ["prefix", "prefix"]
    assert_same(ours.logits, full(engine, request).logits)
    assert _settled(engine, Request("Who?", [one, two, three])) == ["prefix", "prefix", "plain"]


def test_full_attention_neither_uses_nor_feeds_the_index(make_engine: MakeEngine) -> None:
    """It is the reference that everything else is compared with."""
    engine, chunks = make_engine(), documents(3)
    full(engine, Request("Who?", chunks))
    assert engine.stats()["prefix_index"]["num_entries"] == 0
    _settled(engine, Request("Who?", chunks))
    done = full(engine, Request("Who?", chunks))
    assert done.stats.num_reused_tokens == 0


def test_a_repeated_history_is_computed_once(make_engine: MakeEngine) -> None:
    engine, chunks = make_engine(), documents(2)
    engine.precompute(chunks, neighbours=ring(2, 1))
    first = engine.prefill(_behind(HISTORY, chunks))
    second = engine.prefill(_behind(HISTORY, chunks, "Another question?"))
    history = len(engine.layout.tokenize_prefix(HISTORY))
    assert first.stats.num_computed_tokens - second.stats.num_computed_tokens > history - 40
    assert second.stats.chunk_status == ["enriched", "enriched"]
    reference = make_engine()
    reference.precompute(chunks, neighbours=ring(2, 1))
    assert_same(second.logits, reference.prefill(_behind(HISTORY, chunks, "Another question?")).logits)


def test_a_history_that_grew_shares_its_beginning(make_engine: MakeEngine) -> None:
    engine, chunks = make_engine(), documents(2)
    engine.precompute(chunks, neighbours=ring(2, 1))
    engine.prefill(_behind(HISTORY, chunks))
    longer = _behind(HISTORY + "And then a further turn. " * 9, chunks)
    before = engine.stats()["prefix_index"]["num_hits"]
    assert engine.prefill(longer).stats.num_reused_tokens > 128
    assert engine.stats()["prefix_index"]["num_hits"] > before
    other = _behind("Quite another beginning. " + HISTORY, chunks)
    assert engine.prefill(other).stats.num_reused_tokens < 128


def test_another_scope_shares_no_prefix(make_engine: MakeEngine) -> None:
    """Not even the same chat history: whether somebody had it before would show in the time."""
    engine = make_engine()
    for scope in ("a", "b"):
        engine.precompute(documents(2, scope=scope))
    engine.prefill(_behind(HISTORY, documents(2, scope="a")))
    other = engine.prefill(_behind(HISTORY, documents(2, scope="b"))).stats
    mixed = engine.prefill(_behind(HISTORY, [*documents(1, scope="a"), *documents(1, scope="b")])).stats
    again = engine.prefill(_behind(HISTORY, documents(2, scope="a"))).stats
    assert again.num_reused_tokens > 128 + other.num_reused_tokens
    assert other.num_computed_tokens == mixed.num_computed_tokens


@pytest.mark.parametrize("is_own", [True, False])
def test_deleting_a_chunk_drops_every_path_over_it(tmp_path: Path, make_engine: MakeEngine, is_own: bool) -> None:
    """In the engine that deletes, and in one that only shares the store."""
    engine, other = make_engine(cache_dir=tmp_path), make_engine(cache_dir=tmp_path)
    chunks = documents(3)
    _settled(engine, Request("Who?", chunks))
    assert _settled(engine, Request("Who?", chunks)) == ["prefix"] * 3
    (engine if is_own else other).delete(["doc-1"])
    assert engine.prefill(Request("Who?", chunks)).stats.chunk_status == ["prefix", "miss", "plain"]


def test_the_index_stays_within_a_quarter_of_host_memory(make_engine: MakeEngine) -> None:
    budget = 400_000
    engine = make_engine(host_bytes=budget)
    for start in range(0, 24, 4):
        _settled(engine, Request("Who?", documents(4, first=start)))
        stats = engine.stats()
        assert stats["prefix_index"]["num_bytes"] <= budget // 4
        assert stats["prefix_index"]["num_bytes"] + stats["host_bytes"] <= budget
    assert stats["prefix_index"]["num_entries"] > 0
    request = Request("Who?", documents(24), recompute_ratio=1.0)
    assert_same(engine.prefill(request).logits, full(engine, request).logits)


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_exact_rows_go_through_no_codec(make_engine: MakeEngine, codec: str) -> None:
    engine, chunks = make_engine(codec=codec), documents(3)
    _settled(engine, Request("Who?", chunks))
    ours = engine.prefill(Request("Who?", chunks, recompute_ratio=0.0))
    assert ours.stats.chunk_status == ["prefix"] * 3
    assert_same(ours.logits, full(engine, Request("Who?", chunks)).logits)
