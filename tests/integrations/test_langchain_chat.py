"""`ChatFusionRAG` and `FusionRAGLLM`: documents however they come, settings, counts, and what the models refuse."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.documents import Document
from langchain_core.load import dumps
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage, trim_messages
from langchain_core.runnables import ConfigurableField

from fusionrag_engine import (
    CacheMissError,
    ConfigError,
    ContextOverflowError,
    Engine,
    EngineConfig,
    FusionRAGError,
    Request,
    UnknownSettingError,
)
from fusionrag_integrations.langchain import AnswerTimeoutError, CacheReport, ChatFusionRAG, FusionRAGLLM, explain
from tests.integrations.langchain_support import MODES, Tokens, exact_model, ingest, plain_documents, run
from tests.integrations.support import QUESTION, SYSTEM, TEXTS, settle
from tests.tiny_models import CHAT_TEMPLATE, build_tokenizer

ENRICHED = ["prefix", *["enriched"] * 4]
CONTEXT = "\n\n".join(TEXTS)
STUFFED = [SystemMessage(SYSTEM), HumanMessage(f"{CONTEXT}\n\nQuestion: {QUESTION}")]


def own_answer(engine: Engine, **settings: Any) -> str:
    return engine.generate(Request(QUESTION, TEXTS, **settings)).text


def statuses(message: Any) -> list[str]:
    return [row.status for row in explain(message).rows]


def asked_with(documents: list[Document], way: str) -> tuple[Any, dict[str, Any]]:
    """The messages and keywords of a question over documents, given in one of the ways."""
    if way == "keyword":
        return STUFFED, {"documents": documents}
    if way == "keyword, not in the messages":
        return [HumanMessage(QUESTION)], {"documents": documents}
    if way == "message":
        attached = HumanMessage(STUFFED[1].content, additional_kwargs={"documents": documents})
        return [STUFFED[0], attached], {}
    if way == "message, not in its text":
        return [SystemMessage(SYSTEM), HumanMessage(QUESTION, additional_kwargs={"documents": documents})], {}
    raise AssertionError(way)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "way", ["keyword", "keyword, not in the messages", "message", "message, not in its text"], ids=lambda way: way[:30]
)
async def test_documents_are_taken_from_their_caches_and_answers_are_the_engines_own(
    engine: Engine, way: str, mode: str
) -> None:
    messages, keywords = asked_with(ingest(engine), way)
    message = await run(exact_model(engine), messages, mode, **keywords)
    assert message.content == own_answer(engine, method="full")
    assert statuses(message) == ENRICHED
    below = await run(ChatFusionRAG(engine=engine), messages, mode, **keywords)
    assert below.content == own_answer(engine)
    assert below.usage_metadata["input_token_details"]["cache_read"] > 0


def test_bound_documents(engine: Engine) -> None:
    message = exact_model(engine).bind(documents=ingest(engine)).invoke(STUFFED)
    assert statuses(message) == ENRICHED


def test_documents_of_a_tool(engine: Engine) -> None:
    documents = ingest(engine)
    call = AIMessage("", tool_calls=[{"name": "search", "args": {"query": "office"}, "id": "1"}])
    shown = "\n\n".join(f"Source: {item.metadata['source']}\nContent: {item.page_content}" for item in documents)
    messages = [
        SystemMessage(SYSTEM),
        HumanMessage(QUESTION),
        call,
        ToolMessage(shown, tool_call_id="1", artifact=documents),
    ]
    message = exact_model(engine).invoke(messages)
    assert statuses(message) == ["enriched"] * 5  # the question stands before them, so none is an exact prefix
    assert message.content == ChatFusionRAG(engine=engine, method="full").invoke(messages).content
    assert any("approximate" in note for note in explain(message).notes)


def test_a_tool_that_shows_something_else_is_reported(engine: Engine) -> None:
    documents = ingest(engine)
    messages = [HumanMessage(QUESTION), ToolMessage("three hits", tool_call_id="1", artifact=documents)]
    message = ChatFusionRAG(engine=engine).invoke(messages)
    assert statuses(message) == []
    assert len(explain(message).notes) == 5
    assert "does not stand in the prompt" in explain(message).notes[0]
    foreign = [HumanMessage(QUESTION), ToolMessage("hits", tool_call_id="1", artifact={"rows": [1, 2]})]
    assert not explain(ChatFusionRAG(engine=engine).invoke(foreign)).notes


def test_one_document_that_was_changed_is_a_reported_miss_and_leaves_the_ingested_one_alone(engine: Engine) -> None:
    documents = ingest(engine)
    compressed = documents[1].model_copy(update={"page_content": "Every pump is tested."})
    message = exact_model(engine).invoke([HumanMessage(QUESTION)], documents=[documents[0], compressed])
    rows = explain(message).rows
    assert [row.status for row in rows] == ["prefix", "miss"]
    assert "differs from what was ingested" in str(rows[1].reason)
    settle(engine)
    assert engine.has(TEXTS[1]).kind == "enriched"
    assert engine.has("Every pump is tested.").kind == "none"


def test_reasons_for_misses(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    never = Document("A text that nobody ingested.", id="new")
    first = ChatFusionRAG(engine=engine).invoke([HumanMessage(QUESTION)], documents=[never])
    assert "not ingested" in str(explain(first).rows[0].reason)
    assert statuses(ChatFusionRAG(engine=engine).invoke([HumanMessage(QUESTION)], documents=[never])) == ["prefix"]

    documents = ingest(engine, scope="north")
    other = ChatFusionRAG(engine=engine, scope="south").invoke([HumanMessage(QUESTION)], documents=documents[:1])
    assert "ingested into scope 'north', asked for in scope 'south'" in str(explain(other).rows[0].reason)
    assert statuses(ChatFusionRAG(engine=engine).invoke([HumanMessage(QUESTION)], documents=documents[:1])) == [
        "prefix"
    ]

    elsewhere = make_engine(system_prompt="Be kind.")
    foreign = ChatFusionRAG(engine=elsewhere).invoke([HumanMessage(QUESTION)], documents=documents[:1])
    assert "another model, tokenizer, dtype or system prompt" in str(explain(foreign).rows[0].reason)


def test_full_method_and_reuse(engine: Engine) -> None:
    documents = ingest(engine)
    full = ChatFusionRAG(engine=engine, method="full").invoke(STUFFED, documents=documents)
    assert statuses(full) == ["miss"] * 5
    assert full.usage_metadata is not None
    assert full.usage_metadata["input_token_details"] == {"cache_read": 0}
    reuse = ChatFusionRAG(engine=engine).invoke(STUFFED, documents=documents, method="reuse")
    assert statuses(reuse) == ["prefix", *["plain"] * 4]


def test_documents_as_text_and_mappings(engine: Engine) -> None:
    ingest(engine)
    given: list[Any] = [TEXTS[0], {"text": TEXTS[1]}, {"page_content": TEXTS[2], "id": "two", "metadata": {}}]
    message = exact_model(engine).invoke([HumanMessage(QUESTION)], documents=given)
    assert statuses(message) == ["prefix", "enriched", "enriched"]
    with pytest.raises(ConfigError, match="documents contain 3"):
        ChatFusionRAG(engine=engine).invoke("?", documents=[3])


def test_a_document_of_one_word_that_the_question_has_within_another(engine: Engine) -> None:
    documents = [Document("no", id="short"), Document("yes", id="other")]
    message = exact_model(engine).invoke([HumanMessage("Do you know?")], documents=documents)
    assert len(explain(message).rows) == 2
    assert message.content == engine.generate(Request("Do you know?", ["no", "yes"], method="full")).text


def test_a_chat_with_history_and_documents_of_two_turns(engine: Engine) -> None:
    documents = ingest(engine)
    messages = [
        HumanMessage("And the pumps?", additional_kwargs={"documents": documents[1:3]}),
        AIMessage("They are tested."),
        HumanMessage(QUESTION, additional_kwargs={"documents": [documents[0], documents[1]]}),
    ]
    message = exact_model(engine).invoke(messages)
    assert statuses(message) == ["prefix", *["enriched"] * 3]
    assert message.content == ChatFusionRAG(engine=engine, method="full").invoke(messages).content


def test_strict_chat_templates(make_engine: Callable[..., Engine]) -> None:
    """One that refuses tools and two turns of a role, and strips what it is given."""
    strict = (
        "{% for message in messages %}{% if message['role'] == 'tool' or "
        "(not loop.first and message['role'] == messages[loop.index0 - 1]['role']) %}{{ raise_exception('no') }}"
        "{% endif %}{% endfor %}" + CHAT_TEMPLATE.replace("message['content']", "message['content'] | trim")
    )
    engine = make_engine(tokenizer=build_tokenizer(chat_template=strict))
    documents = ingest(engine, [" padded text that a template strips \n"])
    messages = [
        HumanMessage("One"),
        HumanMessage("Two"),
        AIMessage("", tool_calls=[{"name": "search", "args": {}, "id": "1"}]),
        ToolMessage(documents[0].page_content, tool_call_id="1", artifact=documents),
    ]
    message = ChatFusionRAG(engine=engine).invoke(messages)
    assert message.content
    assert statuses(message) == ["miss"]  # other tokens than those ingested
    assert "differs from what was ingested" in str(explain(message).rows[0].reason)


def test_a_chat_template_that_refuses_the_messages_says_so(make_engine: Callable[..., Engine]) -> None:
    picky = "{% if messages[-1]['role'] != 'user' %}{{ raise_exception('user last') }}{% endif %}" + CHAT_TEMPLATE
    model = ChatFusionRAG(engine=make_engine(tokenizer=build_tokenizer(chat_template=picky)))
    with pytest.raises(FusionRAGError, match=r"refuses messages of the roles .*user last"):
        model.invoke([HumanMessage("Hello"), AIMessage("Hi")])


def test_what_another_model_cited_is_left_alone(engine: Engine) -> None:
    """ChatCohere's answers carry "documents" of its own form."""
    cited = AIMessage("At noon.", additional_kwargs={"documents": [{"id": "1", "data": {"snippet": "..."}}]})
    assert ChatFusionRAG(engine=engine).invoke([HumanMessage("When?"), cited, HumanMessage("Why?")]).content


