"""From templates and nodes to requests: the text the model reads is the text that was cached."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate, RichPromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_REFINE_PROMPT_SEL, DEFAULT_TEXT_QA_PROMPT_SEL

from fusionrag_engine import Engine, Request
from fusionrag_integrations.llama_index import FusionRAGLLM, default_text_qa_template
from fusionrag_integrations.llama_index.node_calls import prepare
from fusionrag_integrations.llama_index.pieces import context_text
from fusionrag_integrations.llama_index.prompting import (
    MARK,
    context_variable,
    default_refine_template,
    render_messages,
    split_prompt,
)
from tests.integrations.support import QUESTION, SYSTEM, TEXTS, scored_nodes
from tests.tiny_models import build_tokenizer

TEMPLATES: dict[str, Any] = {
    "plain": PromptTemplate("Context:\n{context_str}\nQuestion: {query_str}\n"),
    "context_last": PromptTemplate("Question: {query_str}\nContext: {context_str}"),
    "llama_index": DEFAULT_TEXT_QA_PROMPT_SEL,
    "chat": ChatPromptTemplate(
        [
            ChatMessage(role="system", content="Read this: {context_str}"),
            ChatMessage(role="user", content="Earlier question"),
            ChatMessage(role="assistant", content="Earlier answer"),
            ChatMessage(role="user", content="{query_str}"),
        ]
    ),
    "rich": RichPromptTemplate(
        "{% chat role='system' %}Read: {{ context_str }}{% endchat %}{% chat role='user' %}{{ query_str }}{% endchat %}"
    ),
    "mapped": PromptTemplate("{docs}\n\n{q}", template_var_mappings={"context_str": "docs", "query_str": "q"}),
    "partial": PromptTemplate("{tone}: {context_str} {query_str}").partial_format(tone="Kindly"),
    "braces": PromptTemplate('Reply in {"json": {x}}: {context_str} {query_str}'),
}


def request_of(llm: FusionRAGLLM, template: Any, question: str = QUESTION) -> Any:
    prepared = prepare(llm, template, {"query_str": question, "retrieved_nodes": scored_nodes()})
    assert prepared is not None
    return prepared.call


def test_the_default_template_is_the_engines_own_layout(make_engine: Callable[..., Engine]) -> None:
    for settings in ({}, {"system_prompt": ""}, {"question_template": "\nQ {question} A"}, {"chunk_separator": " | "}):
        engine = make_engine(**settings)
        call = request_of(FusionRAGLLM.from_engine(engine), default_text_qa_template(engine))
        own = engine.layout.text_around(len(TEXTS), QUESTION)
        assert call.prompt.text_around == own


@pytest.mark.parametrize("chat_template", [None, "no system role"])
def test_so_it_is_for_models_without_a_template_or_a_system_role(
    make_engine: Callable[..., Engine], chat_template: str | None
) -> None:
    if chat_template:
        chat_template = (
            "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
            "<|start|>{{ m['content'] }}<|end|>{% endfor %}"
        )
    engine = make_engine(tokenizer=build_tokenizer(chat_template=chat_template))
    call = request_of(FusionRAGLLM.from_engine(engine), default_text_qa_template(engine))
    assert call.prompt.text_around == engine.layout.text_around(len(TEXTS), QUESTION)
    assert SYSTEM in call.prompt.text_around[0]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_pieces_together_are_the_rendered_prompt(engine: Engine, name: str) -> None:
    llm, template = FusionRAGLLM.from_engine(engine), TEMPLATES[name]
    call = request_of(llm, template)
    pieces = [call.prompt.text_around[0]]
    for chunk, text in zip(call.prompt.chunks, call.prompt.text_around[1:], strict=True):
        pieces += [chunk.text, text]
    arguments = {"query_str": QUESTION, "context_str": context_text(engine, scored_nodes())}
    assert "".join(pieces) == render_messages(engine, llm._get_messages(template, **arguments))
    assert [chunk.id for chunk in call.prompt.chunks] == [node.node.node_id for node in scored_nodes()]
    assert MARK not in "".join(pieces)


def test_the_refine_template_takes_its_own_variable(engine: Engine) -> None:
    assert context_variable(default_refine_template(engine)) == "context_msg"
    assert context_variable(DEFAULT_REFINE_PROMPT_SEL) == "context_msg"
    assert context_variable(PromptTemplate("{query_str}")) is None


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (PromptTemplate("{query_str}"), "no plain context variable"),
        (
            PromptTemplate("{context_str} {query_str}", function_mappings={"context_str": lambda **_: "computed"}),
            "no plain context variable",
        ),
        (PromptTemplate("{context_str} again: {context_str} {query_str}"), "exactly once"),
    ],
)
def test_other_templates_take_the_plain_path_with_one_warning(
    engine: Engine, template: PromptTemplate, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    llm = FusionRAGLLM.from_engine(engine)
    with caplog.at_level(logging.WARNING, logger="fusionrag"):
        answer = llm.predict(
            template,
            query_str=QUESTION,
            context_str=context_text(engine, scored_nodes()),
            retrieved_nodes=scored_nodes(),
        )
    assert len(caplog.records) == 1
    assert message in caplog.text
    arguments = {"query_str": QUESTION, "context_str": context_text(engine, scored_nodes())}
    rendered = render_messages(engine, llm._get_messages(template, **arguments))
    assert answer == engine.generate(Request("", (), method="full", text_around=[rendered])).text


def test_text_of_users_cannot_move_the_context(engine: Engine) -> None:
    """Braces in a question are text, and a question that contains the mark only costs the caches."""
    template = default_text_qa_template(engine)
    call = request_of(FusionRAGLLM.from_engine(engine), template, "what is {context_str} and {x}?")
    assert call.prompt.text_around[-1].count("what is {context_str} and {x}?") == 1
    assert request_of(FusionRAGLLM.from_engine(engine), template, f"say {MARK}").prompt is None
    nodes = scored_nodes([f"a node about {MARK} and {{query_str}}", "another"])
    messages = FusionRAGLLM.from_engine(engine)._get_messages(template, context_str=MARK, query_str="q")
    found = split_prompt(engine, messages, nodes, "q", "")
    assert found is not None
    assert [chunk.text for chunk in found.chunks] == [node.node.get_content() for node in nodes]
