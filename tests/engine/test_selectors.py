"""Selectors: the registry, the rule of query-guided selection against attention weights, and rules of one's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, field

import pytest
import torch
from torch import Tensor

from fusionrag_engine import ConfigError, Engine, EngineConfig, FusionRAGError, Request
from fusionrag_engine.selectors import (
    SELECTORS,
    QueryGuided,
    Random,
    SelectionContext,
    register_selector,
    resolve_selector,
)
from tests.engine.support import assert_same, documents, eager_copy, forget, full, relative_rms, ring, tiny_model

MakeEngine = Callable[..., Engine]
COUNT = 4


@dataclass
class Watching:
    """Notes what it is given and chooses as another selector does."""

    rule: object = field(default_factory=QueryGuided)
    layers: tuple[int, ...] = ()
    context: SelectionContext | None = None
    scores: Tensor | None = None
    chosen: list[int] = field(default_factory=list)

    def select(self, context: SelectionContext) -> Tensor:
        self.context = context
        if self.layers:
            self.scores = context.question_scores(self.layers)
        chosen: Tensor = self.rule.select(context)  # type: ignore[attr-defined]
        self.chosen = sorted(chosen.tolist())
        return chosen


@torch.inference_mode()
def _attention_from_question(architecture: str, token_ids: list[int], question: range) -> Tensor:
    """float `[layers, tokens]`: weights of the model's own eager forward, summed over heads and question rows."""
    output = eager_copy(tiny_model(architecture))(
        input_ids=torch.tensor([token_ids]), output_attentions=True, use_cache=False
    )
    return torch.stack([layer[0][:, list(question)].sum((0, 1)) for layer in output.attentions])


def _exact_engine(make_engine: MakeEngine, architecture: str) -> Engine:
    """An engine in which the prompt `documents(2)` is assembled without any stale row; see test_enrichment."""
    engine = make_engine(architecture, chunk_separator="")
    engine.precompute(documents(2), neighbours=[[], [0]])
    return engine


