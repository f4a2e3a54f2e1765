"""Prompts: every segment tokenized apart, one BOS at most, the chat template once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fusionrag_engine import Chunk, ConfigError, Engine, Request
from tests.engine.support import SYSTEM, assert_same, documents, full, ring
from tests.tiny_models import CHAT_TEMPLATE, build_tokenizer

MakeEngine = Callable[..., Engine]

TEMPLATES = {
    "no template": None,
    "template": CHAT_TEMPLATE,
    "template with BOS": "{{ bos_token }}" + CHAT_TEMPLATE,
    "template that refuses system": (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHAT_TEMPLATE
    ),
    "template that drops system": CHAT_TEMPLATE.replace(
        "{% for message in messages %}", "{% for message in messages if message['role'] != 'system' %}"
    ),
    "template that trims": CHAT_TEMPLATE.replace("message['content']", "message['content'] | trim"),
}
HEADS = {
    "no template": f"{SYSTEM}\n\n",
    "template": f"<|start|>system\n{SYSTEM}<|end|>\n<|start|>user\n",
    "template with BOS": f"<s><|start|>system\n{SYSTEM}<|end|>\n<|start|>user\n",
    "template that refuses system": f"<|start|>user\n{SYSTEM}\n\n",
    "template that drops system": f"<|start|>user\n{SYSTEM}\n\n",
    "template that trims": f"<|start|>system\n{SYSTEM}<|end|>\n<|start|>user\n",
}
QUESTION = "Who signs the report?"


def _tail(template: str) -> str:
    end = "\nAnswer:" if template == "no template" else "<|end|>\n<|start|>assistant\n"
    return f"\n\nQuestion: {QUESTION}{end}"


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("adds_bos", [False, True])
def test_the_prompt_is_its_segments_with_one_bos_where_the_model_wants_one(
    make_engine: MakeEngine, template: str, adds_bos: bool
) -> None:
    tokenizer = build_tokenizer(adds_bos=adds_bos, chat_template=TEMPLATES[template])
    engine = make_engine(tokenizer=tokenizer)
    chunks = documents(2)
    pieces = [HEADS[template], chunks[0].text, "\n\n", chunks[1].text, _tail(template)]
    expected = [token for piece in pieces for token in tokenizer(piece, add_special_tokens=False)["input_ids"]]
    if adds_bos and expected[0] != tokenizer.bos_token_id:
        expected = [tokenizer.bos_token_id, *expected]
    token_ids = engine.prefill(Request(QUESTION, chunks)).token_ids
    assert token_ids == expected
    assert token_ids.count(tokenizer.bos_token_id) == (1 if adds_bos or "BOS" in template else 0)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("adds_bos", [False, True])
def test_the_first_chunk_is_exact_under_every_template(make_engine: MakeEngine, template: str, adds_bos: bool) -> None:
    engine = make_engine(tokenizer=build_tokenizer(adds_bos=adds_bos, chat_template=TEMPLATES[template]))
    engine.precompute(documents(2))
    request = Request(QUESTION, documents(1), method="reuse")
    ours = engine.prefill(request)
    assert ours.stats.chunk_status == ["prefix"]
    assert_same(ours.logits, full(engine, request).logits)


@pytest.mark.parametrize(
    "text", ["ngineer adds", " leading space", "trailing space ", "\n\nlines\n", "\U0001f642 emoji", "pumps", "s"]
)
def test_a_chunk_has_the_same_tokens_wherever_it_stands(make_engine: MakeEngine, text: str) -> None:
    engine = make_engine()
    own = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
    for place in range(3):
        chunks = documents(2)
        chunks.insert(place, Chunk(text))
        prompt = engine.layout.prompt(Request(QUESTION, chunks))
        segment = prompt.chunks[place]
        assert prompt.token_ids[segment.start : segment.stop] == own


def test_a_tokenizer_without_bos_loses_no_token(make_engine: MakeEngine) -> None:
    engine = make_engine(tokenizer=build_tokenizer(adds_bos=False, chat_template=None), system_prompt="x")
    assert engine.tokenizer.decode(engine.prefill(Request("y", ["z"])).token_ids).startswith("x")


def test_text_around_is_taken_as_it_is(make_engine: MakeEngine) -> None:
    tokenizer = build_tokenizer(adds_bos=True)
    engine = make_engine(tokenizer=tokenizer)
    around = ["Head ", " [1] between ", " tail"]
    token_ids = engine.prefill(Request("ignored", ["one", "two"], text_around=around)).token_ids
    pieces = ["Head ", "one", " [1] between ", "two", " tail"]
    expected = [token for piece in pieces for token in tokenizer(piece, add_special_tokens=False)["input_ids"]]
    assert token_ids == [tokenizer.bos_token_id, *expected]


def test_a_request_behind_another_prefix_still_hits(make_engine: MakeEngine) -> None:
    """A chat history, a framework's own template: all chunks are found, none is exact, r = 1 is still full."""
    engine = make_engine()
    chunks = documents(3)
    engine.precompute(chunks, neighbours=ring(3))
    history = engine.render_chat(
        [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Good day."}], False
    )
    around = [history + "<|start|>user\n", "\n", "\n", f"\n{QUESTION}<|end|>\n<|start|>assistant\n"]
    for ratio in (0.0, 0.3, 1.0):
        request = Request(QUESTION, chunks, text_around=around, recompute_ratio=ratio)
        ours = engine.prefill(request)
        assert ours.stats.chunk_status == ["enriched"] * 3
        assert ours.logits.isfinite().all()
    assert_same(ours.logits, full(engine, request).logits)


def test_the_default_messages_render_to_the_engines_own_layout(make_engine: MakeEngine) -> None:
    engine = make_engine()
    chunks = documents(2)
    context = "\n\n".join(chunk.text for chunk in chunks)
    rendered = engine.render_chat(engine.default_messages(context, QUESTION))
    own = "".join(
        part
        for pair in zip(engine.layout.text_around(2, QUESTION), [*(c.text for c in chunks), ""], strict=True)
        for part in pair
    )
    assert rendered == own


def test_the_template_is_given_the_configured_keywords(make_engine: MakeEngine) -> None:
    template = CHAT_TEMPLATE + "{% if thinking %}<think>{% endif %}"
    tokenizer = build_tokenizer(chat_template=template)
    plain = make_engine(tokenizer=tokenizer).render_chat([{"role": "user", "content": "Hi"}])
    thinking = make_engine(tokenizer=tokenizer, chat_template_kwargs={"thinking": True}).render_chat(
        [{"role": "user", "content": "Hi"}]
    )
    assert thinking == plain + "<think>"


def test_a_template_that_prints_the_date_does_not_change_the_prefix_every_day(make_engine: MakeEngine) -> None:
    template = "{{ strftime_now('%d %b %Y') }} {{ date_string }}" + CHAT_TEMPLATE
    texts = [make_engine(tokenizer=build_tokenizer(chat_template=template)).layout.prefix_text for _ in range(2)]
    assert texts[0] == texts[1]
    assert texts[0].startswith("26 Jul 2024 26 Jul 2024")


def test_a_template_that_repeats_the_user_message_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match="2 times"):
        make_engine(tokenizer=build_tokenizer(chat_template=CHAT_TEMPLATE + CHAT_TEMPLATE))


def test_questions_with_braces_and_markers_are_literal(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for question in ("{question}", "{0} {x!r}", "{{ bos_token }}", "\u2402fusionrag-context\u2403", "%s"):
        token_ids = engine.prefill(Request(question, documents(1))).token_ids
        assert engine.tokenizer.decode(token_ids).endswith(f"Question: {question}<|end|>\n<|start|>assistant\n")
