"""Chat engines over chunk caches: history, system prompt, four call styles."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine import CondenseQuestionChatEngine, ContextChatEngine
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine

from fusionrag_engine import Engine
from fusionrag_integrations.explain import NOT_EXACT, explain
from fusionrag_integrations.llama_index import (
    FusionRAGCondensePlusContextChatEngine,
    FusionRAGContextChatEngine,
    FusionRAGLLM,
    FusionRAGSynthesizer,
    FusionRAGTransform,
)
from tests.integrations.support import QUESTION, TEXTS, LetterEmbedding, scored_nodes

STYLES = ["call", "stream", "async", "async_stream"]
ENGINES: list[Any] = [FusionRAGContextChatEngine, FusionRAGCondensePlusContextChatEngine]


def retriever(engine: Engine) -> Any:
    nodes = [node.node for node in scored_nodes()]
    FusionRAGTransform.from_engine(engine)(nodes)
    return VectorStoreIndex(nodes, embed_model=LetterEmbedding()).as_retriever(similarity_top_k=3)


def counts(engine: Engine) -> dict[str, int]:
    return {name: engine.stats()[f"num_{name}"] for name in ("prefix", "plain", "enriched", "miss")}


HISTORY = [ChatMessage(role="user", content="Hello"), ChatMessage(role="assistant", content="Hello to you")]


async def say(chat: Any, style: str, **settings: Any) -> tuple[str, Any]:
    """One turn in one of four styles: answer and response."""
    if style == "call":
        response = chat.chat(QUESTION, **settings)
    elif style == "async":
        response = await chat.achat(QUESTION, **settings)
    elif style == "stream":
        response = chat.stream_chat(QUESTION, **settings)
        return "".join(response.response_gen), response
    else:
        response = await chat.astream_chat(QUESTION, **settings)
        return "".join([token async for token in response.async_response_gen()]), response
    return str(response), response


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("style", STYLES)
async def test_every_turn_is_answered_from_caches(engine: Engine, kind: Any, style: str) -> None:
    chat = kind.from_engine(engine, retriever=retriever(engine), system_prompt="You are terse.")
    for turn in range(2):
        before = counts(engine)
        answer, response = await say(chat, style)
        after = counts(engine)
        assert answer
        assert after["miss"] == before["miss"]
        assert sum(after.values()) - sum(before.values()) == 3
        assert len(chat.chat_history) == 2 * (turn + 1), "the answer joined the history"
        explained = explain(response)
        assert [row.id for row in explained.rows] == [node.node.node_id for node in response.source_nodes]
        assert [row.status for row in explained.rows] == ["plain"] * 3
        assert explained.notes == [NOT_EXACT], "history and a system prompt of its own stand before the nodes"
    assert chat.chat_history[-1].content == answer


async def test_turns_at_once_keep_their_own_counts(engine: Engine) -> None:
    nodes = retriever(engine)
    chats = [
        FusionRAGContextChatEngine.from_engine(engine, retriever=nodes, system_prompt="word " * length)
        for length in (1, 20)
    ]
    responses = await asyncio.gather(*(chat.achat(QUESTION) for chat in chats))
    sizes = [explain(response).calls[-1]["num_prompt_tokens"] for response in responses]
    assert len(explain(responses[0]).calls) == len(explain(responses[1]).calls) == 1
    assert sizes[1] > sizes[0]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("history", [[], HISTORY])
async def test_condense_question_asks_the_query_engine(engine: Engine, style: str, history: list[ChatMessage]) -> None:
    """It flips the synthesizer's streaming, and asks the LLM for a question of its own where there is history."""
    answers = {}
    nodes = retriever(engine)
    for method, settings in {"full": {"method": "full"}, "fusionrag": {"recompute_ratio": 1.0}}.items():
        llm = FusionRAGLLM.from_engine(engine, **settings)
        query_engine = RetrieverQueryEngine(nodes, FusionRAGSynthesizer(llm))
        chat = CondenseQuestionChatEngine.from_defaults(query_engine=query_engine, llm=llm)
        answers[method], response = await say(chat, style, chat_history=list(history))
        assert [message.content for message in chat.chat_history] == [QUESTION, answers[method]]
    assert answers["full"] == answers["fusionrag"]
    assert [row.status for row in explain(response).rows] == ["prefix", "plain", "plain"]


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("style", STYLES)
async def test_full_recomputation_is_ordinary_prefill(engine: Engine, kind: Any, style: str) -> None:
    nodes = retriever(engine)
    answers = []
    for settings in ({"method": "full"}, {"recompute_ratio": 1.0}):
        llm = FusionRAGLLM.from_engine(engine, **settings)
        chat = kind.from_defaults(retriever=nodes, llm=llm, system_prompt="You are terse.")
        answer, _ = await say(chat, style, chat_history=list(HISTORY))
        answers.append(answer)
    assert answers[0] == answers[1]


def test_system_prompt_and_history_reach_the_model(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[Any] = []
    own = engine.stream
    monkeypatch.setattr(engine, "stream", lambda request: (requests.append(request), own(request))[1])
    chat = FusionRAGContextChatEngine.from_engine(engine, retriever=retriever(engine), system_prompt="You are terse.")
    chat.chat(QUESTION, chat_history=list(HISTORY))
    (request,) = requests
    around = "|".join(request.text_around)
    for text in ("You are terse.", "Hello", "Hello to you", QUESTION):
        assert text in around
    assert {chunk.text for chunk in request.chunks} <= set(TEXTS)


def test_with_another_llm_it_answers_as_llama_index(make_engine: Callable[..., Engine]) -> None:
    nodes = retriever(make_engine())
    ours = FusionRAGContextChatEngine.from_defaults(retriever=nodes, llm=MockLLM(), system_prompt="Terse.")
    theirs = ContextChatEngine.from_defaults(retriever=nodes, llm=MockLLM(), system_prompt="Terse.")
    assert str(ours.chat(QUESTION)) == str(theirs.chat(QUESTION))
