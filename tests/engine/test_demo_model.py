"""The laws on a real model: SmolLM2-135M-Instruct, which the demo uses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fusionrag_engine import Engine, EngineConfig, Request
from tests.engine.support import assert_differs, assert_same, full, ring
from tests.tiny_models import TEXTS

QUESTION = "Who signs the report?"


@pytest.fixture(scope="module")
def engine(smollm2_dir: Path) -> Iterator[Engine]:
    torch.set_num_threads(2)
    engine = Engine.from_pretrained(smollm2_dir, config=EngineConfig(dtype="float32", max_new_tokens=6))
    engine.precompute(TEXTS, neighbours=ring(len(TEXTS)))
    yield engine
    engine.close()


def test_ratio_one_is_full_attention(engine: Engine) -> None:
    for method in ("reuse", "fusionrag"):
        request = Request(
            QUESTION, [TEXTS[3], "Unseen: the pump stops.", TEXTS[2], TEXTS[0]], method=method, recompute_ratio=1.0
        )
        assert_same(engine.prefill(request).logits, full(engine, request).logits)
        reference = engine.generate(Request(QUESTION, request.chunks, method="full"))
        assert engine.generate(request).token_ids == reference.token_ids


def test_full_is_hugging_faces_own_forward_and_greedy_search(engine: Engine, smollm2_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    own = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32, attn_implementation="eager")
    request = Request(QUESTION, TEXTS, method="full")
    done = engine.prefill(request)
    ids = torch.tensor([done.token_ids])
    with torch.inference_mode():
        assert_same(done.logits, own(input_ids=ids).logits[0, -1])
        greedy = own.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    assert engine.generate(request).token_ids == greedy[0, ids.shape[1] :].tolist()


def test_the_prompt_is_that_of_the_chat_template(engine: Engine) -> None:
    messages = engine.default_messages("\n\n".join(TEXTS), QUESTION)
    rendered = engine.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert engine.tokenizer.decode(engine.prefill(Request(QUESTION, TEXTS)).token_ids) == rendered


def test_one_chunk_is_exact_without_recomputation(engine: Engine) -> None:
    request = Request(QUESTION, TEXTS[2:3], recompute_ratio=0.0)
    done = engine.prefill(request)
    assert done.stats.chunk_status == ["prefix"]
    assert_same(done.logits, full(engine, request).logits)


def test_each_step_of_the_method_comes_closer_to_full_attention(engine: Engine) -> None:
    """Full reuse, then enrichment, then recomputation: mean KL(full || method) of the first answer token."""
    questions = ("Who signs the report?", "What happens to a leaking valve?")
    order = [TEXTS[4], TEXTS[2], TEXTS[0], TEXTS[1], TEXTS[3]]

    references = {question: full(engine, Request(question, order)).logits.log_softmax(-1) for question in questions}

    def divergence(**settings: object) -> float:
        total = 0.0
        for question, reference in references.items():
            request = Request(question, order, **settings)  # type: ignore[arg-type]
            ours = engine.prefill(request).logits.log_softmax(-1)
            total += float((reference.exp() * (reference - ours)).sum())
        return total / len(questions)

    reuse = divergence(method="reuse")
    recomputed = divergence(method="reuse", recompute_ratio=0.3)
    enriched = divergence(recompute_ratio=0.0)
    both = divergence(recompute_ratio=0.3)
    assert recomputed < reuse
    assert enriched < reuse
    assert both < min(reuse, enriched) / 2


def test_reuse_differs_from_full_attention(engine: Engine) -> None:
    request = Request(QUESTION, TEXTS, method="reuse")
    assert_differs(engine.prefill(request).logits, full(engine, request).logits)


def test_a_stop_string_cuts_a_real_answer(engine: Engine) -> None:
    whole = engine.generate(Request(QUESTION, TEXTS, max_new_tokens=20))
    stop = whole.text.split()[3]
    request = Request(QUESTION, TEXTS, max_new_tokens=20, stop=[stop])
    assert engine.generate(request).text == whole.text[: whole.text.index(stop)]
    assert "".join(delta.text for delta in engine.stream(request)) == whole.text[: whole.text.index(stop)]
    assert whole.text == engine.tokenizer.decode(whole.token_ids, skip_special_tokens=True)


def test_caches_are_found_by_an_engine_made_again(engine: Engine, smollm2_dir: Path, tmp_path: Path) -> None:
    config = EngineConfig(dtype="float32", cache_dir=tmp_path)
    for is_first in (True, False):
        with (
            Engine(engine.model, engine.tokenizer, config)
            if is_first
            else Engine.from_pretrained(smollm2_dir, config=config) as other
        ):
            report = other.precompute(TEXTS[:3], neighbours=ring(3))
            assert report.num_plain_computed == (3 if is_first else 0)
            assert report.num_enriched_computed == (3 if is_first else 0)