@pytest.mark.parametrize("layers", [(0,), (3,), (1, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "gemma3", "qwen3", "granite"])
def test_question_scores_are_the_models_own_attention_weights(
    make_engine: MakeEngine, architecture: str, layers: tuple[int, ...]
) -> None:
    """Softmax, grouped heads, soft caps and sliding windows included, where nothing is stale."""
    engine, selector = _exact_engine(make_engine, architecture), Watching(layers=layers)
    request = Request("Who signs the report?", documents(2), recompute_ratio=0.3, selector=selector)
    token_ids = engine.prefill(request).token_ids
    question = engine.layout.prompt(request).segments[-1]
    weights = _attention_from_question(architecture, token_ids, range(question.start, question.stop))
    assert selector.scores is not None
    assert_same(selector.scores, weights[list(layers)].sum(0))


@pytest.mark.parametrize(
    ("layers", "voting"), [("last", [3]), ("late_third", [2, 3]), ("all", [0, 1, 2, 3]), ((1,), [1]), ((0, 2), [0, 2])]
)
def test_query_guided_takes_the_tokens_with_most_attention_from_the_question(
    make_engine: MakeEngine, layers: str | tuple[int, ...], voting: list[int]
) -> None:
    engine, selector = _exact_engine(make_engine, "llama"), Watching(rule=QueryGuided(layers=layers))
    request = Request("Who signs the report?", documents(2), recompute_ratio=0.4, selector=selector)
    token_ids = engine.prefill(request).token_ids
    prompt = engine.layout.prompt(request)
    question, chunk = prompt.segments[-1], prompt.chunks[1]
    weights = _attention_from_question("llama", token_ids, range(question.start, question.stop))[voting].sum(0)
    order = sorted(range(chunk.start, chunk.stop), key=lambda position: -float(weights[position]))
    assert selector.chosen == sorted(order[: round(0.4 * len(chunk))])


def test_scores_leave_missing_chunks_out_of_sight(make_engine: MakeEngine) -> None:
    """A chunk without rows gets no score, and the others share the whole attention."""
    engine, selector = make_engine(), Watching(layers=(3,))
    engine.precompute(documents(COUNT), neighbours=ring(COUNT))
    chunks = [documents(COUNT)[0], "Unseen, in between.", *documents(COUNT)[1:]]
    request = Request("Who signs?", chunks, recompute_ratio=0.3, selector=selector)
    engine.prefill(request)
    prompt = engine.layout.prompt(request)
    missing, question = prompt.chunks[1], prompt.segments[-1]
    assert selector.scores is not None
    assert selector.scores.isfinite().all()
    assert (selector.scores[missing.start : missing.stop] == 0).all()
    num_heads = tiny_model().config.num_attention_heads
    assert float(selector.scores.sum()) == pytest.approx(num_heads * len(question), rel=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_the_scoring_pass_leaves_no_trace(make_engine: MakeEngine, architecture: str) -> None:
    """Scoring writes scratch rows; the answer must be that of a rule which chooses the same tokens without looking."""

    @dataclass(frozen=True)
    class Given:
        positions: tuple[int, ...]

        def select(self, context: SelectionContext) -> Tensor:
            return torch.tensor(self.positions)

    engine, watching = make_engine(architecture), Watching()
    engine.precompute(documents(COUNT), neighbours=ring(COUNT))
    for chunks in (documents(COUNT), [documents(1)[0], "Unseen.", *documents(COUNT)[2:]]):
        for question in ("Who signs?", ""):
            logits = []
            for selector in (watching, None):
                chosen = selector or Given(tuple(watching.chosen))
                request = Request(question, chunks, recompute_ratio=0.3, selector=chosen)
                logits.append(engine.prefill(request).logits)
                forget(engine, ["Unseen."])
            assert_same(logits[0], logits[1], 1e-6)


def test_a_prompt_that_ends_with_a_chunk_is_scored_by_its_last_token(make_engine: MakeEngine) -> None:
    engine, selector = make_engine(), Watching(layers=(3,))
    engine.precompute(documents(COUNT), neighbours=ring(COUNT))
    around = ["Other head. ", *["\n"] * (COUNT - 1), ""]
    request = Request("", documents(COUNT), text_around=around, recompute_ratio=0.3, selector=selector)
    assert engine.prefill(request).logits.isfinite().all()
    assert selector.scores is not None
    assert float(selector.scores.sum()) == pytest.approx(tiny_model().config.num_attention_heads, rel=1e-4)


def test_more_recomputation_comes_closer_to_full_attention(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.precompute(documents(6))
    request = Request("Who signs the report?", documents(6))
    reference = full(engine, request).logits
    distance = [
        relative_rms(engine.prefill(Request(request.question, request.chunks, recompute_ratio=ratio)).logits, reference)
        for ratio in (0.0, 0.9, 1.0)
    ]
    assert distance[0] > distance[1] > distance[2]


@pytest.mark.parametrize("name", sorted(SELECTORS))
@pytest.mark.parametrize("ratio", [0.01, 0.15, 0.5, 0.99])
def test_every_registered_selector_chooses_its_budget_among_the_candidates(
    make_engine: MakeEngine, name: str, ratio: float
) -> None:
    engine, selector = make_engine(), Watching(rule=SELECTORS[name])
    engine.precompute(documents(COUNT), neighbours=ring(COUNT))
    stats = engine.prefill(Request("Who?", documents(COUNT), recompute_ratio=ratio, selector=selector)).stats
    if selector.context is None:  # the budget rounds to nothing
        assert stats.num_recomputed_tokens == 0
        return
    candidates = selector.context.candidates.tolist()
    assert candidates == sorted(candidates)
    assert (
        selector.context.budget == len(selector.chosen) == stats.num_recomputed_tokens == round(ratio * len(candidates))
    )
    assert set(selector.chosen) <= set(candidates)
    assert selector.context.num_layers == 4


@pytest.mark.parametrize("name", sorted(SELECTORS))
def test_registered_selectors_are_frozen_and_repeatable(make_engine: MakeEngine, name: str) -> None:
    engine = make_engine()
    engine.precompute(documents(COUNT), neighbours=ring(COUNT))
    request = Request("Who?", documents(COUNT), recompute_ratio=0.3, selector=name)
    assert torch.equal(engine.prefill(request).logits, engine.prefill(request).logits)
    with pytest.raises(FrozenInstanceError):
        SELECTORS[name].anything = 1  # type: ignore[attr-defined]


def test_random_seeds_choose_differently() -> None:
    context = SelectionContext(torch.arange(10, 50), 8, 4, lambda _layers: torch.zeros(60))
    one, same, other = (sorted(Random(seed).select(context).tolist()) for seed in (0, 0, 1))
    assert one == same
    assert one != other


def test_a_selector_is_chosen_by_request_then_by_config(make_engine: MakeEngine) -> None:
    default, own = Watching(), Watching()
    register_selector("watching-default", default)
    try:
        engine = make_engine(selector="watching-default")
        engine.precompute(documents(COUNT), neighbours=ring(COUNT))
        engine.prefill(Request("Who?", documents(COUNT)))
        assert default.context is not None
        default.context = None
        engine.prefill(Request("Who?", documents(COUNT), selector=own))
        assert own.context is not None
        assert default.context is None
        engine.prefill(Request("Who?", documents(COUNT), selector="watching-default"))
        assert default.context is not None
    finally:
        del SELECTORS["watching-default"]


def test_unknown_names_are_errors_that_list_the_choices(make_engine: MakeEngine) -> None:
    for call in (
        lambda: resolve_selector("best"),
        lambda: make_engine(selector="best"),
        lambda: make_engine().prefill(Request("Who?", [], selector="best")),
    ):
        with pytest.raises(ConfigError, match=r"'best'.*'query_guided'.*'random'"):
            call()


def test_bad_layers_are_errors(make_engine: MakeEngine) -> None:
    for layers in ("first", "", ()):
        with pytest.raises(ConfigError, match="layers"):
            QueryGuided(layers=layers)
    engine = make_engine()
    engine.precompute(documents(COUNT), neighbours=ring(COUNT))
    for layers in ((4,), (-1,), (0, 99)):
        with pytest.raises(ConfigError, match="layers 0 to 3"):
            engine.prefill(Request("Who?", documents(COUNT), selector=QueryGuided(layers=layers)))


BAD_RULES: dict[str, Callable[[SelectionContext], Tensor]] = {
    "outside the candidates": lambda context: torch.arange(context.budget),
    "too few": lambda context: context.candidates[: context.budget - 1],
    "too many": lambda context: context.candidates[: context.budget + 1],
    "twice the same": lambda context: context.candidates[:1].repeat(context.budget),
}


@pytest.mark.parametrize("rule", BAD_RULES)
def test_a_rule_of_ones_own_that_breaks_the_contract_is_a_named_error(make_engine: MakeEngine, rule: str) -> None:
    """A caller's mistake, so raised, not asserted: it must hold under `python -O` too."""

    @dataclass(frozen=True)
    class Bad:
        def select(self, context: SelectionContext) -> Tensor:
            return BAD_RULES[rule](context)

    engine = make_engine()
    engine.precompute(documents(COUNT), neighbours=ring(COUNT))
    with pytest.raises(FusionRAGError):
        engine.prefill(Request("Who?", documents(COUNT), recompute_ratio=0.3, selector=Bad()))


def test_the_default_selector_is_query_guided() -> None:
    assert EngineConfig().selector == "query_guided"
    assert QueryGuided() == SELECTORS["query_guided"]
