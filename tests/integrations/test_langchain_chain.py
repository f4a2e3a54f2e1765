"""`create_fusion_documents_chain` where LangChain's users put it: answers are the engine's own, and caches are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
from langchain_classic.chains import create_history_aware_retriever, create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.caches import InMemoryCache
from langchain_core.documents import BaseDocumentTransformer, Document
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import JsonOutputParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableField, Runnable, RunnableLambda, RunnableParallel, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore

from fusionrag_engine import ConfigError, Engine, EngineConfig, Request
from fusionrag_integrations.langchain import (
    CacheReport,
    ChatFusionRAG,
    FusionRAGLLM,
    create_fusion_documents_chain,
    default_prompt,
    explain,
)
from tests.integrations.langchain_support import MODES, LetterEmbeddings, exact_model, ingest, run
from tests.integrations.support import QUESTION, SYSTEM, TEXTS

PROMPT = ChatPromptTemplate.from_messages([("system", "Use these notes.\n{context}"), ("human", "{input}")])


class Fixed(BaseRetriever):
    """Always finds the same documents."""

    documents: list[Document]

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return self.documents


def statuses(report: CacheReport) -> list[str]:
    return [row.status for row in explain(report).rows] if report.calls else []


def full_answer(engine: Engine, prompt: Any, inputs: dict[str, Any], **settings: Any) -> str:
    """LangChain's own stuff chain over ordinary prefill."""
    model = ChatFusionRAG(engine=engine, method="full")
    answer: str = create_stuff_documents_chain(model, prompt, **settings).invoke(inputs)
    return answer


# The matrix: entry points x modes. Each builds a runnable, its input, and the way to the answer in its output.


def _documents_chain(engine: Engine, model: Any, documents: list[Document]) -> tuple[Any, Any, Any, Any]:
    inputs = {"context": documents, "input": QUESTION}
    return create_fusion_documents_chain(model, PROMPT), inputs, lambda out: out, PROMPT


def _default_prompt(engine: Engine, model: Any, documents: list[Document]) -> tuple[Any, Any, Any, Any]:
    prompt = default_prompt(engine)
    inputs = {"context": documents, "input": QUESTION}
    return create_fusion_documents_chain(model, prompt), inputs, lambda out: out, prompt


def _retrieval_chain(engine: Engine, model: Any, documents: list[Document]) -> tuple[Any, Any, Any, Any]:
    chain = create_retrieval_chain(Fixed(documents=documents), create_fusion_documents_chain(model, PROMPT))
    return chain, {"input": QUESTION}, lambda out: out["answer"], PROMPT


def _history_aware(engine: Engine, model: Any, documents: list[Document]) -> tuple[Any, Any, Any, Any]:
    with_history = ChatPromptTemplate.from_messages(
        [("system", "Use these notes.\n{context}"), MessagesPlaceholder("chat_history"), ("human", "{input}")]
    )
    rephrase = ChatPromptTemplate.from_messages([MessagesPlaceholder("chat_history"), ("human", "{input}")])
    retriever = create_history_aware_retriever(model, Fixed(documents=documents), rephrase)
    chain = create_retrieval_chain(retriever, create_fusion_documents_chain(model, with_history))
    history = [HumanMessage("And the pumps?"), AIMessage(TEXTS[1])]  # quotes a document
    return chain, {"input": QUESTION, "chat_history": history}, lambda out: out["answer"], with_history


def _parallel(engine: Engine, model: Any, documents: list[Document]) -> tuple[Any, Any, Any, Any]:
    answer = create_fusion_documents_chain(model, PROMPT)
    sources = RunnableParallel(context=Fixed(documents=documents), input=RunnablePassthrough())
    return sources.assign(answer=answer), QUESTION, lambda out: out["answer"], PROMPT


def _bound_by_hand(engine: Engine, model: Any, documents: list[Document]) -> tuple[Any, Any, Any, Any]:
    def answer(inputs: dict[str, Any]) -> Any:
        filled = {**inputs, "context": "\n\n".join(item.page_content for item in inputs["context"])}
        return RunnableLambda(lambda _: filled) | PROMPT | model.bind(documents=inputs["context"]) | StrOutputParser()

    return RunnableLambda(answer), {"context": documents, "input": QUESTION}, lambda out: out, PROMPT


def _retrying(engine: Engine, model: Any, documents: list[Document]) -> tuple[Any, Any, Any, Any]:
    wrapped = model.bind(seed=1).with_retry().with_fallbacks([FakeListChatModel(responses=["fallback"])])
    return _documents_chain(engine, wrapped, documents)