def test_content_blocks(engine: Engine) -> None:
    model = ChatFusionRAG(engine=engine)
    parts: Any = [{"type": "text", "text": "Hel"}, "lo"]
    assert model.invoke([HumanMessage(parts)]).content == model.invoke("Hello").content
    image: Any = [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]
    with pytest.raises(FusionRAGError, match="block of type 'image_url'"):
        model.invoke([HumanMessage(image)])


# Counts, streams, callbacks


def test_streams_report_counts_once_and_at_the_end(engine: Engine) -> None:
    pieces = list(ChatFusionRAG(engine=engine, max_tokens=6).stream(STUFFED, documents=ingest(engine)))
    assert all(piece.usage_metadata is None and not piece.response_metadata for piece in pieces[:-1])
    last = pieces[-1]
    assert last.chunk_position == "last"
    assert last.response_metadata["finish_reason"] == "length"
    usage = last.usage_metadata
    assert usage is not None
    assert usage["output_tokens"] == 6
    assert usage["total_tokens"] == usage["input_tokens"] + 6
    stats = last.response_metadata["fusionrag"]
    assert usage["input_token_details"] == {"cache_read": stats["num_reused_tokens"]}
    json.dumps(last.response_metadata)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model_class", [ChatFusionRAG, FusionRAGLLM])
