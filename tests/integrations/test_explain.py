"""`explain`: the table of what the cache did, for whatever carries an engine's counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fusionrag_engine import Chunk, Engine, FusionRAGError, Request
from fusionrag_integrations.explain import NOT_EXACT, call_info, explain
from tests.integrations.support import QUESTION, TEXTS


@pytest.fixture
def generation(engine: Engine) -> Any:
    """Three chunks: the first an exact prefix, the second a plain cache, the third a miss."""
    engine.precompute([Chunk(text, id=f"c-{number}") for number, text in enumerate(TEXTS[:2])])
    chunks = [Chunk(text, id=f"c-{number}") for number, text in enumerate(TEXTS[:3])]
    return engine.generate(Request(QUESTION, chunks, recompute_ratio=0.3))


def test_rows_add_up_to_the_engines_counts(engine: Engine, generation: Any) -> None:
    prefix, plain, miss = explain(generation).rows
    sizes = [engine.count_tokens(text) for text in TEXTS[:3]]
    assert (prefix.status, prefix.num_tokens, prefix.num_reused, prefix.num_recomputed) == ("prefix", *sizes[:1] * 2, 0)
    assert (plain.status, plain.num_tokens) == ("plain", sizes[1])
    assert plain.num_recomputed == generation.stats.num_recomputed_tokens == round(0.3 * sizes[1])
    assert plain.num_reused == sizes[1] - plain.num_recomputed
    assert (miss.status, miss.num_tokens, miss.num_reused, miss.num_recomputed) == ("miss", sizes[2], 0, 0)
    assert miss.reason
    assert prefix.reason is plain.reason is None


def test_the_table_is_for_people(generation: Any) -> None:
    table = str(explain(call_info(generation.stats, ["one", "two", None])))
    head, rule, one, two, three, totals = table.splitlines()
    assert head.split() == ["chunk", "status", "tokens", "reused", "recomputed", "reason"]
    assert set(rule) == {"-", " "}
    assert one.split()[:2] == ["one", "prefix"]
    assert two.split()[:2] == ["two", "plain"]
    assert three.split()[:2] == ["-", "miss"]
    assert "no cache of this text" in three
    for number in (generation.stats.num_prompt_tokens, generation.stats.num_reused_tokens):
        assert str(number) in totals
    assert f"first token after {generation.stats.ttft_s:.3f} s" in totals
    assert all(name in totals for name in ("load", "place", "select", "prefill", "decode"))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda info: info,
        lambda info: {"fusionrag": info},
        lambda info: SimpleNamespace(metadata={"fusionrag": info}),
        lambda info: SimpleNamespace(response_metadata={"fusionrag": info}),
        lambda info: SimpleNamespace(message=SimpleNamespace(response_metadata={"fusionrag": info})),
        lambda info: SimpleNamespace(raw={"fusionrag": info}, message=SimpleNamespace(content="text")),
        lambda info: SimpleNamespace(
            metadata=None, sources=[SimpleNamespace(raw_output=SimpleNamespace(metadata={"fusionrag": info}))]
        ),
        lambda info: SimpleNamespace(metadata={"fusionrag": {"stats": info, "calls": [info], "nodes": []}}),
    ],
)
def test_counts_are_found_where_adapters_keep_them(generation: Any, wrap: Any) -> None:
    found = explain(wrap(call_info(generation.stats, ["one", "two", "three"])))
    assert [row.id for row in found.rows] == ["one", "two", "three"]
    assert [row.status for row in found.rows] == ["prefix", "plain", "miss"]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda one, two: SimpleNamespace(metadata={"sub_qa": [("first?", one), ("second?", two)]}),
        lambda one, two: SimpleNamespace(tool_calls=[SimpleNamespace(tool_output=item) for item in (one, two)]),
        lambda one, two: SimpleNamespace(sources=[SimpleNamespace(raw_output=item) for item in (one, None, two)]),
    ],
)
def test_answers_made_of_several_are_shown_together(generation: Any, wrap: Any) -> None:
    one = SimpleNamespace(metadata={"fusionrag": call_info(generation.stats, ["a", "b", "c"])})
    trace = {"calls": [call_info(generation.stats, ["d", "e", "f"])], "notes": ["mind it"]}
    found = explain(wrap(one, SimpleNamespace(metadata={"fusionrag": trace})))
    assert [(row.call, row.id) for row in found.rows] == [(1, "a"), (1, "b"), (1, "c"), (2, "d"), (2, "e"), (2, "f")]
    assert found.notes == ["mind it"]


def test_several_calls_and_what_was_left_out_are_shown(generation: Any) -> None:
    info = call_info(generation.stats, ["one", "two", "three"])
    trace = {"calls": [info, info], "dropped_nodes": [{"node_id": "long", "reason": "too long"}], "notes": ["mind it"]}
    found = explain(trace)
    assert [row.call for row in found.rows] == [1, 1, 1, 2, 2, 2]
    lines = str(found).splitlines()
    assert lines[0].split()[0] == "call"
    assert [line.split(":")[0] for line in lines if line.startswith("call ")][-2:] == ["call 1", "call 2"]
    assert "left out: long: too long" in lines
    assert "note: mind it" in lines


def test_a_prompt_that_does_not_begin_with_the_prefix_is_noted(engine: Engine, generation: Any) -> None:
    assert explain(generation).notes == []
    elsewhere = Request(QUESTION, TEXTS[:1], text_around=["Notes:\n", QUESTION])
    assert explain(engine.generate(elsewhere)).notes == [NOT_EXACT]
    assert explain(engine.prefill(Request(QUESTION, [], method="full")).stats).notes == []


def test_without_chunks_there_are_only_totals(engine: Engine) -> None:
    lines = str(explain(engine.generate(Request(QUESTION, [])))).splitlines()
    assert lines[0] == "no chunks"
    assert lines[1].startswith("prompt ")


@pytest.mark.parametrize("answer", ["text", None, {}, {"calls": []}, SimpleNamespace(metadata={}, raw=None)])
def test_what_carries_no_counts_is_refused(answer: Any) -> None:
    with pytest.raises(FusionRAGError, match=f"a {type(answer).__name__} without cache statistics.*stream"):
        explain(answer)
