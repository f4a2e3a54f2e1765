"""LangChain's own test suites for chat models, on real models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from fusionrag_engine import Engine, EngineConfig
from fusionrag_integrations.langchain import ChatFusionRAG
from tests.integrations.langchain_support import ingest
from tests.integrations.support import QUESTION, tiny_engine

CALLING_TOOLS = False
"""The served models write text, and there is no constrained decoding that would make them call tools."""


class _Suite:
    engine: Engine

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatFusionRAG

    @property
    def has_tool_calling(self) -> bool:
        return CALLING_TOOLS

    @property
    def has_structured_output(self) -> bool:
        return CALLING_TOOLS


class TestChatFusionRAGUnit(_Suite, ChatModelUnitTests):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _with_engine(cls) -> Iterator[None]:
        cls.engine = tiny_engine()
        yield
        cls.engine.close()

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engine, "model": "tiny"}


class TestChatFusionRAGIntegration(_Suite, ChatModelIntegrationTests):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _with_engine(cls, smollm2_dir: Any) -> Iterator[None]:
        cls.engine = Engine.from_pretrained(smollm2_dir, config=EngineConfig(max_new_tokens=4, top_n=2))
        yield
        cls.engine.close()

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engine, "model": "SmolLM2-135M-Instruct", "max_tokens": 4}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {"temperature": 0, "timeout": 60, "stop": [], "max_retries": 2}  # with a limit of our own, above

    @property
    def supported_usage_metadata_details(self) -> dict[str, Any]:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = ChatFusionRAG(engine=self.engine, max_tokens=4)
        asked: Any = ([HumanMessage(QUESTION)],)
        documents = ingest(self.engine)
        if not stream:
            message = model.invoke(*asked, documents=documents)
        else:
            first, *rest = model.stream(*asked, documents=documents)
            message = first
            for item in rest:
                message = message + item  # type: ignore[assignment]
        assert message.usage_metadata["input_token_details"]["cache_read"] > 0  # type: ignore[index]
        return message