async def test_one_start_and_one_end_a_call(engine: Engine, model_class: Any, mode: str) -> None:
    seen = Tokens()
    await run(model_class(engine=engine), "Hello", mode, {"callbacks": [seen]})
    assert (seen.num_starts, seen.num_ends, seen.num_errors) == (1, 1, 0)
    streaming = Tokens()
    answer = await run(model_class(engine=engine), "Hello", "stream", {"callbacks": [streaming]})
    assert "".join(streaming.tokens) == (answer if isinstance(answer, str) else answer.content)


async def test_events_and_the_usage_callback(engine: Engine) -> None:
    model = ChatFusionRAG(engine=engine, model="tiny")
    events = [event async for event in model.astream_events("Hello", version="v2")]
    assert [event["event"] for event in events][0 :: len(events) - 1] == ["on_chat_model_start", "on_chat_model_end"]
    texts = [event["data"]["chunk"].content for event in events if event["event"] == "on_chat_model_stream"]
    assert "".join(texts) == model.invoke("Hello").content
    usage = UsageMetadataCallbackHandler()
    message = model.invoke("Hello", {"callbacks": [usage]})
    assert usage.usage_metadata["tiny"] == message.usage_metadata


async def test_async_calls_leave_the_event_loop_free(engine: Engine) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    await ChatFusionRAG(engine=engine).ainvoke("Hello")
    ticking.cancel()
    assert ticks > 8  # more than one a token


def test_a_stream_that_is_closed_stops_the_generation(engine: Engine) -> None:
    stream = ChatFusionRAG(engine=engine, max_tokens=500).stream("Hello")
    next(iter(stream))
    stream.close()  # type: ignore[attr-defined]
    assert ChatFusionRAG(engine=engine).invoke("Hello").content


def test_batch_keeps_order_and_matches_single_calls(engine: Engine) -> None:
    model = ChatFusionRAG(engine=engine)
    questions = [f"Question {number}" for number in range(4)]
    assert [m.content for m in model.batch(questions)] == [model.invoke(question).content for question in questions]
    llm = FusionRAGLLM(engine=engine)
    assert llm.batch(questions) == [llm.invoke(question) for question in questions]


# Settings


