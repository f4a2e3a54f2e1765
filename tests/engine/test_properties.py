"""Properties of every request: tokens are accounted for, segments are kept, r = 1 is full."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusionrag_engine import Chunk, Engine, Request
from tests.engine.support import SYSTEM, assert_same, full, tiny_engine
from tests.tiny_models import TEXTS, build_tokenizer

PROPERTIES = settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def _cut(text: str, start: int, size: int) -> str:
    return text[start : start + size]


# Sentences cut anywhere, mid-word too; blanks; characters of several tokens; anything at all.
TEXT = st.one_of(
    st.builds(_cut, st.sampled_from(TEXTS), st.integers(0, 30), st.integers(1, 50)),
    st.sampled_from(
        ["", " ", "  \n", "\U0001f642", "\U0001f468\u200d\U0001f469\u200d\U0001f467 caf\u00e9", "s", ". ", "\n\n"]
    ),
    st.text(max_size=12).filter(lambda text: text < "\ud800" or text.isprintable()),
)
# A chunk, and whether it is ingested beforehand. Lists repeat elements now and then: duplicates.
CHUNKS = st.lists(st.tuples(TEXT, st.booleans()), max_size=5).flatmap(
    lambda pairs: st.permutations([*pairs, *pairs[:1]] if len(pairs) == 2 else pairs)
)
RATIO = st.one_of(st.sampled_from([0.0, 0.15, 0.5, 1.0]), st.floats(0, 1))
METHOD = st.sampled_from(["reuse", "fusionrag"])


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = tiny_engine(request.param)
    yield engine
    engine.close()


def _ingest(engine: Engine, pairs: list[tuple[str, bool]]) -> None:
    stored = [Chunk(text) for text, is_stored in pairs if is_stored]
    everything = range(len(stored))
    engine.precompute(stored, neighbours=[[other for other in everything if other != own] for own in everything])


@settings(PROPERTIES, max_examples=30)
@given(pairs=CHUNKS, question=TEXT, ratio=RATIO, method=METHOD)
def test_every_prompt_token_is_accounted_for_once(
    engine: Engine, pairs: list[tuple[str, bool]], question: str, ratio: float, method: str
) -> None:
    _ingest(engine, pairs)
    texts = [text for text, _ in pairs]
    done = engine.prefill(Request(question, texts, method=method, recompute_ratio=ratio))
    stats, lengths = done.stats, [engine.count_tokens(text) for text in texts]
    assert stats.num_prompt_tokens == len(done.token_ids)
    assert stats.num_reused_tokens + stats.num_computed_tokens == stats.num_prompt_tokens
    assert len(stats.chunk_status) == len(stats.miss_reason) == len(texts)

    by_status = {
        status: sum(size for size, own in zip(lengths, stats.chunk_status, strict=True) if own == status)
        for status in ("prefix", "enriched", "plain", "miss")
    }
    reusable = by_status["enriched"] + by_status["plain"]
    assert stats.num_recomputed_tokens == round(ratio * reusable)
    cached = len(engine.layout.prefix_ids) + by_status["prefix"] + reusable
    # Text between chunks is cached where it is part of an exact prefix.
    num_between = max(0, len(texts) - 1) * engine.count_tokens(engine.config.chunk_separator)
    assert 0 <= stats.num_reused_tokens + stats.num_recomputed_tokens - cached <= num_between

    for (_, is_stored), size, status, reason in zip(pairs, lengths, stats.chunk_status, stats.miss_reason, strict=True):
        assert not (is_stored and size and status == "miss")
        assert (status == "miss") == (reason is not None)
        assert method == "fusionrag" or status != "enriched"
    assert done.logits.isfinite().all()


@settings(PROPERTIES, max_examples=20)
@given(pairs=CHUNKS, question=TEXT, method=METHOD)
def test_ratio_one_is_full_attention(engine: Engine, pairs: list[tuple[str, bool]], question: str, method: str) -> None:
    _ingest(engine, pairs)
    request = Request(question, [text for text, _ in pairs], method=method, recompute_ratio=1.0)
    assert_same(engine.prefill(request).logits, full(engine, request).logits)


@settings(PROPERTIES, max_examples=20)
@given(pairs=CHUNKS, around=st.lists(TEXT, min_size=6, max_size=6), method=METHOD, has_prefix=st.booleans())
def test_ratio_one_is_full_attention_within_any_text(
    engine: Engine, pairs: list[tuple[str, bool]], around: list[str], method: str, has_prefix: bool
) -> None:
    _ingest(engine, pairs)
    texts = around[: len(pairs) + 1]
    texts[0] = engine.layout.prefix_text if has_prefix else "Chat: " + texts[0]
    request = Request("", [text for text, _ in pairs], method=method, recompute_ratio=1.0, text_around=texts)
    ours = engine.prefill(request)
    assert ours.stats.num_reused_tokens + ours.stats.num_computed_tokens == len(ours.token_ids)
    assert_same(ours.logits, full(engine, request).logits)
    assert engine.prefill(replace(request, recompute_ratio=0.3)).logits.isfinite().all()


@pytest.fixture(scope="module", params=[(False, True), (True, True), (False, False), (True, False)])
def tokenizing_engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    adds_bos, has_template = request.param
    template = {} if has_template else {"chat_template": None}
    engine = tiny_engine(tokenizer=build_tokenizer(adds_bos=adds_bos, **template))
    yield engine
    engine.close()


@settings(PROPERTIES, max_examples=40)
@given(texts=st.lists(TEXT, max_size=5), question=TEXT)
def test_prompt_ids_are_the_segments_tokenized_apart(
    tokenizing_engine: Engine, texts: list[str], question: str
) -> None:
    engine, tokenizer = tokenizing_engine, tokenizing_engine.tokenizer
    if tokenizer.chat_template:
        head, tail = f"<|start|>system\n{SYSTEM}<|end|>\n<|start|>user\n", "<|end|>\n<|start|>assistant\n"
    else:
        head, tail = f"{SYSTEM}\n\n", "\nAnswer:"
    tail = f"\n\nQuestion: {question}{tail}"
    pieces = [head]
    for index, text in enumerate(texts):
        pieces += [text, "\n\n" if index < len(texts) - 1 else tail]
    if not texts:
        pieces = [head + tail]
    expected = [token for piece in pieces for token in tokenizer(piece, add_special_tokens=False)["input_ids"]]
    adds_bos = tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    assert engine.layout.prompt(Request(question, texts)).token_ids == [tokenizer.bos_token_id] * adds_bos + expected
