"""Answers do not depend on what unwritten memory holds: canvases start as NaN, and nothing shows it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusionrag_engine import Engine, Request
from tests.engine.support import documents, forget, ring, tiny_engine

COUNT = 4
UNSEEN = "Unseen, in between."


def _requests(engine: Engine) -> list[Request]:
    chunks = documents(COUNT)
    with_miss = [chunks[0], UNSEEN, *chunks[1:]]
    around = [engine.layout.prefix_text, "", "\n", "", " end"]
    return [
        Request("Who?", chunks, method="full"),
        Request("Who?", chunks, method="reuse"),
        Request("Who?", chunks, recompute_ratio=0.3),
        Request("Who?", with_miss, recompute_ratio=0.3),
        Request("Who?", with_miss, recompute_ratio=0.3, selector="random"),
        Request("", chunks[::-1], recompute_ratio=0.5),
        Request("", chunks, recompute_ratio=0.3, text_around=around),
        Request("", chunks, recompute_ratio=0.3, text_around=["Head. ", *around[1:-1], "?"]),
        Request("Who?", [], method="reuse"),
    ]


def _answers(architecture: str) -> list[tuple[list[int], Tensor]]:
    answers = []
    with tiny_engine(architecture, prefill_tokens=37) as engine:
        engine.precompute(documents(COUNT), neighbours=ring(COUNT))
        for request in _requests(engine):
            logits = engine.prefill(request).logits
            forget(engine, [UNSEEN])
            tokens = engine.generate(request).token_ids
            forget(engine, [UNSEEN])
            answers.append((tokens, logits))
    return answers


def test_the_poison_works(poisoned_memory: None) -> None:
    assert torch.empty(3).isnan().all()
    assert torch.ones(2).new_empty(3).isnan().all()
    assert torch.empty_like(torch.ones(2)).isnan().all()


@pytest.mark.parametrize("architecture", ["llama", "mistral", "phi3", "gemma3"])
def test_answers_are_the_same_over_poisoned_memory(architecture: str, request: pytest.FixtureRequest) -> None:
    clean = _answers(architecture)
    request.getfixturevalue("poisoned_memory")
    poisoned = _answers(architecture)
    for (tokens, logits), (expected_tokens, expected_logits) in zip(poisoned, clean, strict=True):
        assert tokens == expected_tokens
        assert torch.equal(logits, expected_logits)


def test_stored_caches_hold_no_unwritten_row(poisoned_memory: None, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine("gemma3")
    for record in engine.precompute(documents(COUNT), neighbours=ring(COUNT)).records:
        for key in (record.key, record.enriched_key):
            entry = engine.library.store.host.get(key or "")
            assert entry is not None
            assert entry.keys.isfinite().all()
            assert entry.values.isfinite().all()
