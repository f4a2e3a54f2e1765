"""Law 2: the first chunk behind the cache prefix `P` is exact; it is never recomputed nor approximated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusionrag_engine import Engine, Request
from fusionrag_engine.selectors import SelectionContext
from tests.engine.support import assert_differs, assert_same, documents, full, ring
from tests.tiny_models import ARCHITECTURES

MakeEngine = Callable[..., Engine]
COUNT = 4


class Watching:
    """A selector that notes what it may choose from."""

    def __init__(self) -> None:
        self.candidates: list[int] = []

    def select(self, context: SelectionContext) -> Tensor:
        self.candidates = context.candidates.tolist()
        return context.candidates[: context.budget]


def _engine(make_engine: MakeEngine, architecture: str = "llama") -> Engine:
    engine = make_engine(architecture)
    engine.precompute(documents(COUNT), neighbours=ring(COUNT))
    return engine


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_chunk_behind_the_prefix_is_full_attention_without_recomputation(
    make_engine: MakeEngine, architecture: str
) -> None:
    engine = _engine(make_engine, architecture)
    for method in ("reuse", "fusionrag"):
        request = Request("Who?", documents(1), method=method, recompute_ratio=0.0)
        ours = engine.prefill(request)
        assert ours.stats.chunk_status == ["prefix"]
        assert ours.stats.num_reused_tokens > engine.count_tokens(documents(1)[0].text)
        assert_same(ours.logits, full(engine, request).logits)


def test_the_first_chunk_is_plain_and_exact_while_later_ones_are_enriched(make_engine: MakeEngine) -> None:
    engine = _engine(make_engine)
    stats = engine.prefill(Request("Who?", documents(COUNT))).stats
    assert stats.chunk_status == ["prefix"] + ["enriched"] * (COUNT - 1)
    stats = engine.prefill(Request("Who?", documents(COUNT), method="reuse")).stats
    assert stats.chunk_status == ["prefix"] + ["plain"] * (COUNT - 1)


@pytest.mark.parametrize("method", ["reuse", "fusionrag"])
def test_the_exact_chunk_is_never_among_the_candidates(make_engine: MakeEngine, method: str) -> None:
    engine, selector = _engine(make_engine), Watching()
    request = Request("Who?", documents(COUNT), method=method, recompute_ratio=0.5, selector=selector)
    engine.prefill(request)
    chunks = engine.layout.prompt(request).chunks
    expected = [position for segment in chunks[1:] for position in range(segment.start, segment.stop)]
    assert selector.candidates == expected


def test_a_missing_chunk_text_and_question_are_never_among_the_candidates(make_engine: MakeEngine) -> None:
    engine, selector = _engine(make_engine), Watching()
    request = Request("Who?", [*documents(2), "Unseen.", *documents(2, first=2)], selector=selector)
    engine.prefill(request)
    chunks = engine.layout.prompt(request).chunks
    expected = [position for index in (1, 3, 4) for position in range(chunks[index].start, chunks[index].stop)]
    assert selector.candidates == expected


@pytest.mark.parametrize("method", ["reuse", "fusionrag"])
def test_at_ratio_one_the_exact_chunk_is_still_reused(make_engine: MakeEngine, method: str) -> None:
    engine = _engine(make_engine)
    stats = engine.prefill(Request("Who?", documents(COUNT), method=method, recompute_ratio=1.0)).stats
    exact = len(engine.layout.prefix_ids) + engine.count_tokens(documents(1)[0].text)
    assert stats.num_reused_tokens == exact
    assert stats.num_recomputed_tokens == sum(engine.count_tokens(chunk.text) for chunk in documents(COUNT)[1:])


@pytest.mark.parametrize("method", ["reuse", "fusionrag"])
def test_behind_another_text_no_chunk_is_exact(make_engine: MakeEngine, method: str) -> None:
    engine, selector = _engine(make_engine), Watching()
    prefix = engine.layout.prefix_text
    for head in ("Other text. ", prefix + "Documents: ", prefix[:-1], "", prefix + " "):
        around = [head, *["\n\n"] * (COUNT - 1), "\n\nQuestion: Who?"]
        request = Request(
            "", documents(COUNT), method=method, text_around=around, selector=selector, recompute_ratio=0.5
        )
        ours = engine.prefill(request)
        assert "prefix" not in ours.stats.chunk_status
        chunks = engine.layout.prompt(request).chunks
        assert selector.candidates == [place for segment in chunks for place in range(segment.start, segment.stop)]
        request = Request("", documents(COUNT), method=method, text_around=around, recompute_ratio=1.0)
        assert_same(engine.prefill(request).logits, full(engine, request).logits)


def test_the_same_chunk_later_in_the_prompt_is_not_exact(make_engine: MakeEngine) -> None:
    engine = _engine(make_engine)
    one, two = documents(2)
    assert engine.prefill(Request("Who?", [one, two, one])).stats.chunk_status == ["prefix", "enriched", "enriched"]
    assert engine.prefill(Request("Who?", ["Unseen.", one])).stats.chunk_status == ["miss", "enriched"]


def test_behind_a_missing_first_chunk_the_second_is_not_exact(make_engine: MakeEngine) -> None:
    """The control: an approximate chunk at r = 0 is not what full attention gives."""
    engine = _engine(make_engine)
    request = Request("Who?", ["Unseen text, the first.", *documents(2)], method="reuse")
    assert_differs(engine.prefill(request).logits, full(engine, request).logits)


@pytest.mark.parametrize("method", ["reuse", "fusionrag"])
def test_rows_of_the_prefix_and_of_the_exact_chunk_are_those_of_full_attention(
    make_engine: MakeEngine, method: str
) -> None:
    """Not only the logits: the rows in the canvas, also when everything that may be is recomputed."""
    engine = _engine(make_engine)
    canvases = []
    original = engine.runner.canvas

    def canvas(capacity: int) -> object:
        canvases.append(original(capacity))
        return canvases[-1]

    engine.runner.canvas = canvas  # type: ignore[method-assign, assignment]
    for settings in ({"method": "full"}, {"method": method, "recompute_ratio": 0.3}):
        engine.prefill(Request("Who?", documents(COUNT), **settings))  # type: ignore[arg-type]
    reference, ours = canvases[0], canvases[-1]
    stop = engine.layout.prompt(Request("Who?", documents(COUNT))).chunks[0].stop
    assert_same(ours.keys[:, :, :stop], reference.keys[:, :, :stop])
    assert_same(ours.values[:, :, :stop], reference.values[:, :, :stop])
    assert not torch.equal(ours.values[:, :, stop:], reference.values[:, :, stop:])
