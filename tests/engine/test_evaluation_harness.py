"""The harness on a tiny model: ratio 1 is full, figures are what they say, runs resume."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fusionrag_engine import Chunk, ConfigError, ContextOverflowError, Engine, Request
from fusionrag_engine.evaluation import Example, Plan, harness, precompute, run
from fusionrag_engine.evaluation.trial import answer, compare, histograms
from fusionrag_engine.layout import Segment
from tests.engine.support import documents, eager_copy, ring, tiny_model

MakeEngine = Callable[..., Engine]
COUNT = 4
GOLD = "the shift lead"


def examples(count: int = 3) -> list[Example]:
    return [Example(f"Who signs note {i}?", [GOLD], documents(COUNT, first=i)) for i in range(count)]


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    engine = make_engine(embed=lambda texts: np.random.default_rng(len(texts)).normal(size=(len(texts), 8)), top_n=2)
    assert "enriched computed" in precompute(engine, examples())
    return engine


@pytest.mark.parametrize("method", ["full", "reuse"])
def test_score_is_the_models_own_log_probability(make_engine: MakeEngine, method: str) -> None:
    """Against the eager forward of the whole text; `reuse` at ratio 1 computes the same prompt from caches."""
    engine = make_engine()
    engine.precompute(documents(COUNT), neighbours=ring(COUNT))
    request = Request("Who?", documents(COUNT), method=method, recompute_ratio=None if method == "full" else 1.0)
    scores = engine.score(request, GOLD)
    prompt, gold = engine.prefill(request).token_ids, engine.layout.tokenize(GOLD)
    assert len(scores) == len(gold) > 2
    with torch.inference_mode():
        logits = eager_copy(tiny_model())(input_ids=torch.tensor([prompt + gold])).logits[0].float()
    expected = logits.log_softmax(-1)[range(len(prompt) - 1, len(prompt) + len(gold) - 1), gold]
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)


def test_what_cannot_be_scored_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(ConfigError, match="no tokens"):
        engine.score(Request("Who?", [], method="full"), "")
    with pytest.raises(ContextOverflowError, match="4096"):
        engine.score(Request("Who?", [], method="full"), "x " * 5000)


def test_ratio_one_is_full_and_ratio_zero_is_not(engine: Engine) -> None:
    plan = Plan(selectors=("query_guided", "random"), ratios=(0.0, 0.3, 1.0), max_new_tokens=6)
    rows = run(engine, examples(), plan, dataset="d")
    assert [(row["method"], row["selector"], row["ratio"]) for row in rows] == list(plan.configurations())
    assert len(rows) == 1 + 2 * (1 + 2 * 2)
    for row in rows:
        assert row["n"] == 3
        assert row["num_missed_chunks"] == 0
        assert all(low <= row[name] <= high for name in harness.METRICS for low, high in [row[f"{name}_ci"]])
        if row["ratio"] == 1:
            assert row["kl"] == pytest.approx(0, abs=1e-6)
            assert row["agreement_f1"] == row["top1"] == row["identical_answers"] == 1
            assert max(row["kv_deviation"]) < 1e-4
        else:
            assert row["kl"] > 1e-4
            assert max(row["kv_deviation"]) > 1e-2
        if row["ratio"] == 0.3:
            assert sum(row["chosen_in_chunk"]) == sum(row["chosen_in_prompt"]) > 0
            assert row["true_budget"] * 3 == 4 * sum(row["chosen_in_chunk"])  # four layers, three questions
        else:
            assert row["chosen_in_chunk"] is None


def test_one_trial_agrees_with_the_public_calls(engine: Engine) -> None:
    (example,) = examples(1)
    request = Request(example.question, example.chunks, recompute_ratio=0.3, max_new_tokens=6)
    ours = answer(engine, request, GOLD)
    full = answer(engine, Request(example.question, example.chunks, method="full", max_new_tokens=6), GOLD)
    assert ours.token_ids == engine.generate(request).token_ids
    assert ours.gold_logprob == pytest.approx(float(engine.score(request, GOLD).mean()), abs=1e-5)
    trial = compare(engine, example, full, ours, "fusionrag")
    assert trial.num_recomputed_tokens == engine.prefill(request).stats.num_recomputed_tokens
    assert trial.text == ours.text
    assert math.isfinite(trial.kl)


def test_histograms_count_tenths_of_the_chunk_and_of_the_prompt() -> None:
    chunks = [Segment(5, 25, 0), Segment(30, 40, 1)]
    in_chunk, in_prompt = histograms(chunks, torch.tensor([5, 24, 30, 39]))
    assert in_chunk == [2, 0, 0, 0, 0, 0, 0, 0, 0, 2]
    assert in_prompt == [1, 0, 0, 0, 0, 0, 2, 0, 0, 1]


def test_the_subset_full_answers(engine: Engine) -> None:
    """The gold of one question is what full says there; nobody says the gold of the other."""
    (first, second) = examples(2)
    said = engine.generate(Request(first.question, first.chunks, method="full", max_new_tokens=6)).text
    questions = [Example(first.question, [said], first.chunks), Example(second.question, ["zzz"], second.chunks)]
    (row,) = run(engine, questions, Plan(methods=("full",), max_new_tokens=6), dataset="d")
    assert (row["contains"], row["em"]) == (0.5, 0.5)
    assert row["full_answers"]["n"] == 1
    assert row["full_answers"]["em"] == 1


def test_an_interrupted_run_goes_on(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, journal = Plan(methods=("reuse",), ratios=(0.0, 0.3), max_new_tokens=4), tmp_path / "r.jsonl"
    done: list[str] = []
    original = harness.measure

    def measure(engine: Engine, example: Example, plan: Plan) -> dict[str, dict[str, object]]:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(example.question)
        return original(engine, example, plan)

    monkeypatch.setattr(harness, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        run(engine, examples(), plan, dataset="d", journal=journal)
    with journal.open("a") as file:
        file.write('\n{"run": "cut o')
    done.clear()
    rows = run(engine, examples(), plan, dataset="d", journal=journal)
    assert done == [examples()[2].question]
    assert [row["n"] for row in rows] == [3, 3]
    done.clear()
    assert run(engine, examples(2), plan, dataset="d", journal=journal)[0]["n"] == 2
    assert not done, "fewer of the same questions are all there"
    other = Plan(methods=("reuse",), ratios=(0.0,), max_new_tokens=4)
    run(engine, examples(1), other, dataset="d", journal=journal)
    assert len(done) == 1, "another plan starts anew"


def test_a_chunk_without_a_cache_shows_in_the_row(engine: Engine) -> None:
    unknown = [Example("Who?", [GOLD], [*documents(2), Chunk("Never seen before.")])]
    (row,) = run(engine, unknown, Plan(methods=("reuse",), ratios=(0.0,), max_new_tokens=2), dataset="d")
    assert row["num_missed_chunks"] == 1


@pytest.mark.parametrize(
    "settings", [{"methods": ("fast",)}, {"selectors": ("best",)}, {"ratios": (1.5,)}, {"ratios": ()}]
)
def test_a_plan_names_what_is_not_accepted(settings: dict[str, tuple[str, ...]]) -> None:
    with pytest.raises(ConfigError):
        Plan(**settings)  # type: ignore[arg-type]
