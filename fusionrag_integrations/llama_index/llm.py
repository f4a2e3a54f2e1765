"""`FusionRAGLLM`: the engine as a LlamaIndex LLM, aware of the nodes a query retrieved.

`predict`, `stream`, `apredict` and `astream` take `retrieved_nodes`, which `FusionRAGSynthesizer` sends along;
everything else in LlamaIndex calls it as any LLM, and gets ordinary prefill.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import LLM, astream_chat_response_to_tokens, stream_chat_response_to_tokens
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.schema import NodeWithScore
from llama_index.core.types import TokenAsyncGen, TokenGen

from fusionrag_engine import Engine, EngineConfig, FusionRAGError, Request

from . import steps
from .prompting import MARK, NodePrompt, context_text, context_variable, render_messages, split_prompt
from .settings import refuse_unknown
from .trace import Trace

logger = logging.getLogger("fusionrag")

_PER_CALL = ("max_new_tokens", "temperature", "top_p", "seed", "stop", "method", "recompute_ratio", "selector")


@dataclass(frozen=True)
class _NodeCall:
    """What travels beside the messages of one chat call: the prompt over nodes, and where its stats go."""

    prompt: NodePrompt
    trace: Trace | None


class FusionRAGLLM(LLM):
    """A local causal LM behind the FusionRAG engine.

    Args:
        engine: a ready engine, shared; or
        model: directory or Hub name to make one from, with `engine_config`.

    Settings hold for every call and can be given per call (`max_tokens` is `max_new_tokens`), where None is the LLM's
    own. `method` and `recompute_ratio` matter only where nodes are known.

    Raises:
        UnknownSettingError: a setting was given under a name that does not exist.
    """

    model: str = Field(default="", description="Name of the model.")
    max_new_tokens: int = Field(default=256, gt=0, description="Length limit of an answer in tokens; the engine's.")
    temperature: float = Field(default=0.0, ge=0, description="0 is greedy.")
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = Field(default=None)
    stop: list[str] = Field(default_factory=list, description="Strings that end an answer.")
    method: Literal["full", "reuse", "fusionrag"] = Field(default="fusionrag")
    recompute_ratio: float | None = Field(default=None, ge=0, le=1, description="None is the engine's.")
    selector: str | None = Field(default=None, description="None is the engine's.")
    scope: str = Field(default="", description="Scope whose chunk caches are used.")
    _engine: Engine = PrivateAttr()

    def __init__(
        self, *, engine: Engine | None = None, engine_config: EngineConfig | None = None, **settings: Any
    ) -> None:
        refuse_unknown(type(self), settings, beside=["max_tokens"])
        if "max_tokens" in settings:
            settings["max_new_tokens"] = settings.pop("max_tokens")
        if isinstance(settings.get("stop"), str):
            settings["stop"] = [settings["stop"]]
        given = settings.keys()
        super().__init__(**settings)
        if engine is None:
            if not self.model:
                raise FusionRAGError("FusionRAGLLM needs engine=Engine(...) or model='directory or Hub name'")
            engine = Engine.from_pretrained(self.model, config=engine_config)
        elif engine_config is not None:
            raise FusionRAGError(
                "engine_config makes an engine from model=...; a ready engine has its own: leave it out"
            )
        self._engine = engine
        self.model = self.model or engine.model_name
        if "max_new_tokens" not in given:
            self.max_new_tokens = engine.config.max_new_tokens

    @classmethod
    def from_engine(cls, engine: Engine, **settings: Any) -> FusionRAGLLM:
        return cls(engine=engine, **settings)

    @classmethod
    def class_name(cls) -> str:
        return "FusionRAGLLM"

    @property
    def engine(self) -> Engine:
        return self._engine

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(
            context_window=self._engine.max_context,
            num_output=self.max_new_tokens,
            is_chat_model=True,
            model_name=self.model,
        )

    def __deepcopy__(self, _memo: dict[int, Any] | None = None) -> FusionRAGLLM:
        return self.model_copy()  # the engine is shared: it holds the model

    def __getstate__(self) -> dict[Any, Any]:
        raise FusionRAGError(
            "FusionRAGLLM cannot be pickled: its engine holds a loaded model; make one in each process with model=..."
        )

    # Chat and completion

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return steps.chat_answer(steps.last(self._chat_steps(messages, kwargs)))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        return steps.convert(self._chat_steps(messages, kwargs), steps.chat_item)  # type: ignore[return-value]

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return steps.chat_answer(await steps.alast(self._achat_steps(messages, kwargs)))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        return steps.aconvert(self._achat_steps(messages, kwargs), steps.chat_item)  # type: ignore[return-value]

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        request = self._completion_request(prompt, formatted, kwargs)
        return steps.completion_answer(steps.last(steps.run(self._engine, request, None)))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        request = self._completion_request(prompt, formatted, kwargs)
        return steps.convert(  # type: ignore[return-value]
            steps.run(self._engine, request, None), steps.completion_item
        )

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        request = self._completion_request(prompt, formatted, kwargs)
        return steps.completion_answer(await steps.alast(steps.arun(self._engine, request, None)))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        request = self._completion_request(prompt, formatted, kwargs)
        return steps.aconvert(  # type: ignore[return-value]
            steps.arun(self._engine, request, None), steps.completion_item
        )

    # Prompts over nodes

    def predict(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        call, messages, args = self._node_call(prompt, prompt_args)
        if call is None:
            return super().predict(prompt, **args)
        response = self.chat(messages, fusionrag_call=call)
        return str(self._parse_output(response.message.content or ""))

    def stream(self, prompt: BasePromptTemplate, **prompt_args: Any) -> TokenGen:
        call, messages, args = self._node_call(prompt, prompt_args)
        if call is None:
            return super().stream(prompt, **args)
        return stream_chat_response_to_tokens(self.stream_chat(messages, fusionrag_call=call))

    async def apredict(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        call, messages, args = self._node_call(prompt, prompt_args)
        if call is None:
            return await super().apredict(prompt, **args)
        response = await self.achat(messages, fusionrag_call=call)
        return str(self._parse_output(response.message.content or ""))

    async def astream(self, prompt: BasePromptTemplate, **prompt_args: Any) -> TokenAsyncGen:
        call, messages, args = self._node_call(prompt, prompt_args)
        if call is None:
            return await super().astream(prompt, **args)
        return await astream_chat_response_to_tokens(await self.astream_chat(messages, fusionrag_call=call))

    def _node_call(
        self, prompt: BasePromptTemplate, prompt_args: Mapping[str, Any]
    ) -> tuple[_NodeCall | None, list[ChatMessage], dict[str, Any]]:
        """The call over nodes and its messages; no call where there are no nodes or the template does not allow it."""
        with steps.own_errors():
            return self._split_node_call(prompt, prompt_args)

    def _split_node_call(
        self, prompt: BasePromptTemplate, prompt_args: Mapping[str, Any]
    ) -> tuple[_NodeCall | None, list[ChatMessage], dict[str, Any]]:
        args = dict(prompt_args)
        nodes: list[NodeWithScore] = args.pop("retrieved_nodes", None) or []
        trace: Trace | None = args.pop("fusionrag_trace", None)
        variable = context_variable(prompt)
        if not nodes:
            return None, [], args
        if variable is None:
            logger.warning("the prompt template has no plain context variable; chunk caches are not used for it")
            return None, [], args
        args[variable] = MARK
        question = {**prompt.kwargs, **args}.get("query_str", "")
        found = split_prompt(self._engine, self._get_messages(prompt, **args), nodes, str(question), self.scope)
        args[variable] = context_text(self._engine, nodes)
        if found is None:
            return None, [], args
        self._log_template_data(prompt, **args)
        return _NodeCall(found, trace), self._get_messages(prompt, **args), args

    # Requests

    def _request(self, text: str, settings: dict[str, Any], call: _NodeCall | None) -> Request:
        settings = {name: value for name, value in settings.items() if value is not None}
        if "max_tokens" in settings:
            settings["max_new_tokens"] = settings.pop("max_tokens")
        unknown = sorted(set(settings) - set(_PER_CALL))
        if unknown:
            # Frameworks pass on what was meant for other LLMs, so this is not an error.
            logger.warning("FusionRAGLLM ignores %s; a call accepts: %s", unknown, ", ".join(_PER_CALL))
        values = {name: settings.get(name, getattr(self, name)) for name in _PER_CALL}
        if call is None:
            checked = Request("", (), text_around=[text], **values)  # a wrong method is an error here too
            return replace(checked, method="full", recompute_ratio=None)
        prompt = call.prompt
        return Request(prompt.question, prompt.chunks, text_around=prompt.text_around, **values)

    def _completion_request(self, prompt: str, formatted: bool, kwargs: dict[str, Any]) -> Request:
        with steps.own_errors():
            text = prompt if formatted else self._engine.render_chat([{"role": "user", "content": prompt}])
            return self._request(text, kwargs, None)

    def _chat_request(self, messages: Sequence[ChatMessage], kwargs: Mapping[str, Any]) -> tuple[Request, Trace | None]:
        settings = dict(kwargs)
        call: _NodeCall | None = settings.pop("fusionrag_call", None)
        with steps.own_errors():
            text = "" if call is not None else render_messages(self._engine, messages)
            return self._request(text, settings, call), call.trace if call is not None else None

    def _chat_steps(self, messages: Sequence[ChatMessage], kwargs: Mapping[str, Any]) -> Iterator[steps.Step]:
        return steps.run(self._engine, *self._chat_request(messages, kwargs))

    def _achat_steps(self, messages: Sequence[ChatMessage], kwargs: Mapping[str, Any]) -> AsyncIterator[steps.Step]:
        return steps.arun(self._engine, *self._chat_request(messages, kwargs))
