"""Law 1: at r = 1 every method is Full Attention, whatever was cached, in whatever order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from fusionrag_engine import Engine, Prefill, Request
from fusionrag_engine.selectors import SELECTORS
from tests.engine.support import (
    assert_differs,
    assert_same,
    documents,
    eager_copy,
    forget,
    full,
    own_logits,
    ring,
    tiny_engine,
    tiny_model,
)
from tests.tiny_models import ARCHITECTURES

pytestmark = pytest.mark.usefixtures("poisoned_memory")

STORED = 6
# Positions in the prompt: a number is a stored chunk, "miss" one that was never seen.
PROMPTS = {
    "in ingestion order": [0, 1, 2, 3],
    "in another order": [4, 2, 5, 0, 3, 1],
    "a miss first": ["miss", 3, 1],
    "a miss between": [2, "miss", 0, 4],
    "a miss last": [5, 1, "miss"],
    "only misses": ["miss", "miss"],
    "twice the same": [1, 3, 1, 1],
}
QUESTION = "Who signs the report?"


UNSEEN = [f"Unseen {place}: the pump stops." for place in range(4)]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """One engine an architecture, with enriched caches of `STORED` chunks."""
    engine = tiny_engine(request.param)
    engine.precompute(documents(STORED), neighbours=ring(STORED))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def full_logits(engine: Engine) -> dict[str, Prefill]:
    """Full Attention of each prompt."""
    return {prompt: full(engine, _request("query_guided", "full", prompt)) for prompt in PROMPTS}


def _request(selector: str, method: str, prompt: str, ratio: float | None = 1.0) -> Request:
    stored = documents(STORED)
    chunks = [UNSEEN[place] if name == "miss" else stored[int(name)] for place, name in enumerate(PROMPTS[prompt])]
    return Request(QUESTION, chunks, method=method, selector=selector, recompute_ratio=ratio)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("method", ["fusionrag", "reuse"])
@pytest.mark.parametrize("selector", sorted(SELECTORS))
def test_logits_at_ratio_one_are_those_of_full_attention(
    engine: Engine, full_logits: dict[str, Prefill], selector: str, method: str, prompt: str
) -> None:
    ours, reference = engine.prefill(_request(selector, method, prompt)), full_logits[prompt]
    forget(engine, UNSEEN)
    assert ours.token_ids == reference.token_ids
    expected_misses = [name == "miss" for name in PROMPTS[prompt]]
    assert [status == "miss" for status in ours.stats.chunk_status] == expected_misses
    assert_same(ours.logits, reference.logits)


@pytest.mark.parametrize("method", ["fusionrag", "reuse"])
def test_greedy_tokens_at_ratio_one_are_those_of_full_attention(engine: Engine, method: str) -> None:
    request = replace(_request("query_guided", method, "a miss between"), max_new_tokens=8)
    reference = engine.generate(replace(request, method="full", recompute_ratio=None))
    ours = engine.generate(request)
    forget(engine, UNSEEN)
    assert ours.token_ids == reference.token_ids


def test_reuse_without_recomputation_differs_from_full_attention(engine: Engine) -> None:
    """The control: the comparison above would notice stale rows."""
    request = _request("query_guided", "reuse", "in ingestion order", ratio=0.0)
    assert_differs(engine.prefill(request).logits, full(engine, request).logits)


def test_full_is_hugging_faces_own_eager_forward(engine: Engine) -> None:
    """The prompt is longer than the sliding windows of the tiny models, which count true positions."""
    ours = full(engine, _request("query_guided", "full", "in another order", ratio=None))
    assert len(ours.token_ids) > 150
    assert_same(ours.logits, own_logits(eager_copy(engine.model), ours.token_ids))


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "mistral"])
def test_a_prefill_in_small_pieces_is_the_same(architecture: str) -> None:
    request = _request("query_guided", "fusionrag", "a miss between", ratio=0.4)
    logits = []
    for prefill_tokens in (1024, 5):
        with tiny_engine(architecture, prefill_tokens=prefill_tokens) as engine:
            engine.precompute(documents(STORED), neighbours=ring(STORED))
            logits.append(engine.prefill(request).logits)
            assert_same(engine.prefill(replace(request, recompute_ratio=1.0)).logits, full(engine, request).logits)
    assert_same(logits[1], logits[0])


def test_sliding_windows_of_the_tiny_models_are_shorter_than_their_prompts() -> None:
    """What the tests above rely on."""
    for name in ("mistral", "gemma2", "gemma3"):
        assert tiny_model(name).config.sliding_window < 50