def test_settings_at_construction_and_per_call(engine: Engine) -> None:
    model = ChatFusionRAG(engine=engine, max_tokens=3, temperature=0.8, top_p=0.9, seed=5)
    request = {"temperature": 0.8, "top_p": 0.9, "seed": 5}
    prompt = engine.render_chat([{"role": "user", "content": "Hello"}])

    def own(**settings: Any) -> str:
        return engine.generate(Request("", (), text_around=[prompt], **{**request, **settings})).text

    assert model.invoke("Hello").content == own(max_new_tokens=3)
    assert model.invoke("Hello", max_tokens=5, seed=6).content == own(max_new_tokens=5, seed=6)
    assert model.invoke("Hello", max_new_tokens=2, temperature=None).content == own(max_new_tokens=2)
    assert FusionRAGLLM(engine=engine, seed=1, max_tokens=4).invoke("Hi") == (
        engine.generate(Request("", (), text_around=["Hi"], seed=1, max_new_tokens=4)).text
    )


@pytest.mark.parametrize("where", ["construction", "call", "bind"])
def test_stop(engine: Engine, where: str) -> None:
    whole = str(ChatFusionRAG(engine=engine).invoke("Hello").content)
    stop = whole[3:5]
    expected = whole[: whole.index(stop)]
    if where == "construction":
        message = ChatFusionRAG(engine=engine, stop=[stop]).invoke("Hello")
    elif where == "call":
        message = ChatFusionRAG(engine=engine, stop=["never"]).invoke("Hello", stop=[stop])
    else:
        message = ChatFusionRAG(engine=engine).bind(stop=[stop]).invoke("Hello")
    assert message.content == expected
    assert message.response_metadata["finish_reason"] == "stop"
    assert "".join(str(piece.content) for piece in ChatFusionRAG(engine=engine, stop=stop).stream("Hello")) == expected


@pytest.mark.parametrize("model_class", [ChatFusionRAG, FusionRAGLLM])
def test_unknown_and_wrong_settings(engine: Engine, model_class: Any, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UnknownSettingError, match=r"no setting \['temprature'\]; accepted: .*temperature"):
        model_class(engine=engine, temprature=1)
    with pytest.raises(ValueError, match="less than or equal to 1"):
        model_class(engine=engine, recompute_ratio=2)
    with pytest.raises(ConfigError, match="method"):
        model_class(engine=engine).invoke("Hello", method="magic", documents=[TEXTS[0]])
    with pytest.raises(FusionRAGError, match="needs engine="):
        model_class()
    with pytest.raises(FusionRAGError, match="a ready engine has its own"):
        model_class(engine=engine, engine_config=EngineConfig())
    assert model_class(engine=engine).invoke("Hello", frequency_penalty=1)
    assert "ignores ['frequency_penalty']" in caplog.text


def test_made_from_a_name(tmp_path: Any, engine: Engine) -> None:
    engine.model.save_pretrained(tmp_path)
    engine.tokenizer.save_pretrained(tmp_path)
    model = ChatFusionRAG(model=tmp_path, engine_config=EngineConfig(system_prompt=SYSTEM, max_new_tokens=8))
    assert model.invoke("Hello").content == ChatFusionRAG(engine=engine).invoke("Hello").content
    assert model.invoke("Hello").response_metadata["model_name"] == str(tmp_path)
    model.engine.close()


def test_timeout_stops_the_generation(engine: Engine) -> None:
    with pytest.raises(AnswerTimeoutError, match="timeout=1e-06"):
        ChatFusionRAG(engine=engine, timeout=1e-6).invoke("Hello")
    with pytest.raises(AnswerTimeoutError):
        list(FusionRAGLLM(engine=engine, timeout=1e-6).stream("Hello"))
    assert ChatFusionRAG(engine=engine, timeout=60).invoke("Hello").content


def test_errors_reach_the_caller(make_engine: Callable[..., Engine]) -> None:
    with pytest.raises(ContextOverflowError):
        ChatFusionRAG(engine=make_engine()).invoke("word " * 5000)
    strict = make_engine(on_miss="error")
    with pytest.raises(CacheMissError):
        ChatFusionRAG(engine=strict).invoke("?", documents=plain_documents())


def test_configurable_fields_share_the_engine(engine: Engine) -> None:
    model = ChatFusionRAG(engine=engine).configurable_fields(max_tokens=ConfigurableField(id="length"))
    message = model.with_config(configurable={"length": 2}).invoke("Hello")
    assert message.usage_metadata["output_tokens"] == 2


