"""What knows nothing of caches: `Settings.llm`, agents, workflows, plain synthesizers. And agents' query-engine tools,
whose answers come from caches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core import Settings, SummaryIndex, VectorStoreIndex
from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent, ReActAgent
from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.extractors import TitleExtractor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import MetadataMode, TextNode
from llama_index.core.tools import QueryEngineTool
from llama_index.core.workflow import StartEvent, StopEvent, Workflow, step

from fusionrag_engine import Engine, Request
from fusionrag_integrations.explain import explain
from fusionrag_integrations.llama_index import FusionRAGLLM, FusionRAGSynthesizer, FusionRAGTransform
from tests.integrations.support import QUESTION, TEXTS, LetterEmbedding, scored_nodes


@pytest.fixture
def global_llm(engine: Engine) -> Iterator[FusionRAGLLM]:
    """Ours is LlamaIndex's default."""
    before = Settings._llm, Settings._embed_model
    Settings.llm = FusionRAGLLM.from_engine(engine)
    Settings.embed_model = LetterEmbedding()
    yield Settings.llm  # type: ignore[misc]
    Settings._llm, Settings._embed_model = before


def plain(engine: Engine, messages: list[dict[str, str]]) -> str:
    """The engine's own answer to messages."""
    return engine.generate(Request("", (), method="full", text_around=[engine.render_chat(messages)])).text


def handbook(engine: Engine, **settings: Any) -> RetrieverQueryEngine:
    nodes = [node.node for node in scored_nodes()]
    FusionRAGTransform.from_engine(engine)(nodes)
    index = VectorStoreIndex(nodes, embed_model=LetterEmbedding())
    return RetrieverQueryEngine(
        index.as_retriever(similarity_top_k=3), FusionRAGSynthesizer.from_engine(engine, **settings)
    )


@pytest.mark.usefixtures("global_llm")
class TestSettings:
    """`Settings.llm = FusionRAGLLM(...)` where nobody knows of nodes: ordinary prefill, and right."""

    def test_a_chat_engine(self, engine: Engine) -> None:
        chat = SimpleChatEngine.from_defaults(system_prompt="Be kind.")
        assert str(chat.chat(QUESTION)) == plain(
            engine, [{"role": "system", "content": "Be kind."}, {"role": "user", "content": QUESTION}]
        )

    def test_llama_indexs_own_query_engine(self, engine: Engine) -> None:
        index = VectorStoreIndex([node.node for node in scored_nodes()])
        before = engine.stats()["num_requests"]
        response = index.as_query_engine().query(QUESTION)
        assert str(response)
        assert engine.stats()["num_requests"] - before == 1
        assert "fusionrag" not in response.metadata

    @pytest.mark.parametrize("mode", ["compact", "refine", "tree_summarize", "simple_summarize", "accumulate"])
    def test_its_response_modes(self, mode: Any) -> None:
        index = SummaryIndex([node.node for node in scored_nodes(TEXTS[:2])])
        assert str(index.as_query_engine(response_mode=mode).query(QUESTION))

    def test_our_synthesizer_takes_it(self, engine: Engine) -> None:
        index = VectorStoreIndex([node.node for node in scored_nodes()])
        response = index.as_query_engine(response_synthesizer=FusionRAGSynthesizer(), similarity_top_k=2).query(
            QUESTION
        )
        texts = [node.node.get_content(MetadataMode.LLM) for node in response.source_nodes]
        assert str(response) == engine.generate(Request(QUESTION, texts, method="full")).text

    async def test_an_extractor(self) -> None:
        (found,) = await TitleExtractor(nodes=1).aextract([TextNode(text=TEXTS[0])])
        assert "document_title" in found


class Script(FusionRAGLLM):
    """Says what an agent's model would say, which a tiny one cannot; the tool's answers are real."""

    _lines: list[str] = PrivateAttr(default_factory=list)

    async def astream_chat(self, messages: Any, **kwargs: Any) -> Any:
        async def items() -> Any:
            text = self._lines.pop(0)
            yield ChatResponse(message=ChatMessage(role="assistant", content=text), delta=text)

        return items()

    async def achat(self, messages: Any, **kwargs: Any) -> Any:
        return ChatResponse(message=ChatMessage(role="assistant", content=self._lines.pop(0)))


@pytest.mark.parametrize("in_workflow", [False, True])
async def test_a_react_agent_calls_a_query_engine(engine: Engine, in_workflow: bool) -> None:
    llm = Script.from_engine(engine)
    llm._lines = [
        f'Thought: I look it up.\nAction: handbook\nAction Input: {{"input": "{QUESTION}"}}',
        "Thought: I can answer.\nAnswer: At noon.",
    ]
    tool = QueryEngineTool.from_defaults(handbook(engine), name="handbook", description="The handbook.")
    agent: Any = ReActAgent(tools=[tool], llm=llm, name="reader", description="Reads.")
    if in_workflow:
        agent = AgentWorkflow(agents=[agent], root_agent="reader")
    output = await agent.run(QUESTION)
    assert str(output) == "At noon."
    explained = explain(output)
    assert [row.status for row in explained.rows] == ["prefix", "plain", "plain"]
    (call,) = output.tool_calls
    texts = [node.node.get_content() for node in call.tool_output.raw_output.source_nodes]
    assert call.tool_output.content == engine.generate(Request(QUESTION, texts)).text


async def test_an_agent_on_our_llm_runs(engine: Engine) -> None:
    """A tiny model's nonsense is no action, so LlamaIndex takes it for the answer."""
    agent = ReActAgent(tools=[], llm=FusionRAGLLM.from_engine(engine))
    output = await agent.run(QUESTION, max_iterations=2)
    assert output.response.content
    assert engine.stats()["num_requests"] == 1


async def test_a_function_agent_says_that_it_needs_function_calling(engine: Engine) -> None:
    assert not FusionRAGLLM.from_engine(engine).metadata.is_function_calling_model
    tool = QueryEngineTool.from_defaults(handbook(engine), name="handbook", description="The handbook.")
    with pytest.raises(ValueError, match="FunctionCallingLLM"):
        await FunctionAgent(tools=[tool], llm=FusionRAGLLM.from_engine(engine)).run(QUESTION)


async def test_a_workflow_step_asks_a_query_engine(engine: Engine) -> None:
    asked = handbook(engine, streaming=True)

    class Ask(Workflow):
        @step
        async def answer(self, event: StartEvent) -> StopEvent:
            response: Any = await asked.aquery(event.question)
            text = "".join([token async for token in response.async_response_gen()])
            return StopEvent(result=(text, response))

    text, response = await Ask(timeout=30).run(question=QUESTION)
    texts = [node.node.get_content() for node in response.source_nodes]
    assert text == engine.generate(Request(QUESTION, texts)).text
    assert [row.status for row in explain(response).rows] == ["prefix", "plain", "plain"]
