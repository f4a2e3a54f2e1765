"""Chat engines over chunk caches: history, system prompt, four call styles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.llms import MockLLM

from fusionrag_engine import Engine
from fusionrag_integrations.llama_index import (
    FusionRAGCondensePlusContextChatEngine,
    FusionRAGContextChatEngine,
    FusionRAGLLM,
    FusionRAGTransform,
)
from tests.integrations.support import QUESTION, TEXTS, LetterEmbedding, scored_nodes

ENGINES: list[Any] = [FusionRAGContextChatEngine, FusionRAGCondensePlusContextChatEngine]


def retriever(engine: Engine) -> Any:
    nodes = [node.node for node in scored_nodes()]
    FusionRAGTransform.from_engine(engine)(nodes)
    return VectorStoreIndex(nodes, embed_model=LetterEmbedding()).as_retriever(similarity_top_k=3)


def counts(engine: Engine) -> dict[str, int]:
    return {name: engine.stats()[f"num_{name}"] for name in ("prefix", "plain", "enriched", "miss")}


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("style", ["call", "stream", "async", "async_stream"])
async def test_every_turn_is_answered_from_caches(engine: Engine, kind: Any, style: str) -> None:
    chat = kind.from_engine(engine, retriever=retriever(engine), system_prompt="You are terse.")
    for turn in range(2):
        before = counts(engine)
        if style == "call":
            answer = str(chat.chat(QUESTION))
        elif style == "async":
            answer = str(await chat.achat(QUESTION))
        elif style == "stream":
            answer = "".join(chat.stream_chat(QUESTION).response_gen)
        else:
            answer = "".join([token async for token in (await chat.astream_chat(QUESTION)).async_response_gen()])
        after = counts(engine)
        assert answer
        assert after["miss"] == before["miss"]
        assert sum(after.values()) - sum(before.values()) == 3
        assert len(chat.chat_history) == 2 * (turn + 1), "the answer joined the history"
    assert chat.chat_history[-1].content == answer


@pytest.mark.parametrize("kind", ENGINES)
def test_full_recomputation_is_ordinary_prefill(engine: Engine, kind: Any) -> None:
    history = [ChatMessage(role="user", content="Hello"), ChatMessage(role="assistant", content="Hello to you")]
    nodes = retriever(engine)
    answers = []
    for settings in ({"method": "full"}, {"recompute_ratio": 1.0}):
        llm = FusionRAGLLM.from_engine(engine, **settings)
        chat = kind.from_defaults(retriever=nodes, llm=llm, system_prompt="You are terse.")
        answers.append(str(chat.chat(QUESTION, chat_history=list(history))))
    assert answers[0] == answers[1]


def test_system_prompt_and_history_reach_the_model(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[Any] = []
    own = engine.stream
    monkeypatch.setattr(engine, "stream", lambda request: (requests.append(request), own(request))[1])
    chat = FusionRAGContextChatEngine.from_engine(engine, retriever=retriever(engine), system_prompt="You are terse.")
    history = [ChatMessage(role="user", content="Hello"), ChatMessage(role="assistant", content="Hello to you")]
    chat.chat(QUESTION, chat_history=history)
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
