"""Inputs at the edge of what makes sense: each has a defined answer or a named error."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fusionrag_engine import (
    CacheMissError,
    Chunk,
    ContextOverflowError,
    Engine,
    EngineClosedError,
    FusionRAGError,
    Request,
)
from tests.engine.support import SYSTEM, assert_differs, assert_same, documents, full, ring, settle, tiny_model
from tests.tiny_models import SIZES, build_model

pytestmark = pytest.mark.usefixtures("poisoned_memory")

MakeEngine = Callable[..., Engine]
METHODS = ["full", "reuse", "fusionrag"]


def _small_context(num_tokens: int) -> object:
    from transformers import AutoModelForCausalLM, LlamaConfig

    return AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, "max_position_embeddings": num_tokens})).eval()


@pytest.mark.parametrize("method", METHODS)
def test_no_chunks_is_an_ordinary_prompt(make_engine: MakeEngine, method: str) -> None:
    engine = make_engine()
    request = Request("Who signs?", [], method=method)
    ours = engine.prefill(request)
    assert_same(ours.logits, full(engine, request).logits)
    assert ours.stats.chunk_status == []
    assert engine.generate(request).stats.num_generated_tokens > 0


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("method", METHODS)
def test_an_empty_question_is_answered(make_engine: MakeEngine, method: str, ratio: float) -> None:
    engine = make_engine()
    engine.precompute(documents(4), neighbours=ring(4))
    request = Request("", documents(4), method=method, recompute_ratio=ratio)
    assert engine.prefill(request).logits.isfinite().all()
    assert engine.generate(request).stats.num_generated_tokens > 0


def test_a_question_equal_to_a_chunk_is_still_computed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    chunks = documents(3)
    engine.precompute(chunks, neighbours=ring(3))
    request = Request(chunks[1].text, chunks)
    ours = engine.prefill(request)
    question_tokens = engine.count_tokens(chunks[1].text)
    assert ours.stats.num_computed_tokens > question_tokens
    assert_same(
        engine.prefill(Request(chunks[1].text, chunks[1:2])).logits,
        full(engine, Request(chunks[1].text, chunks[1:2])).logits,
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "   \n\n ",
        "\t",
        "\U0001f642",
        "\U0001f642\U0001f642 \U0001f468\u200d\U0001f469\u200d\U0001f467",
        "\u00e9",
        "a",
        "\x00",
        "\ufffd",
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_strange_chunk_text_keeps_the_prompt_exact(make_engine: MakeEngine, text: str, place: int) -> None:
    engine = make_engine()
    chunks = documents(2)
    chunks.insert(place, Chunk(text, id="strange"))
    report = engine.precompute(chunks, neighbours=ring(3))
    assert [record.kind == "none" for record in report.records] == [chunk.text == "" for chunk in chunks]
    for ratio in (0.0, 0.5):
        assert engine.prefill(Request("Who?", chunks, recompute_ratio=ratio)).logits.isfinite().all()
    ours = engine.prefill(Request("Who?", chunks, recompute_ratio=1.0))
    assert "miss" not in ours.stats.chunk_status
    assert_same(ours.logits, full(engine, Request("Who?", chunks)).logits)


def test_an_empty_chunk_is_skipped_at_ingestion_with_a_reason(make_engine: MakeEngine) -> None:
    report = make_engine().precompute(["", "One."])
    assert report.num_skipped == 1
    assert report.records[0].kind == "none"
    assert report.records[0].reason == "the chunk has no tokens"
    assert report.records[1].kind == "plain"
    assert "1 skipped" in report.summary()


def test_a_chunk_longer_than_the_context_is_skipped_at_ingestion_with_a_reason(make_engine: MakeEngine) -> None:
    engine = make_engine(model=_small_context(200))
    report = engine.precompute([Chunk("harbour " * 300, id="long"), Chunk("One.", id="short")], neighbours=[[1], [0]])
    long, short = report.records
    assert long.kind == "none"
    assert "tokens" in (long.reason or "")
    assert "fit" in (long.reason or "")
    assert short.kind == "plain"  # its only neighbour has no cache
    assert report.num_skipped == 1


def test_the_longest_chunk_that_fits_is_stored_and_used(make_engine: MakeEngine) -> None:
    engine = make_engine(model=_small_context(120))
    room = 120 - len(engine.layout.prefix_ids)
    fits, is_too_long = "Z" * (room - 1), "Z" * room
    assert engine.count_tokens(fits) == room - 1
    report = engine.precompute([fits, is_too_long])
    assert [record.kind for record in report.records] == ["plain", "none"]
    around = [engine.layout.prefix_text, "?"]
    request = Request("", [fits], text_around=around)
    ours = engine.prefill(request)
    assert ours.stats.chunk_status == ["prefix"]
    assert_same(ours.logits, full(engine, request).logits)


@pytest.mark.parametrize("method", METHODS)
def test_context_overflow_names_its_numbers(make_engine: MakeEngine, method: str) -> None:
    engine = make_engine(model=_small_context(150))
    request = Request("Who?", documents(9), method=method)
    num_tokens = len(engine.layout.prompt(request).token_ids)
    for call in (engine.prefill, engine.generate, lambda request: list(engine.stream(request))):
        with pytest.raises(ContextOverflowError, match=rf"{num_tokens} tokens.*9 chunks.*150") as caught:
            call(request)
        assert isinstance(caught.value, RuntimeError)


def test_a_prompt_that_fills_the_context_gets_one_token(make_engine: MakeEngine) -> None:
    probe = make_engine()
    request = Request("Who?", documents(3), max_new_tokens=5)
    num_tokens = len(probe.layout.prompt(request).token_ids)
    answer = make_engine(model=_small_context(num_tokens)).generate(request)
    assert len(answer.token_ids) == 1
    answer = make_engine(model=_small_context(num_tokens + 2)).generate(request)
    assert len(answer.token_ids) <= 3
    with pytest.raises(ContextOverflowError):
        make_engine(model=_small_context(num_tokens - 1)).generate(request)


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("method", ["reuse", "fusionrag"])
@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_a_prompt_cached_to_its_end_still_gives_the_logits_of_its_last_token(
    make_engine: MakeEngine, num_chunks: int, method: str, ratio: float
) -> None:
    """Text ends with the last chunk and all chunks are cached: there is nothing left to compute but the last token."""
    engine = make_engine()
    chunks = documents(num_chunks)
    engine.precompute(documents(4), neighbours=ring(4))
    around = [engine.layout.prefix_text, *[""] * num_chunks]
    request = Request("", chunks, method=method, recompute_ratio=ratio, text_around=around)
    ours = engine.prefill(request)
    reference = full(engine, request)
    assert ours.stats.chunk_status[0] == "prefix"
    assert ours.stats.num_computed_tokens >= 1
    assert ours.logits.isfinite().all()
    if num_chunks == 1 or ratio == 1.0:
        assert_same(ours.logits, reference.logits)
    assert engine.generate(request).stats.num_generated_tokens > 0


def test_a_prompt_without_any_token_is_a_named_error(make_engine: MakeEngine) -> None:
    """A tokenizer without a BOS and a request without any text."""
    engine = make_engine()
    for request in (Request("", [], text_around=[""]), Request("", [""], text_around=["", ""])):
        with pytest.raises(FusionRAGError):
            engine.prefill(request)


@pytest.mark.parametrize("method", METHODS)
def test_a_request_prefix_shorter_than_the_cache_prefix(make_engine: MakeEngine, method: str) -> None:
    """The request shares only a part of `P`; where its chunk goes on as `P` does, rows must still be right."""
    engine = make_engine()
    rest_of_prefix = engine.layout.prefix_text[10:]
    chunks = [Chunk(rest_of_prefix), *documents(2)]
    engine.precompute(chunks)
    request = Request(
        "", chunks, method=method, recompute_ratio=1.0, text_around=[engine.layout.prefix_text[:10], "\n", "\n", "?"]
    )
    assert_same(engine.prefill(request).logits, full(engine, request).logits)


@pytest.mark.parametrize("method", ["reuse", "fusionrag"])
def test_duplicate_chunks_in_one_request(make_engine: MakeEngine, method: str) -> None:
    engine = make_engine()
    one, two = documents(2)
    engine.precompute([one, two], neighbours=[[1], [0]])
    request = Request("Who?", [one, two, one, one], method=method, recompute_ratio=1.0)
    ours = engine.prefill(request)
    assert ours.stats.chunk_status[0] == "prefix"
    assert_same(ours.logits, full(engine, request).logits)


def test_a_miss_that_may_not_be_stored_is_computed_and_forgotten(make_engine: MakeEngine) -> None:
    engine = make_engine()
    passing = Chunk("An answer to a sub-question.", id="doc-0", can_store=False)
    engine.precompute(documents(1))
    request = Request("Who signs?", [*documents(2), passing], recompute_ratio=1.0)
    for _ in range(2):
        found = engine.prefill(request)
        assert found.stats.chunk_status[2] == "miss"
        settle(engine)
    assert_same(found.logits, full(engine, request).logits)
    assert engine.has(passing).key is None
    assert engine.has(documents(2)[1]).key is not None, "the other miss is stored"
    assert engine.has(documents(1)[0]).key is not None, "and what its id names stays"


def test_counts_of_each_chunk_add_up(make_engine: MakeEngine) -> None:
    engine = make_engine()
    chunks = documents(4)
    engine.precompute(chunks[:3])
    stats = engine.prefill(Request("Who signs?", chunks, recompute_ratio=0.4)).stats
    assert stats.chunk_tokens == [engine.count_tokens(chunk.text) for chunk in chunks]
    assert sum(stats.chunk_recomputed) == stats.num_recomputed_tokens > 0
    assert stats.chunk_recomputed[0] == stats.chunk_recomputed[3] == 0, "an exact prefix and a miss"
    assert all(count <= length for count, length in zip(stats.chunk_recomputed, stats.chunk_tokens, strict=True))


def test_duplicate_misses_in_one_request_are_stored_once(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.prefill(Request("Who?", ["Same text.", "Same text.", "Same text."]))
    settle(engine)
    assert engine.stats()["num_chunks"] == 1
    assert engine.prefill(Request("Who?", ["Same text.", "Other.", "Same text."])).stats.chunk_status == [
        "prefix",
        "miss",
        "plain",
    ]


def test_duplicate_chunks_in_one_ingestion_are_computed_once(make_engine: MakeEngine) -> None:
    engine = make_engine()
    one, two = documents(2)
    again = Chunk(one.text, id="again")
    report = engine.precompute([one, two, again, one], neighbours=[[1], [0], [1], [1]])
    assert report.num_chunks == 4
    assert report.num_duplicates == 2
    assert report.num_plain_computed == 2
    assert report.num_enriched_computed == 2
    assert report.records[0].key == report.records[2].key == report.records[3].key
    assert report.records[0].enriched_key == report.records[2].enriched_key
    assert engine.stats()["num_chunks"] == 2


def test_ingesting_nothing_does_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for arguments in ({}, {"neighbours": []}, {"embeddings": []}):
        report = engine.precompute([], **arguments)
        assert report.num_chunks == 0
        assert report.num_computed == 0
        assert report.records == []


def test_on_miss_error_names_the_chunk(make_engine: MakeEngine) -> None:
    engine = make_engine(on_miss="error")
    known = documents(1)
    engine.precompute(known)
    with pytest.raises(CacheMissError, match=r"chunk 1 \(id='lost', scope='x'\)"):
        engine.prefill(Request("Who?", [*known, Chunk("Unknown.", id="lost", scope="x")]))
    assert engine.prefill(Request("Who?", known)).stats.chunk_status == ["prefix"]
    assert engine.prefill(Request("Who?", ["Unknown."], method="full")).logits.isfinite().all()


def test_a_closed_engine_says_so(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.close()
    engine.close()
    calls = [
        lambda: engine.generate(Request("Who?", [])),
        lambda: engine.prefill(Request("Who?", [])),
        lambda: engine.stream(Request("Who?", [])),
        lambda: engine.generate_many([Request("Who?", [])]),
        lambda: engine.precompute(["One."]),
        lambda: engine.has("One."),
        lambda: engine.delete(["doc"]),
        lambda: engine.prefetch(["One."]),
        engine.gc,
        engine.verify,
        engine.stats,
    ]
    for call in calls:
        with pytest.raises(EngineClosedError, match="closed"):
            call()


def test_an_empty_system_prompt_works(make_engine: MakeEngine) -> None:
    engine = make_engine(system_prompt="")
    assert "system" not in engine.layout.prefix_text
    chunks = documents(3)
    engine.precompute(chunks, neighbours=ring(3))
    request = Request("Who?", chunks, recompute_ratio=1.0)
    assert_same(engine.prefill(request).logits, full(engine, request).logits)


def test_a_model_outside_the_engine_still_answers_as_before() -> None:
    """The registered attention steps aside where the engine is not involved, padding and generation included."""
    import torch

    from fusionrag_engine import EngineConfig
    from tests.engine.support import tiny_tokenizer

    for architecture in ("llama", "gemma2", "mistral"):
        model = build_model(architecture)
        ids = torch.randint(5, 300, (2, 70), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(ids)
        mask[0, :9] = 0
        arguments = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
        before = model.generate(**arguments)
        with Engine(model, tiny_tokenizer(), EngineConfig(system_prompt=SYSTEM)) as engine:
            engine.prefill(Request("Who?", documents(2)))
        assert torch.equal(model.generate(**arguments), before)


def test_the_tiny_models_see_the_order_of_chunks(make_engine: MakeEngine) -> None:
    """A control of everything above: prompts that differ only in the order of chunks have different logits."""
    assert tiny_model() is tiny_model()
    engine = make_engine()
    one = full(engine, Request("Who?", documents(3)))
    other = full(engine, Request("Who?", documents(3)[::-1]))
    assert_differs(one.logits, other.logits)
