"""From logits to an answer: greedy and sampled tokens, the ends of an answer, and the numbers reported with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch

from fusionrag_engine import Engine, Request
from fusionrag_engine.decode import Sampler
from tests.engine.support import documents, eager_copy, ring, tiny_engine, tiny_model
from tests.tiny_models import ARCHITECTURES, build_model

MakeEngine = Callable[..., Engine]
COUNT = 3


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = tiny_engine()
    engine.precompute(documents(COUNT), neighbours=ring(COUNT))
    yield engine
    engine.close()


def _request(**settings: object) -> Request:
    return Request("Who signs?", documents(COUNT), **{"max_new_tokens": 10, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_is_hugging_faces_own_greedy_search(make_engine: MakeEngine, architecture: str) -> None:
    engine = make_engine(architecture)
    answer = engine.generate(_request(method="full"))
    prompt = engine.layout.prompt(_request()).token_ids
    own = eager_copy(tiny_model(architecture)).generate(
        torch.tensor([prompt]), max_new_tokens=10, do_sample=False, attention_mask=torch.ones(1, len(prompt))
    )
    assert answer.token_ids == own[0, len(prompt) :].tolist()


def test_a_seed_makes_sampling_repeatable(engine: Engine) -> None:
    one, same, other = (engine.generate(_request(temperature=1.5, seed=seed)).token_ids for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_without_a_seed_answers_vary(engine: Engine) -> None:
    answers = {tuple(engine.generate(_request(temperature=3.0, max_new_tokens=6)).token_ids) for _ in range(4)}
    assert len(answers) > 1


def test_sampling_leaves_the_global_random_state_alone(engine: Engine) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    engine.generate(_request(temperature=1.0))
    engine.generate(_request(temperature=1.0, seed=1))
    engine.prefill(_request(selector="random", recompute_ratio=0.5))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("settings", [{"top_p": 1e-9}, {"temperature": 1e-6}, {"temperature": 1e-300}])
def test_sampling_at_its_limits_is_greedy(engine: Engine, settings: dict[str, float]) -> None:
    greedy = engine.generate(_request()).token_ids
    assert engine.generate(_request(**{"temperature": 1.0, "seed": 3, **settings})).token_ids == greedy


def test_a_temperature_too_small_for_a_float_is_greedy(engine: Engine) -> None:
    greedy = engine.generate(_request()).token_ids
    assert engine.generate(_request(temperature=5e-324, seed=3)).token_ids == greedy


def test_samples_follow_the_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    sampler = Sampler(temperature=2.0, top_p=1.0, seed=0)
    counts = Counter(sampler.sample(logits) for _ in range(4000))
    for token, probability in enumerate((logits / 2.0).softmax(0).tolist()):
        assert abs(counts[token] / 4000 - probability) < 0.03


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([0.1, 0.5, 0.05, 0.3, 0.05]).log()
    for top_p, expected in ((0.4, {1}), (0.5, {1}), (0.6, {1, 3}), (0.85, {0, 1, 3}), (1.0, {0, 1, 2, 3, 4})):
        sampler = Sampler(temperature=1.0, top_p=top_p, seed=0)
        assert {sampler.sample(logits) for _ in range(600)} == expected


def test_every_end_token_of_the_generation_config_ends_the_answer(make_engine: MakeEngine) -> None:
    greedy = make_engine().generate(_request(max_new_tokens=8)).token_ids
    for place in (0, 3, 7):
        model = build_model("llama")
        unused = next(token for token in range(5, 300) if token not in greedy)
        model.generation_config.eos_token_id = [unused, greedy[place]]
        answer = make_engine(model=model).generate(_request(max_new_tokens=8))
        first = greedy.index(greedy[place])
        assert answer.token_ids == greedy[: first + 1]
        assert answer.finish_reason == "stop"
        assert answer.stats.num_generated_tokens == first + 1


def test_the_end_tokens_of_config_and_tokenizer_end_the_answer_too(make_engine: MakeEngine) -> None:
    greedy = make_engine().generate(_request(max_new_tokens=6)).token_ids
    model = build_model("llama")
    model.config.eos_token_id = greedy[2]
    model.generation_config.eos_token_id = None
    assert make_engine(model=model).generate(_request()).token_ids == greedy[: greedy.index(greedy[2]) + 1]


def test_the_text_of_an_answer_has_no_end_token(make_engine: MakeEngine) -> None:
    plain = make_engine()
    greedy = plain.generate(_request(max_new_tokens=6))
    model = build_model("llama")
    model.generation_config.eos_token_id = greedy.token_ids[-1]
    engine = make_engine(model=model)
    answer = engine.generate(_request(max_new_tokens=6))
    assert answer.text == engine.tokenizer.decode(answer.token_ids[:-1], skip_special_tokens=True)


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_max_new_tokens_ends_the_answer(engine: Engine, limit: int) -> None:
    answer = engine.generate(_request(max_new_tokens=limit))
    assert len(answer.token_ids) == limit
    assert answer.finish_reason == "length"


def test_the_configs_max_new_tokens_is_the_default(make_engine: MakeEngine) -> None:
    engine = make_engine(max_new_tokens=3)
    assert len(engine.generate(_request(max_new_tokens=None)).token_ids) == 3
    assert len(engine.generate(_request(max_new_tokens=5)).token_ids) == 5


def test_the_text_is_that_of_the_tokens(engine: Engine) -> None:
    answer = engine.generate(_request(max_new_tokens=30))
    assert answer.text == engine.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    assert not answer.text.startswith("Who signs?")  # the prompt is not echoed


def test_the_stats_are_filled(engine: Engine) -> None:
    request = _request(recompute_ratio=0.3)
    stats = engine.generate(request).stats
    assert stats.num_prompt_tokens == len(engine.layout.prompt(request).token_ids)
    assert stats.num_generated_tokens == 10
    assert stats.num_recomputed_tokens > 0
    assert stats.chunk_status == ["prefix", "enriched", "enriched"]
    assert stats.miss_reason == [None, None, None]
    parts = (stats.load_s, stats.assemble_s, stats.select_s, stats.prefill_s)
    assert all(part > 0 for part in parts)
    assert sum(parts) <= stats.ttft_s
    assert stats.decode_s > 0
    assert set(stats.as_dict()) >= {"ttft_s", "chunk_status", "num_reused_tokens"}
    prefill = engine.prefill(request).stats
    assert prefill.num_generated_tokens == 0
    assert prefill.decode_s == 0


def test_full_reuses_nothing(engine: Engine) -> None:
    stats = engine.prefill(_request(method="full")).stats
    assert stats.num_reused_tokens == stats.num_recomputed_tokens == 0
    assert stats.num_computed_tokens == stats.num_prompt_tokens
    assert stats.chunk_status == ["miss"] * COUNT


def test_the_ratio_defaults_to_the_methods_own(make_engine: MakeEngine) -> None:
    engine = make_engine(recompute_ratio=0.4)
    engine.precompute(documents(COUNT), neighbours=ring(COUNT))
    reusable = sum(engine.count_tokens(chunk.text) for chunk in documents(COUNT)[1:])
    assert engine.prefill(_request()).stats.num_recomputed_tokens == round(0.4 * reusable)
    assert engine.prefill(_request(method="reuse")).stats.num_recomputed_tokens == 0
    assert engine.prefill(_request(method="reuse", recompute_ratio=0.2)).stats.num_recomputed_tokens == round(
        0.2 * reusable
    )


def test_the_logits_are_float32_over_the_vocabulary(engine: Engine) -> None:
    done = engine.prefill(_request())
    assert done.logits.dtype == torch.float32
    assert done.logits.shape == (engine.runner.config.vocab_size,)
    assert int(done.logits.argmax()) == engine.generate(_request()).token_ids[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_lower_precision_stays_close_to_full_attention(
    make_engine: MakeEngine, architecture: str, dtype: torch.dtype
) -> None:
    from tests.engine.support import assert_same, full

    model = build_model(architecture).to(dtype)
    engine = make_engine(model=model)
    engine.precompute(documents(COUNT), neighbours=ring(COUNT))
    request = _request(recompute_ratio=1.0)
    tolerance = {torch.bfloat16: 0.1, torch.float16: 0.02}[dtype]
    assert_same(engine.prefill(request).logits, full(engine, request).logits, tolerance)
    assert engine.library.store.host.get(engine.has(documents(1)[0]).key or "").keys.dtype == dtype  # type: ignore[union-attr]
