"""`FusionRAGLLM`: as any LLM of LlamaIndex, and over retrieved nodes."""

from __future__ import annotations

import asyncio
import copy
import logging
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import (
    LLMChatEndEvent,
    LLMChatStartEvent,
    LLMCompletionEndEvent,
    LLMCompletionStartEvent,
)
from llama_index.core.prompts import PromptTemplate
from llama_index.core.types import BaseOutputParser

from fusionrag_engine import Engine, EngineConfig, FusionRAGError, Request, UnknownSettingError
from fusionrag_integrations.explain import explain
from fusionrag_integrations.llama_index import FusionRAGLLM, FusionRAGTransform, default_text_qa_template
from fusionrag_integrations.llama_index.node_calls import prepare
from tests.integrations.support import QUESTION, TEXTS, patch_forward, scored_nodes, settle

STYLES = ["call", "stream", "async", "async_stream"]
MESSAGES = [ChatMessage(role="system", content="Short."), ChatMessage(role="user", content=QUESTION)]


async def ask(llm: FusionRAGLLM, kind: str, style: str, argument: Any, **settings: Any) -> Any:
    """One chat or completion in one of four styles; the last item, with the deltas checked on the way."""
    name = {"call": kind, "stream": f"stream_{kind}", "async": f"a{kind}", "async_stream": f"astream_{kind}"}[style]
    result = getattr(llm, name)(argument, **settings)
    if style == "call":
        return result
    result = await result if style.startswith("async") else result
    if style == "async":
        return result
    items = [item async for item in result] if style == "async_stream" else list(result)
    texts = [item.message.content if kind == "chat" else item.text for item in items]
    joined = ""
    for item, text in zip(items, texts, strict=True):
        joined += item.delta
        assert text == joined, "a stream item carries the text so far and what was added"
    assert all(item.raw is None for item in items[:-1]), "counts stand on the last item"
    return items[-1]


async def answer(llm: FusionRAGLLM, style: str, template: Any, **arguments: Any) -> str:
    """A prompt over nodes in one of four styles."""
    if style == "call":
        return llm.predict(template, **arguments)
    if style == "stream":
        return "".join(llm.stream(template, **arguments))
    if style == "async":
        return await llm.apredict(template, **arguments)
    return "".join([token async for token in await llm.astream(template, **arguments)])


def rendered(engine: Engine, messages: list[ChatMessage]) -> str:
    return engine.render_chat([{"role": message.role.value, "content": message.content} for message in messages])