ENTRY_POINTS: list[Callable[..., Any]] = [
    _documents_chain,
    _default_prompt,
    _retrieval_chain,
    _history_aware,
    _parallel,
    _bound_by_hand,
    _retrying,
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("entry_point", ENTRY_POINTS, ids=lambda entry_point: entry_point.__name__.strip("_"))
async def test_answers_are_the_engines_own_and_caches_are_used(
    engine: Engine, entry_point: Callable[..., Any], mode: str
) -> None:
    documents = ingest(engine)
    runnable, value, answer_of, prompt = entry_point(engine, exact_model(engine), documents)
    report = CacheReport()
    answer = answer_of(await run(runnable, value, mode, {"callbacks": [report]}))
    inputs = value if isinstance(value, dict) else {"input": value}
    assert answer == full_answer(engine, prompt, {**inputs, "context": documents})
    expected = ["prefix" if entry_point is _default_prompt else "enriched", *["enriched"] * 4]
    assert len(report.calls) == (2 if entry_point is _history_aware else 1)  # it rephrases the question first
    assert statuses(report)[-5:] == expected
    assert "miss" not in statuses(report)


@pytest.mark.parametrize("entry_point", ENTRY_POINTS[:4], ids=lambda entry_point: entry_point.__name__.strip("_"))
async def test_events(engine: Engine, entry_point: Callable[..., Any]) -> None:
    runnable, value, answer_of, _ = entry_point(engine, exact_model(engine), ingest(engine))
    events = [event async for event in runnable.astream_events(value, version="v2")]
    ends = [event for event in events if event["event"] == "on_chat_model_end"]
    message = ends[-1]["data"]["output"]
    assert message.content == answer_of(runnable.invoke(value))
    assert "miss" not in [row.status for row in explain(message).rows]
    pieces = [event for event in events if event["event"] == "on_chat_model_stream"]
    texts = [e["data"]["chunk"].content for e in pieces if e["run_id"] == ends[-1]["run_id"]]
    assert "".join(texts) == message.content


def test_below_ratio_1_the_answer_is_the_engines_at_that_ratio(engine: Engine) -> None:
    documents = ingest(engine)
    chain = create_fusion_documents_chain(ChatFusionRAG(engine=engine), default_prompt(engine))
    answer = chain.invoke({"context": documents, "input": QUESTION})
    assert answer == engine.generate(Request(QUESTION, TEXTS)).text


# What reaches the prompt


@pytest.mark.parametrize("separator", ["\n\n", "", "\n---\n", " "])
@pytest.mark.parametrize("form", ["{page_content}", "Source: {source}\nContent: {page_content}", "<{page_content}>"])
def test_document_prompts_and_separators_are_beside_the_chunks(engine: Engine, form: str, separator: str) -> None:
    documents = ingest(engine)
    settings: Any = {"document_prompt": PromptTemplate.from_template(form), "document_separator": separator}
    report = CacheReport()
    chain = create_fusion_documents_chain(exact_model(engine), PROMPT, **settings)
    inputs = {"context": documents, "input": QUESTION}
    answer = chain.invoke(inputs, {"callbacks": [report]})
    assert statuses(report) == ["enriched"] * 5
    # Text beside a chunk is tokenized apart from it: compare with ordinary prefill over the same tokens.
    full = create_fusion_documents_chain(ChatFusionRAG(engine=engine, method="full"), PROMPT, **settings)
    assert answer == full.invoke(inputs)


def test_a_document_prompt_that_changes_the_text_is_computed_and_reported(engine: Engine) -> None:
    documents = ingest(engine)
    form = PromptTemplate.from_template("{{ page_content | upper }}", template_format="jinja2")
    report = CacheReport()
    chain = create_fusion_documents_chain(exact_model(engine), PROMPT, document_prompt=form)
    inputs = {"context": documents, "input": QUESTION}
    answer = chain.invoke(inputs, {"callbacks": [report]})
    assert answer == full_answer(engine, PROMPT, inputs, document_prompt=form)
    assert statuses(report) == []
    assert [note for note in explain(report).notes if documents[0].metadata["fusionrag_id"] in note]


def test_duplicates_and_reordering(engine: Engine) -> None:
    documents = ingest(engine)
    shown = [documents[index] for index in (4, 2, 0, 0, 1, 3, 0)]
    report = CacheReport()
    chain = create_fusion_documents_chain(exact_model(engine), default_prompt(engine))
    answer = chain.invoke({"context": shown, "input": QUESTION}, {"callbacks": [report]})
    assert statuses(report) == ["prefix", *["enriched"] * 6]
    assert [row.id for row in explain(report).rows] == [item.metadata["fusionrag_id"] for item in shown]
    assert answer == engine.generate(Request(QUESTION, [item.page_content for item in shown], method="full")).text


class LostInTheMiddle(BaseDocumentTransformer):
    """Most relevant first and last, as LongContextReorder does it."""

    def transform_documents(self, documents: Sequence[Document], **kwargs: Any) -> Sequence[Document]:
        first, last = list(documents)[::2], list(documents)[1::2]
        return [*first, *reversed(last)]


def test_a_reordering_compressor(engine: Engine) -> None:
    from langchain_classic.retrievers import ContextualCompressionRetriever
    from langchain_classic.retrievers.document_compressors import DocumentCompressorPipeline

    documents = ingest(engine)
    pipeline = DocumentCompressorPipeline(transformers=[LostInTheMiddle()])
    retriever = ContextualCompressionRetriever(base_compressor=pipeline, base_retriever=Fixed(documents=documents))
    chain = create_retrieval_chain(retriever, create_fusion_documents_chain(exact_model(engine), PROMPT))
    report = CacheReport()
    result = chain.invoke({"input": QUESTION}, {"callbacks": [report]})
    assert [item.page_content for item in result["context"]] == [TEXTS[index] for index in (0, 2, 4, 3, 1)]
    assert statuses(report) == ["enriched"] * 5
    assert result["answer"] == full_answer(engine, PROMPT, {"input": QUESTION, "context": result["context"]})


def test_another_order_in_the_prompt_than_in_the_list(engine: Engine) -> None:
    documents = ingest(engine)
    messages = [SystemMessage(SYSTEM), HumanMessage("\n\n".join(reversed(TEXTS)) + "\n\nQuestion: " + QUESTION)]
    message = exact_model(engine).invoke(messages, documents=documents)
    assert [row.status for row in explain(message).rows] == ["prefix", *["enriched"] * 4]
    assert message.content == engine.generate(Request(QUESTION, TEXTS[::-1], method="full")).text


def test_no_documents(engine: Engine) -> None:
    chain = create_fusion_documents_chain(exact_model(engine), PROMPT)
    inputs: dict[str, Any] = {"context": [], "input": QUESTION}
    assert chain.invoke(inputs) == full_answer(engine, PROMPT, inputs)


def test_the_default_prompt_renders_to_the_engines_own_layout(make_engine: Callable[..., Engine]) -> None:
    braces = {"system_prompt": "Use {braces} and {context}.", "question_template": "\n\nAs {json}: {question}"}
    for settings in (braces, {"system_prompt": ""}, {}):
        engine = make_engine(**cast(Any, settings))
        documents = ingest(engine)
        report = CacheReport()
        chain = create_fusion_documents_chain(ChatFusionRAG(engine=engine), default_prompt(engine, "question"))
        answer = chain.invoke({"context": documents, "question": "Is {this} it?"}, {"callbacks": [report]})
        assert answer == engine.generate(Request("Is {this} it?", TEXTS)).text
        assert statuses(report)[0] == "prefix"


def test_names_and_errors_of_the_stuff_chain(engine: Engine) -> None:
    documents = ingest(engine)
    prompt = ChatPromptTemplate.from_template("{docs}\n\n{question}")
    chain = create_fusion_documents_chain(exact_model(engine), prompt, document_variable_name="docs")
    inputs = {"docs": documents, "question": QUESTION}
    assert chain.invoke(inputs) == full_answer(engine, prompt, inputs, document_variable_name="docs")
    with pytest.raises(ConfigError, match="but not 'context'"):
        create_fusion_documents_chain(exact_model(engine), prompt)
    with pytest.raises(KeyError, match="context"):
        create_fusion_documents_chain(exact_model(engine), PROMPT).invoke({"input": QUESTION})


# Other models


def test_a_foreign_model_gets_the_same_prompt_and_no_documents() -> None:
    seen: list[Any] = []

    class Foreign(FakeListChatModel):
        def _call(self, messages: Any, *args: Any, **kwargs: Any) -> str:
            seen.append((messages, args, sorted(kwargs)))
            return super()._call(messages, *args, **kwargs)

    documents = [Document(text) for text in TEXTS]
    model = Foreign(responses=["fine"])
    inputs = {"context": documents, "input": QUESTION}
    assert create_fusion_documents_chain(model, PROMPT).invoke(inputs) == "fine"
    assert create_stuff_documents_chain(model, PROMPT).invoke(inputs) == "fine"
    assert seen[0] == seen[1]


@pytest.mark.parametrize("is_ours_chosen", [True, False])
def test_alternatives_and_fallbacks(engine: Engine, is_ours_chosen: bool) -> None:
    class Strict(GenericFakeChatModel):
        def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
            assert not kwargs  # as clients of remote models do
            return super()._generate(messages, stop, run_manager)

    foreign = Strict(messages=iter([AIMessage("theirs")] * 4))
    ours = exact_model(engine)
    inputs = {"context": ingest(engine), "input": QUESTION}
    either = ours.configurable_alternatives(ConfigurableField(id="model"), theirs=foreign, late=lambda: foreign)
    report = CacheReport()
    chosen: Any = {"callbacks": [report], "configurable": {} if is_ours_chosen else {"model": "late"}}
    answer = create_fusion_documents_chain(either, PROMPT).invoke(inputs, chosen)
    assert answer == (full_answer(engine, PROMPT, inputs) if is_ours_chosen else "theirs")
    assert statuses(report) == (["enriched"] * 5 if is_ours_chosen else [])
    failing = ours.bind(method="no such method").with_fallbacks([foreign if not is_ours_chosen else ours])
    answer = create_fusion_documents_chain(failing, PROMPT).invoke(inputs)
    assert answer == (full_answer(engine, PROMPT, inputs) if is_ours_chosen else "theirs")


@pytest.mark.parametrize("wrap", ["fields", "config", "sequence"])
def test_wrapped_models(engine: Engine, wrap: str) -> None:
    ours: Runnable[Any, Any] = exact_model(engine)
    if wrap == "fields":
        ours = exact_model(engine).configurable_fields(temperature=ConfigurableField(id="warmth"))
    elif wrap == "config":
        ours = ours.with_config(tags=["mine"])
    else:
        ours = RunnableLambda(lambda prompt: prompt) | ours
    report = CacheReport()
    inputs = {"context": ingest(engine), "input": QUESTION}
    assert create_fusion_documents_chain(ours, PROMPT).invoke(inputs, {"callbacks": [report]}) == (
        full_answer(engine, PROMPT, inputs)
    )
    assert statuses(report) == ["enriched"] * 5


def test_a_completion_model(engine: Engine) -> None:
    prompt = PromptTemplate.from_template("{context}\n\nQ: {input}\nA:")
    report = CacheReport()
    chain = create_fusion_documents_chain(FusionRAGLLM(engine=engine, recompute_ratio=1), prompt)
    inputs = {"context": ingest(engine), "input": QUESTION}
    answer = chain.invoke(inputs, {"callbacks": [report]})
    assert answer == create_stuff_documents_chain(FusionRAGLLM(engine=engine), prompt).invoke(inputs)
    assert statuses(report) == ["enriched"] * 5


def test_an_output_parser_of_ones_own(engine: Engine) -> None:
    chain = create_fusion_documents_chain(
        FakeListChatModel(responses=['{"a": 1}']), PROMPT, output_parser=JsonOutputParser()
    )
    assert chain.invoke({"context": [], "input": QUESTION}) == {"a": 1}


def test_response_caches_know_the_documents(engine: Engine) -> None:
    """The same question over other documents is another question; over the same it is not asked again."""
    cache = InMemoryCache()
    chain = create_fusion_documents_chain(ChatFusionRAG(engine=engine, cache=cache), PROMPT)
    documents = ingest(engine)
    first = chain.invoke({"context": documents[:2], "input": QUESTION})
    assert chain.invoke({"context": documents[:2], "input": QUESTION}) == first
    assert len(cache._cache) == 1
    chain.invoke({"context": documents[:3], "input": QUESTION})
    assert len(cache._cache) == 2


def test_a_vector_store_retriever_end_to_end(engine: Engine) -> None:
    store = InMemoryVectorStore(LetterEmbeddings())
    store.add_documents(ingest(engine))
    chain = create_retrieval_chain(
        store.as_retriever(search_kwargs={"k": 3}),
        create_fusion_documents_chain(ChatFusionRAG(engine=engine), default_prompt(engine)),
    )
    report = CacheReport()
    result = chain.invoke({"input": QUESTION}, {"callbacks": [report]})
    texts = [item.page_content for item in result["context"]]
    assert len(texts) == 3
    assert statuses(report) == ["prefix", "enriched", "enriched"]
    assert result["answer"] == engine.generate(Request(QUESTION, texts)).text


def test_the_demo_model_answers_word_for_word_as_ordinary_prefill(smollm2_dir: Any) -> None:
    with Engine.from_pretrained(
        smollm2_dir, config=EngineConfig(max_new_tokens=14, top_n=2, dtype="float32")
    ) as engine:
        documents = ingest(engine)
        inputs = {"context": documents, "input": QUESTION}
        report = CacheReport()
        chain = create_fusion_documents_chain(exact_model(engine), default_prompt(engine))
        answer = chain.invoke(inputs, {"callbacks": [report]})
        assert "noon" in answer
        assert answer == full_answer(engine, default_prompt(engine), inputs)
        assert statuses(report) == ["prefix", *["enriched"] * 4]
