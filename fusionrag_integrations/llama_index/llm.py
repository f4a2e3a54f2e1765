"""`FusionRAGLLM`: the engine as a LlamaIndex LLM, aware of the nodes a query retrieved.

`predict`, `stream`, `apredict` and `astream` take `retrieved_nodes`, which `FusionRAGSynthesizer` sends along;
everything else in LlamaIndex calls it as any LLM, and gets ordinary prefill.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import LLM, astream_chat_response_to_tokens, stream_chat_response_to_tokens
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.schema import NodeWithScore
from llama_index.core.types import TokenAsyncGen, TokenGen

from fusionrag_engine import Engine, EngineConfig, FusionRAGError, Request, TokenDelta
from fusionrag_engine.types import Stats

from .prompting import MARK, NodePrompt, context_text, context_variable, render_messages, split_prompt
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

    Settings hold for every call and can be given per call (`max_tokens` is `max_new_tokens`). `method` and
    `recompute_ratio` matter only where nodes are known.
    """

    model: str = Field(default="", description="Name of the model.")
    max_new_tokens: int = Field(default=256, gt=0, description="Length limit of an answer, in tokens.")
    temperature: float = Field(default=0.0, ge=0, description="0 is greedy.")
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = Field(default=None)
    stop: list[str] = Field(default_factory=list, description="Strings that end an answer.")
    method: str = Field(default="fusionrag", description="'full', 'reuse' or 'fusionrag'.")
    recompute_ratio: float | None = Field(default=None, description="None is the engine's.")
    selector: str | None = Field(default=None, description="None is the engine's.")
    scope: str = Field(default="", description="Scope whose chunk caches are used.")
    _engine: Engine = PrivateAttr()

    def __init__(
        self, *, engine: Engine | None = None, engine_config: EngineConfig | None = None, **settings: Any
    ) -> None:
        if "max_tokens" in settings:
            settings["max_new_tokens"] = settings.pop("max_tokens")
        if isinstance(settings.get("stop"), str):
            settings["stop"] = [settings["stop"]]
        super().__init__(**settings)
        if engine is None:
            if not self.model:
                raise FusionRAGError("FusionRAGLLM needs engine=Engine(...) or model='directory or Hub name'")
            engine = Engine.from_pretrained(self.model, config=engine_config)
        self._engine = engine
        self.model = self.model or engine.model_name

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
        last = None
        for last in self._chat_steps(messages, kwargs):  # noqa: B007 - only the last response is wanted
            pass
        assert last is not None
        return ChatResponse(message=last.message, raw=last.raw)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        return self._chat_steps(messages, kwargs)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        last = None
        async for last in self._achat_steps(messages, kwargs):  # noqa: B007
            pass
        assert last is not None
        return ChatResponse(message=last.message, raw=last.raw)

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        return self._achat_steps(messages, kwargs)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        last = None
        for last in self._completion_steps(prompt, formatted, kwargs):  # noqa: B007
            pass
        assert last is not None
        return CompletionResponse(text=last.text, raw=last.raw)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        return self._completion_steps(prompt, formatted, kwargs)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        last = None
        async for last in self._acompletion_steps(prompt, formatted, kwargs):  # noqa: B007
            pass
        assert last is not None
        return CompletionResponse(text=last.text, raw=last.raw)

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        return self._acompletion_steps(prompt, formatted, kwargs)

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

    # Generation

    def _request(self, text: str, settings: dict[str, Any], call: _NodeCall | None) -> Request:
        if "max_tokens" in settings:
            settings["max_new_tokens"] = settings.pop("max_tokens")
        values = {name: settings.get(name, getattr(self, name)) for name in _PER_CALL}
        if call is None:
            values.update(method="full", recompute_ratio=None)
            return Request("", (), text_around=[text], **values)
        prompt = call.prompt
        return Request(prompt.question, prompt.chunks, text_around=prompt.text_around, **values)

    def _chat_request(
        self, messages: Sequence[ChatMessage], kwargs: dict[str, Any]
    ) -> tuple[Request, _NodeCall | None]:
        call: _NodeCall | None = kwargs.pop("fusionrag_call", None)
        text = "" if call is not None else render_messages(self._engine, messages)
        return self._request(text, kwargs, call), call

    def _completion_request(self, prompt: str, formatted: bool, kwargs: dict[str, Any]) -> Request:
        text = prompt if formatted else self._engine.render_chat([{"role": "user", "content": prompt}])
        return self._request(text, kwargs, None)

    def _chat_steps(self, messages: Sequence[ChatMessage], kwargs: dict[str, Any]) -> ChatResponseGen:
        request, call = self._chat_request(messages, kwargs)
        yield from map(_chat_response, self._steps(request, call))

    async def _achat_steps(self, messages: Sequence[ChatMessage], kwargs: dict[str, Any]) -> ChatResponseAsyncGen:
        request, call = self._chat_request(messages, kwargs)
        async for step in self._asteps(request, call):
            yield _chat_response(step)

    def _completion_steps(self, prompt: str, formatted: bool, kwargs: dict[str, Any]) -> CompletionResponseGen:
        yield from map(_completion_response, self._steps(self._completion_request(prompt, formatted, kwargs), None))

    async def _acompletion_steps(
        self, prompt: str, formatted: bool, kwargs: dict[str, Any]
    ) -> CompletionResponseAsyncGen:
        async for step in self._asteps(self._completion_request(prompt, formatted, kwargs), None):
            yield _completion_response(step)

    def _steps(self, request: Request, call: _NodeCall | None) -> Iterator[_Step]:
        text = ""
        with _own_errors():
            for delta in self._engine.stream(request):
                text += delta.text
                yield _step(text, delta, request, call)

    async def _asteps(self, request: Request, call: _NodeCall | None) -> AsyncIterator[_Step]:
        text = ""
        with _own_errors():
            async for delta in self._engine.astream(request):
                text += delta.text
                yield _step(text, delta, request, call)


@dataclass(frozen=True)
class _Step:
    """One item of a stream: the text so far, what was added, and on the last item the usage."""

    text: str
    delta: str
    raw: dict[str, Any] | None


def _step(text: str, delta: TokenDelta, request: Request, call: _NodeCall | None) -> _Step:
    if delta.stats is None:
        return _Step(text, delta.text, None)
    raw = {"usage": usage(delta.stats), "finish_reason": delta.finish_reason, "fusionrag": delta.stats.as_dict()}
    if call is not None and call.trace is not None:
        call.trace.add(request, delta.stats)
    return _Step(text, delta.text, raw)


def usage(stats: Stats) -> dict[str, Any]:
    """Token counts in the form LlamaIndex reads."""
    return {
        "prompt_tokens": stats.num_prompt_tokens,
        "completion_tokens": stats.num_generated_tokens,
        "total_tokens": stats.num_prompt_tokens + stats.num_generated_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.num_reused_tokens},
    }


def _chat_response(step: _Step) -> ChatResponse:
    message = ChatMessage(role=MessageRole.ASSISTANT, content=step.text)
    return ChatResponse(message=message, delta=step.delta, raw=step.raw)


def _completion_response(step: _Step) -> CompletionResponse:
    return CompletionResponse(text=step.text, delta=step.delta, raw=step.raw)


@contextmanager
def _own_errors() -> Iterator[None]:
    """LlamaIndex swallows `ValueError` and `TypeError` and answers "Empty Response": give them our type."""
    try:
        yield
    except (ValueError, TypeError) as error:
        if isinstance(error, FusionRAGError):
            raise
        raise FusionRAGError(f"the engine failed: {type(error).__name__}: {error}") from error
