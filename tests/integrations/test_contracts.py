"""The framework seams the adapters stand on, several of them private: one test each, on the frameworks alone where
possible. A failure here after an upgrade says which one moved."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.llms import MockLLM
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate
from llama_index.core.response_synthesizers import CompactAndRefine, ResponseMode, get_response_synthesizer
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters
from llama_index.core.vector_stores.utils import metadata_dict_to_node, node_to_metadata_dict
from llama_index.vector_stores.chroma import ChromaVectorStore
from llama_index.vector_stores.chroma.base import _to_chroma_filter

from fusionrag_integrations.llama_index import FusionRAGSynthesizer
from tests.integrations.support import QUESTION, new_collection, scored_nodes, tiny_engine

MODES = [
    ResponseMode.COMPACT,
    ResponseMode.REFINE,
    ResponseMode.SIMPLE_SUMMARIZE,
    ResponseMode.TREE_SUMMARIZE,
    ResponseMode.ACCUMULATE,
    ResponseMode.COMPACT_ACCUMULATE,
]


class Listener(MockLLM):
    """Notes what reaches `predict` and its three siblings."""

    _heard: list[dict[str, Any]] = PrivateAttr(default_factory=list)

    def predict(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        self._heard.append(prompt_args)
        return "predicted"

    async def apredict(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        return self.predict(prompt, **prompt_args)

    def stream(self, prompt: BasePromptTemplate, **prompt_args: Any) -> Any:
        self._heard.append(prompt_args)
        yield "streamed"

    async def astream(self, prompt: BasePromptTemplate, **prompt_args: Any) -> Any:
        self._heard.append(prompt_args)

        async def tokens() -> Any:
            yield "streamed"

        return tokens()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("streaming", [False, True])
async def test_response_kwargs_reach_the_llm_in_every_mode(mode: ResponseMode, streaming: bool) -> None:
    marker = object()
    for is_async in (False, True):
        llm = Listener()
        synthesizer = get_response_synthesizer(llm=llm, response_mode=mode, streaming=streaming)
        if streaming and mode in (ResponseMode.ACCUMULATE, ResponseMode.COMPACT_ACCUMULATE):
            continue  # these refuse to stream
        if is_async:
            response: Any = await synthesizer.asynthesize(QUESTION, scored_nodes(), retrieved_nodes=marker)
            if streaming:
                _ = [token async for token in response.async_response_gen()]
        else:
            response = synthesizer.synthesize(QUESTION, scored_nodes(), retrieved_nodes=marker)
            list(getattr(response, "response_gen", []))
        assert llm._heard
        assert all(heard["retrieved_nodes"] is marker for heard in llm._heard)


def test_a_foreign_llm_ignores_the_nodes() -> None:
    template = PromptTemplate("{context_str}|{query_str}")
    arguments = {"context_str": "text", "query_str": "q"}
    assert MockLLM().predict(
        template, **arguments, retrieved_nodes=scored_nodes(), fusionrag_trace=None
    ) == MockLLM().predict(template, **arguments)


def test_compact_and_refine_swallows_value_errors_but_not_runtime_errors() -> None:
    """Why every error of ours is a `RuntimeError`. If this changes, our wrapping may go."""

    class Failing(Listener):
        _error: Exception = ValueError("lost")

        def predict(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
            raise self._error

    llm = Failing()
    synthesizer = CompactAndRefine(llm=llm, output_cls=None)
    try:
        answer = str(synthesizer.synthesize(QUESTION, scored_nodes()))
    except ValueError:
        answer = "raised"
    assert answer in ("Empty Response", "raised")
    llm._error = RuntimeError("kept")
    with pytest.raises(RuntimeError, match="kept"):
        synthesizer.synthesize(QUESTION, scored_nodes())


def test_the_prompt_helper_stays_out_of_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cuts texts in the middle and counts with another tokenizer; over our LLM no text may pass through it."""

    def refuse(*_args: Any, **_settings: Any) -> Any:
        raise AssertionError("the prompt helper was used")

    for name in ("repack", "truncate", "get_text_splitter_given_prompt"):
        monkeypatch.setattr(PromptHelper, name, refuse)
    engine = tiny_engine()
    try:
        assert str(FusionRAGSynthesizer.from_engine(engine).synthesize(QUESTION, scored_nodes()))
    finally:
        engine.close()
    with pytest.raises(AssertionError, match="was used"):  # the control
        CompactAndRefine(llm=MockLLM()).synthesize(QUESTION, scored_nodes())