@pytest.mark.parametrize("style", STYLES)
async def test_chat_is_the_engines_answer(engine: Engine, style: str) -> None:
    expected = engine.generate(Request("", (), method="full", text_around=[rendered(engine, MESSAGES)]))
    got = await ask(FusionRAGLLM.from_engine(engine), "chat", style, MESSAGES)
    assert got.message.content == expected.text
    assert got.message.role.value == "assistant"
    assert got.raw["usage"] == {
        "prompt_tokens": expected.stats.num_prompt_tokens,
        "completion_tokens": expected.stats.num_generated_tokens,
        "total_tokens": expected.stats.num_prompt_tokens + expected.stats.num_generated_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert got.raw["finish_reason"] == expected.finish_reason


@pytest.mark.parametrize("style", STYLES)
async def test_completion_applies_the_chat_template_once(engine: Engine, style: str) -> None:
    llm = FusionRAGLLM.from_engine(engine)
    text = engine.render_chat([{"role": "user", "content": "Say something"}])
    expected = engine.generate(Request("", (), method="full", text_around=[text])).text
    assert (await ask(llm, "complete", style, "Say something")).text == expected
    assert (await ask(llm, "complete", style, text, formatted=True)).text == expected


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", ["chat", "complete"])
async def test_settings_hold_at_construction_and_per_call(engine: Engine, kind: str, style: str) -> None:
    argument: Any = MESSAGES if kind == "chat" else "Say something"

    def text(response: Any) -> str:
        return str(response.message.content if kind == "chat" else response.text)

    llm = FusionRAGLLM.from_engine(engine, max_tokens=20)
    whole = text(await ask(llm, kind, style, argument))
    for settings in ({"max_tokens": 3}, {"max_new_tokens": 3}):
        assert (await ask(llm, kind, style, argument, **settings)).raw["usage"]["completion_tokens"] == 3
    stop = whole[4:6]
    cut = whole[: whole.index(stop)]
    assert text(await ask(llm, kind, style, argument, stop=[stop])) == cut
    assert text(await ask(llm, kind, style, argument, stop=stop)) == cut
    assert text(await ask(FusionRAGLLM.from_engine(engine, max_tokens=20, stop=stop), kind, style, argument)) == cut
    sampled = {"temperature": 1.5, "top_p": 0.9, "seed": 7}
    first = text(await ask(llm, kind, style, argument, **sampled))
    assert first != whole
    assert text(await ask(llm, kind, style, argument, **sampled)) == first
    assert text(await ask(FusionRAGLLM.from_engine(engine, max_tokens=20, **sampled), kind, style, argument)) == first
    nothing = dict.fromkeys(["temperature", "top_p", "seed", "stop", "max_tokens", "method"])
    assert text(await ask(llm, kind, style, argument, **nothing)) == whole, "None is the LLM's own setting"


@pytest.mark.parametrize("style", STYLES)
async def test_nodes_are_answered_from_their_caches(engine: Engine, style: str) -> None:
    FusionRAGTransform.from_engine(engine)([node.node for node in scored_nodes()])
    llm = FusionRAGLLM.from_engine(engine)
    before = engine.stats()
    template = default_text_qa_template(engine)
    got = await answer(llm, style, template, query_str=QUESTION, retrieved_nodes=scored_nodes())
    after = engine.stats()
    assert got == engine.generate(Request(QUESTION, TEXTS)).text
    assert after["num_requests"] - before["num_requests"] == 1
    assert after["num_prefix"] - before["num_prefix"] == 1
    assert after["num_plain"] - before["num_plain"] == len(TEXTS) - 1


@pytest.mark.parametrize("style", STYLES)
async def test_full_recomputation_is_ordinary_prefill(engine: Engine, style: str) -> None:
    FusionRAGTransform.from_engine(engine)([node.node for node in scored_nodes()])
    arguments: dict[str, Any] = {"query_str": QUESTION, "retrieved_nodes": scored_nodes()}
    for template in (default_text_qa_template(engine), PromptTemplate("Read {context_str}, then: {query_str}")):
        full = await answer(FusionRAGLLM.from_engine(engine, method="full"), style, template, **arguments)
        ours = await answer(FusionRAGLLM.from_engine(engine, recompute_ratio=1.0), style, template, **arguments)
        assert ours == full


def test_nodes_may_come_without_scores(engine: Engine) -> None:
    bare = [node.node for node in scored_nodes()]
    FusionRAGTransform.from_engine(engine)(bare)
    template = default_text_qa_template(engine)
    llm = FusionRAGLLM.from_engine(engine)
    assert (
        llm.predict(template, query_str=QUESTION, retrieved_nodes=bare)
        == engine.generate(Request(QUESTION, TEXTS)).text
    )


def test_raw_says_what_the_cache_did(engine: Engine) -> None:
    FusionRAGTransform.from_engine(engine)([node.node for node in scored_nodes(TEXTS[:4])])
    llm = FusionRAGLLM.from_engine(engine, recompute_ratio=0.0)
    prepared = prepare(
        llm, default_text_qa_template(engine), {"query_str": QUESTION, "retrieved_nodes": scored_nodes()}
    )
    assert prepared is not None
    raw = llm.chat(prepared.messages, fusionrag_call=prepared.call).raw
    assert isinstance(raw, dict)
    assert [(entry["node_id"], entry["status"]) for entry in raw["fusionrag"]["nodes"]] == [
        ("node-0", "prefix"),
        ("node-1", "plain"),
        ("node-2", "plain"),
        ("node-3", "plain"),
        ("node-4", "miss"),
    ]
    assert raw["fusionrag"]["nodes"][4]["miss_reason"]
    assert raw["usage"]["prompt_tokens_details"]["cached_tokens"] == raw["fusionrag"]["num_reused_tokens"] > 0
    assert raw["fusionrag"]["num_recomputed_tokens"] == 0
    pickle.dumps(raw)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", ["chat", "complete"])
async def test_any_answer_can_be_explained(engine: Engine, kind: str, style: str) -> None:
    response = await ask(FusionRAGLLM.from_engine(engine), kind, style, MESSAGES if kind == "chat" else "Hello")
    (call,) = explain(response).calls
    assert call["num_prompt_tokens"] == response.raw["usage"]["prompt_tokens"]


def test_an_output_parser_is_applied_or_refused(engine: Engine) -> None:
    class Upper(BaseOutputParser):
        def parse(self, output: str) -> Any:
            return f"parsed: {output}"

    template = PromptTemplate("{context_str} {query_str}")
    llm = FusionRAGLLM.from_engine(engine, output_parser=Upper())
    arguments: dict[str, Any] = {"query_str": QUESTION, "retrieved_nodes": scored_nodes()}
    assert llm.predict(template, **arguments).startswith("parsed: ")
    with pytest.raises(FusionRAGError, match="output parser"):
        llm.stream(template, **arguments)


def test_a_miss_is_stored_under_its_node(engine: Engine) -> None:
    llm = FusionRAGLLM.from_engine(engine)
    llm.predict(default_text_qa_template(engine), query_str=QUESTION, retrieved_nodes=scored_nodes())
    settle(engine)
    assert engine.stats()["num_chunks"] == len(TEXTS)
    assert engine.delete(["node-0"]) == 1


def test_scope_is_the_llms(engine: Engine) -> None:
    FusionRAGTransform.from_engine(engine, scope="team")([node.node for node in scored_nodes()])
    for scope, num_hits in (("team", len(TEXTS)), ("other", 0)):
        before = engine.stats()["num_miss"]
        FusionRAGLLM.from_engine(engine, scope=scope).predict(
            default_text_qa_template(engine), query_str=QUESTION, retrieved_nodes=scored_nodes()
        )
        assert engine.stats()["num_miss"] - before == len(TEXTS) - num_hits


def test_defaults_and_metadata_come_from_the_engine(engine: Engine) -> None:
    llm = FusionRAGLLM.from_engine(engine)
    assert llm.max_new_tokens == engine.config.max_new_tokens == 8
    assert llm.metadata.context_window == engine.max_context
    assert llm.metadata.num_output == 8
    assert llm.metadata.is_chat_model
    assert llm.metadata.model_name == llm.model == engine.model_name
    assert FusionRAGLLM.class_name() == "FusionRAGLLM"


def test_a_model_name_makes_an_engine(tmp_path: Any, engine: Engine) -> None:
    engine.model.save_pretrained(tmp_path)
    engine.tokenizer.save_pretrained(tmp_path)
    config = EngineConfig(max_new_tokens=5, dtype="float32")
    llm = FusionRAGLLM(model=str(tmp_path), engine_config=config)
    try:
        assert llm.engine.config is config
        assert llm.metadata.num_output == 5
        assert llm.complete("Hello").text
    finally:
        llm.engine.close()
    with pytest.raises(FusionRAGError, match=r"engine=.*model="):
        FusionRAGLLM()
    with pytest.raises(FusionRAGError, match="engine_config"):
        FusionRAGLLM(engine=engine, engine_config=config)


def test_wrong_settings_are_refused(engine: Engine) -> None:
    with pytest.raises(UnknownSettingError, match=r"max_tokenz.*max_new_tokens"):
        FusionRAGLLM.from_engine(engine, max_tokenz=3)
    wrong: list[dict[str, Any]] = [{"method": "fast"}, {"recompute_ratio": 2}, {"temperature": -1}, {"top_p": 0}]
    for settings in wrong:
        with pytest.raises(ValueError, match=next(iter(settings))):
            FusionRAGLLM.from_engine(engine, **settings)
    llm = FusionRAGLLM.from_engine(engine)
    for settings in [*wrong, {"temperature": "hot"}, {"selector": "none such"}, {"max_tokens": 0}, {"stop": 7}]:
        with pytest.raises(FusionRAGError):
            llm.complete("Hello", **settings)


def test_a_setting_that_no_call_knows_is_named(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    FusionRAGLLM.from_engine(engine).complete("Hello", temprature=1)
    assert "temprature" in caplog.text
    assert "temperature" in caplog.text


@pytest.mark.parametrize("style", STYLES)
async def test_errors_of_the_engine_are_not_swallowed(
    engine: Engine, style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compact and Refine answer "Empty Response" on `ValueError` and `TypeError`."""

    def broken(*_args: Any, **_settings: Any) -> Any:
        raise ValueError("bad weights")

    patch_forward(monkeypatch, engine, broken)
    with pytest.raises(FusionRAGError, match="bad weights"):
        await ask(FusionRAGLLM.from_engine(engine), "chat", style, MESSAGES)
    monkeypatch.undo()
    monkeypatch.setattr(engine, "render_chat", broken)
    with pytest.raises(FusionRAGError, match="bad weights"):
        await ask(FusionRAGLLM.from_engine(engine), "chat", style, MESSAGES)
    template = default_text_qa_template(engine)
    with pytest.raises(FusionRAGError, match="bad weights"):
        await answer(
            FusionRAGLLM.from_engine(engine), style, template, query_str=QUESTION, retrieved_nodes=scored_nodes()
        )


async def test_async_does_not_block_the_event_loop(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_forward(monkeypatch, engine, lambda: time.sleep(0.1))
    task = asyncio.create_task(FusionRAGLLM.from_engine(engine).achat(MESSAGES))
    num_turns = 0
    while not task.done():
        await asyncio.sleep(0.01)
        num_turns += 1
    assert num_turns > 10


def test_closing_a_stream_closes_the_engines(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    own, closed = engine.stream, []

    def watched(request: Request) -> Any:
        try:
            yield from own(request)
        except GeneratorExit:
            closed.append(request)
            raise

    monkeypatch.setattr(engine, "stream", watched)
    stream = FusionRAGLLM.from_engine(engine, max_new_tokens=500).stream_chat(MESSAGES)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert closed


async def test_closing_an_async_stream_closes_the_engines(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    own, closed = engine.astream, []

    async def watched(request: Request) -> Any:
        try:
            async for delta in own(request):
                yield delta
        except GeneratorExit:
            closed.append(request)
            raise

    monkeypatch.setattr(engine, "astream", watched)
    stream: Any = await FusionRAGLLM.from_engine(engine, max_new_tokens=500).astream_chat(MESSAGES)
    await anext(stream)
    await stream.aclose()
    del stream
    for _ in range(100):  # LlamaIndex's wrapper lets go of our generator; the loop closes it a little later
        await asyncio.sleep(0.01)
        if closed:
            break
    assert closed


async def test_one_start_and_one_end_event_a_call(engine: Engine) -> None:
    seen: list[Any] = []
    kinds = (LLMChatStartEvent, LLMChatEndEvent, LLMCompletionStartEvent, LLMCompletionEndEvent)

    class Handler(BaseEventHandler):
        def handle(self, event: Any, **_settings: Any) -> None:
            if isinstance(event, kinds):
                seen.append(type(event))

    dispatcher = get_dispatcher()
    handler = Handler()
    dispatcher.add_event_handler(handler)
    try:
        llm = FusionRAGLLM.from_engine(engine)
        template = default_text_qa_template(engine)
        arguments: dict[str, Any] = {"query_str": QUESTION, "retrieved_nodes": scored_nodes()}
        for style in STYLES:
            for call, expected in (
                (lambda style: ask(llm, "chat", style, MESSAGES), kinds[:2]),
                (lambda style: ask(llm, "complete", style, "Hello"), kinds[2:]),
                (lambda style: answer(llm, style, template, **arguments), kinds[:2]),
                (lambda style: answer(llm, style, PromptTemplate("{query_str}"), query_str=QUESTION), kinds[:2]),
            ):
                seen.clear()
                await call(style)
                assert seen == list(expected)
    finally:
        dispatcher.event_handlers.remove(handler)


def test_token_counts_are_the_models_own(engine: Engine) -> None:
    counter = TokenCountingHandler(tokenizer=str.split, logger=None)
    llm = FusionRAGLLM.from_engine(engine, callback_manager=CallbackManager([counter]))
    response = llm.chat(MESSAGES)
    assert response.raw is not None
    assert counter.prompt_llm_token_count == response.raw["usage"]["prompt_tokens"]
    list(llm.stream_chat(MESSAGES))
    assert counter.prompt_llm_token_count == 2 * response.raw["usage"]["prompt_tokens"]


def test_a_copy_shares_the_engine_and_a_pickle_is_refused(engine: Engine) -> None:
    llm = FusionRAGLLM.from_engine(engine, max_new_tokens=3)
    for twin in (copy.deepcopy(llm), copy.copy(llm)):
        assert twin.engine is engine
        twin.max_new_tokens = 5
        assert llm.max_new_tokens == 3
    with pytest.raises(FusionRAGError, match="pickled"):
        pickle.dumps(llm)


def test_a_system_prompt_of_the_llm_is_used(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="fusionrag")
    llm = FusionRAGLLM.from_engine(engine, system_prompt="Speak plainly.")
    prepared = prepare(
        llm, PromptTemplate("{context_str} {query_str}"), {"query_str": QUESTION, "retrieved_nodes": scored_nodes()}
    )
    assert prepared is not None
    assert prepared.call.prompt is not None
    assert "Speak plainly." in prepared.call.prompt.text_around[0]
    assert not caplog.records


def test_concurrent_calls_get_their_own_answers(engine: Engine, make_engine: Callable[..., Engine]) -> None:
    llm = FusionRAGLLM.from_engine(engine)
    prompts = [f"Question {number}" for number in range(4)]
    expected = [llm.complete(prompt).text for prompt in prompts]

    async def together() -> list[str]:
        return [response.text for response in await asyncio.gather(*map(llm.acomplete, prompts))]

    assert asyncio.run(together()) == expected
