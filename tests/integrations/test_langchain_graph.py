"""A LangGraph graph with a retrieval tool: the documents come to the model in the tool message's artifact."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import create_retriever_tool
from langchain_core.vectorstores import InMemoryVectorStore
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from fusionrag_engine import Engine
from fusionrag_integrations.langchain import ChatFusionRAG, ToolsNotSupportedError, explain
from tests.integrations.langchain_support import LetterEmbeddings, exact_model, ingest
from tests.integrations.support import QUESTION, SYSTEM, settle

FORM = PromptTemplate.from_template("Source: {source}\nContent: {page_content}")


def retrieve_then_answer(engine: Engine, model: ChatFusionRAG, **tool_settings: Any) -> Any:
    """A graph that always looks the last question up, then answers."""
    store = InMemoryVectorStore(LetterEmbeddings())
    store.add_documents(ingest(engine))
    tool = create_retriever_tool(
        store.as_retriever(search_kwargs={"k": 3}),
        "search",
        "Searches the handbook.",
        response_format="content_and_artifact",
        **tool_settings,
    )

    def look_up(state: MessagesState) -> Any:
        question = state["messages"][-1].text
        call = {"name": "search", "args": {"query": question}, "id": f"call-{len(state['messages'])}"}
        return {"messages": [AIMessage("", tool_calls=[call])]}

    def answer(state: MessagesState) -> Any:
        return {"messages": [model.invoke([SystemMessage(SYSTEM), *state["messages"]])]}

    async def aanswer(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke([SystemMessage(SYSTEM), *state["messages"]])]}

    graph = StateGraph(MessagesState)
    graph.add_node("look_up", look_up)
    graph.add_node("tools", ToolNode([tool]))
    graph.add_node("answer", RunnableLambda(answer, afunc=aanswer))
    graph.add_edge(START, "look_up")
    graph.add_edge("look_up", "tools")
    graph.add_edge("tools", "answer")
    graph.add_edge("answer", END)
    return graph.compile(checkpointer=InMemorySaver())


def statuses(message: Any) -> list[str]:
    return [row.status for row in explain(message).rows]


@pytest.mark.parametrize("form", [None, FORM], ids=["plain", "with sources"])
@pytest.mark.parametrize("mode", ["invoke", "ainvoke", "stream", "astream"])
async def test_documents_of_the_tool_are_taken_from_their_caches(engine: Engine, mode: str, form: Any) -> None:
    graph = retrieve_then_answer(engine, exact_model(engine), document_prompt=form)
    config: Any = {"configurable": {"thread_id": "one"}}
    value = {"messages": [HumanMessage(QUESTION)]}
    if mode == "invoke":
        messages = graph.invoke(value, config)["messages"]
    elif mode == "ainvoke":
        messages = (await graph.ainvoke(value, config))["messages"]
    elif mode == "stream":
        pieces = [piece.content for piece, _ in graph.stream(value, config, stream_mode="messages")]
        messages = graph.get_state(config).values["messages"]
        assert messages[-1].content in "".join(str(piece) for piece in pieces)
    else:
        pieces = [piece.content async for piece, _ in graph.astream(value, config, stream_mode="messages")]
        messages = graph.get_state(config).values["messages"]
        assert messages[-1].content in "".join(str(piece) for piece in pieces)
    assert isinstance(messages[2], ToolMessage)
    assert statuses(messages[-1]) == ["enriched"] * 3
    full = ChatFusionRAG(engine=engine, method="full").invoke([SystemMessage(SYSTEM), *messages[:-1]])
    assert messages[-1].content == full.content


def test_a_second_question_keeps_the_first_ones_documents(engine: Engine) -> None:
    """The history holds earlier tool messages: their documents are chunks again, duplicates included."""
    graph = retrieve_then_answer(engine, exact_model(engine))
    config: Any = {"configurable": {"thread_id": "two"}}
    graph.invoke({"messages": [HumanMessage(QUESTION)]}, config)
    messages = graph.invoke({"messages": [HumanMessage("And who signs the report?")]}, config)["messages"]
    assert statuses(messages[-1]) == ["enriched"] * 6
    settle(engine)
    full = ChatFusionRAG(engine=engine, method="full").invoke([SystemMessage(SYSTEM), *messages[:-1]])
    assert messages[-1].content == full.content


def test_tools_and_structured_output_are_refused_with_what_to_do_instead(engine: Engine) -> None:
    model = ChatFusionRAG(engine=engine)
    with pytest.raises(ToolsNotSupportedError, match="Let a graph call the retrieval tool"):
        model.bind_tools([])
    with pytest.raises(NotImplementedError, match="output parser"):
        model.with_structured_output({"title": "Answer", "type": "object", "properties": {}})