def test_token_counts_are_the_models_own(engine: Engine) -> None:
    model = ChatFusionRAG(engine=engine)
    message = model.invoke("Hello there")
    assert model.get_num_tokens_from_messages([HumanMessage("Hello there")]) == message.usage_metadata["input_tokens"]
    assert (
        model.get_num_tokens("Hello there")
        == len(model.get_token_ids("Hello there"))
        == engine.count_tokens("Hello there")
    )
    kept = trim_messages(
        [HumanMessage("word " * 200), AIMessage("yes"), HumanMessage("Hello")],
        max_tokens=100,
        token_counter=model,
        strategy="last",
    )
    assert [item.content for item in kept] == ["yes", "Hello"]
    assert model.profile is not None
    assert model.profile["max_input_tokens"] == engine.max_context


# Response caches, copies, other processes


@pytest.mark.parametrize("model_class", [ChatFusionRAG, FusionRAGLLM])
def test_response_caches_key_on_everything_that_decides_an_answer(engine: Engine, model_class: Any) -> None:
    documents = ingest(engine)
    cache = InMemoryCache()

    def num_entries(call: Any = None, **settings: Any) -> int:
        model_class(engine=engine, cache=cache, **settings).invoke("Hello", **(call or {}))
        return len(cache._cache)

    assert num_entries() == 1
    assert num_entries() == 1
    different: list[dict[str, Any]] = [
        {"recompute_ratio": 0.5},
        {"method": "full"},
        {"max_tokens": 3},
        {"stop": ["x"]},
        {"temperature": 0.5, "seed": 1},
        {"temperature": 0.5, "seed": 2},
        {"scope": "north"},
        {"selector": "random"},
    ]
    for number, settings in enumerate(different, start=2):
        assert num_entries(**settings) == number, settings
    count = len(different) + 2
    assert num_entries({"documents": documents[:2]}) == count
    assert num_entries({"documents": documents[1:3]}) == count + 1
    assert num_entries({"documents": documents[:2]}) == count + 1


def test_another_model_is_another_entry_in_a_response_cache(make_engine: Callable[..., Engine]) -> None:
    cache = InMemoryCache()
    for engine in (make_engine(), make_engine(system_prompt="Be kind.")):
        ChatFusionRAG(engine=engine, cache=cache, model="same").invoke("Hello")
    assert len(cache._cache) == 2


def test_a_cached_answer_is_the_answer(engine: Engine) -> None:
    model = ChatFusionRAG(engine=engine, cache=InMemoryCache())
    documents = ingest(engine)
    first = model.invoke(STUFFED, documents=documents)
    num_requests = engine.stats()["num_requests"]
    assert model.invoke(STUFFED, documents=documents).content == first.content
    assert engine.stats()["num_requests"] == num_requests


@pytest.mark.parametrize("model_class", [ChatFusionRAG, FusionRAGLLM])
def test_copies_share_the_engine_and_other_processes_are_refused(engine: Engine, model_class: Any) -> None:
    model = model_class(engine=engine)
    for copied in (copy.deepcopy(model), copy.copy(model), model.model_copy(deep=True)):
        assert copied.engine is engine
        assert copied.invoke("Hello") == model.invoke("Hello") or model_class is ChatFusionRAG
    with pytest.raises(FusionRAGError, match="cannot be pickled"):
        pickle.dumps(model)
    assert "not_implemented" in dumps(model)  # LangChain's own way to say that an object cannot be loaded back
    assert "engine" not in repr(model).split("(")[1].split("=")[0]


def test_calls_from_many_threads(engine: Engine) -> None:
    model = exact_model(engine)
    documents = ingest(engine)
    expected = model.invoke(STUFFED, documents=documents).content
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda: answers.append(model.invoke(STUFFED, documents=documents).content))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [expected] * 4


# Completion


@pytest.mark.parametrize("mode", MODES)
async def test_completion_over_documents(engine: Engine, mode: str) -> None:
    documents = ingest(engine)
    text = f"{CONTEXT}\n\nThe harbour office"
    report = CacheReport()
    answer = await run(
        FusionRAGLLM(engine=engine, recompute_ratio=1), text, mode, {"callbacks": [report]}, documents=documents
    )
    assert answer == engine.generate(Request("", (), text_around=[text])).text
    assert [row.status for row in explain(report).rows] == ["enriched"] * 5
    assert "reused" in str(report)
    asked = await run(FusionRAGLLM(engine=engine, recompute_ratio=1), QUESTION, mode, documents=documents)
    assert asked == own_answer(engine, method="full")


def test_a_report_of_nothing(engine: Engine) -> None:
    assert str(CacheReport()) == "no call of a FusionRAG model"
    with pytest.raises(FusionRAGError, match="cannot be explained"):
        explain(CacheReport())