@pytest.mark.parametrize("kind", [ContextChatEngine, CondensePlusContextChatEngine])
def test_chat_engines_ask_one_method_for_their_synthesizer(kind: Any) -> None:
    assert list(inspect.signature(kind._get_response_synthesizer).parameters) == ["self", "chat_history", "streaming"]
    chat = kind.from_defaults(
        retriever=_Retriever(), llm=MockLLM(), memory=ChatMemoryBuffer.from_defaults(llm=MockLLM())
    )
    built = chat._get_response_synthesizer([ChatMessage(role="user", content="before")], streaming=True)
    assert isinstance(built, CompactAndRefine)
    assert built._streaming is True
    assert isinstance(built._llm, MockLLM)
    assert built._callback_manager is not None
    prompts = built.get_prompts()
    assert {"text_qa_template", "refine_template"} <= set(prompts)
    assert "context_str" in prompts["text_qa_template"].template_vars
    assert "context_msg" in prompts["refine_template"].template_vars
    used: list[Any] = []
    own = kind._get_response_synthesizer

    class Watched(kind):  # type: ignore[misc]
        def _get_response_synthesizer(self, chat_history: Any, streaming: bool = False) -> Any:
            used.append(streaming)
            return own(self, chat_history, streaming)

    Watched.from_defaults(retriever=_Retriever(), llm=MockLLM()).chat(QUESTION)
    assert used == [False]


class _Retriever:
    """Just enough of one."""

    def retrieve(self, _query: Any) -> list[NodeWithScore]:
        return scored_nodes()


def test_streaming_of_a_synthesizer_is_a_plain_attribute() -> None:
    """CondenseQuestionChatEngine flips it."""
    synthesizer = CompactAndRefine(llm=MockLLM(), streaming=False)
    synthesizer._streaming = True
    assert "response_gen" in dir(synthesizer.synthesize(QUESTION, scored_nodes()))


def test_an_llm_builds_its_messages_in_one_method() -> None:
    """System prompt, query wrapper and output parser are all applied there."""
    llm = MockLLM(system_prompt="Speak plainly.")
    messages: Sequence[ChatMessage] = llm._get_messages(PromptTemplate("{context_str}"), context_str="MARK")
    assert [message.content for message in messages] == ["Speak plainly.", "MARK"]


def test_nodes_come_back_from_chromas_metadata_as_they_were() -> None:
    """Excluded keys included, or the text that reaches the prompt would change and every chunk be a miss."""
    node = TextNode(text="body", id_="one", metadata={"file": "a.md", "fusionrag_key": "k"})
    node.excluded_llm_metadata_keys = ["fusionrag_key"]
    row = node_to_metadata_dict(node, remove_text=True, flat_metadata=True)
    assert row["fusionrag_key"] == "k", "our keys stand at the top level, where deletions read them"
    again = metadata_dict_to_node(row, text="body")
    assert again.get_content(MetadataMode.LLM) == node.get_content(MetadataMode.LLM) == "file: a.md\n\nbody"


def test_chromas_vector_store_keeps_its_collection_and_filters() -> None:
    collection = new_collection()
    store = ChromaVectorStore(chroma_collection=collection)
    assert store._collection is collection
    assert store.flat_metadata is True
    assert collection._client.get_max_batch_size() > 100
    assert _to_chroma_filter(MetadataFilters(filters=[MetadataFilter(key="file", value="a.md")])) == {
        "file": {"$eq": "a.md"}
    }
    node = TextNode(text="body", id_="one", embedding=[1.0, 2.0])
    store.add([node])
    assert collection.get(where={"document_id": "None"})["ids"] == ["one"], "nodes without a source share this one"


def test_chroma_merges_updates_and_ignores_added_duplicates() -> None:
    collection = new_collection()
    collection.add(ids=["one"], embeddings=[[1.0]], metadatas=[{"a": 1, "b": 2}])
    collection.add(ids=["one"], embeddings=[[2.0]], metadatas=[{"a": 9}])
    collection.update(ids=["one"], metadatas=[{"b": None, "c": 3}])
    assert collection.get()["metadatas"] == [{"a": 1, "c": 3}]


def test_chroma_keeps_the_metadata_of_a_collection_that_exists() -> None:
    """By it a collection of records is told from one of nodes."""
    import chromadb

    collection = new_collection()
    again = chromadb.EphemeralClient().get_or_create_collection(
        collection.name, embedding_function=None, metadata={"fusionrag_content": "cache records"}
    )
    assert "fusionrag_content" not in (again.metadata or {})
