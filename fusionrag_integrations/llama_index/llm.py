"""`FusionRAGLLM`: the engine as a LlamaIndex LLM, aware of the nodes a query retrieved.

`predict`, `stream`, `apredict` and `astream` take `retrieved_nodes`, which `FusionRAGSynthesizer` sends along;
everything else in LlamaIndex calls it as any LLM, and gets ordinary prefill.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import astream_chat_response_to_tokens, stream_chat_response_to_tokens
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.types import TokenAsyncGen, TokenGen

from fusionrag_engine import FusionRAGError, Request

from . import steps
from .llm_settings import EngineLLM
from .node_calls import NodeCall, Prepared, prepare
from .prompting import render_messages
from .requests import make_request


class FusionRAGLLM(EngineLLM):
    """A local causal LM behind the FusionRAG engine.

    Args:
        engine: a ready engine, shared; or
        model: directory or Hub name to make one from, with `engine_config`.

    Settings hold for every call and can be given per call (`max_tokens` is `max_new_tokens`), where None is the LLM's
    own. `method` and `recompute_ratio` matter only where nodes are known.

    Raises:
        UnknownSettingError: a setting was given under a name that does not exist.
    """

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
        prepared = self._prepare(prompt, prompt_args)
        if prepared is None:
            return super().predict(prompt, **prompt_args)
        response = self.chat(prepared.messages, fusionrag_call=prepared.call)
        return str(self._parse_output(response.message.content or ""))

    def stream(self, prompt: BasePromptTemplate, **prompt_args: Any) -> TokenGen:
        prepared = self._prepare(prompt, prompt_args, is_streamed=True)
        if prepared is None:
            return super().stream(prompt, **prompt_args)
        return stream_chat_response_to_tokens(self.stream_chat(prepared.messages, fusionrag_call=prepared.call))

    async def apredict(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        prepared = self._prepare(prompt, prompt_args)
        if prepared is None:
            return await super().apredict(prompt, **prompt_args)
        response = await self.achat(prepared.messages, fusionrag_call=prepared.call)
        return str(self._parse_output(response.message.content or ""))

    async def astream(self, prompt: BasePromptTemplate, **prompt_args: Any) -> TokenAsyncGen:
        prepared = self._prepare(prompt, prompt_args, is_streamed=True)
        if prepared is None:
            return await super().astream(prompt, **prompt_args)
        response = await self.astream_chat(prepared.messages, fusionrag_call=prepared.call)
        return await astream_chat_response_to_tokens(response)

    def _prepare(
        self, prompt: BasePromptTemplate, prompt_args: Mapping[str, Any], is_streamed: bool = False
    ) -> Prepared | None:
        prepared = prepare(self, prompt, prompt_args)
        if prepared is not None:
            if is_streamed and (prompt.output_parser or self.output_parser):
                raise FusionRAGError("an output parser reads whole answers: do without it, or without streaming")
            self._log_template_data(prompt, **prepared.arguments)
        return prepared

    # Calls of the engine

    def _completion_request(self, prompt: str, formatted: bool, kwargs: Mapping[str, Any]) -> Request:
        with steps.own_errors():
            text = prompt if formatted else self._engine.render_chat([{"role": "user", "content": prompt}])
            return make_request(self, text, None, kwargs)

    def _chat_request(
        self, messages: Sequence[ChatMessage], kwargs: Mapping[str, Any]
    ) -> tuple[Request, NodeCall | None]:
        settings = dict(kwargs)
        call: NodeCall | None = settings.pop("fusionrag_call", None)
        prompt = None if call is None else call.prompt
        with steps.own_errors():
            text = "" if prompt is not None else render_messages(self._engine, messages)
            return make_request(self, text, prompt, settings), call

    def _chat_steps(self, messages: Sequence[ChatMessage], kwargs: Mapping[str, Any]) -> Iterator[steps.Step]:
        return steps.run(self._engine, *self._chat_request(messages, kwargs))

    def _achat_steps(self, messages: Sequence[ChatMessage], kwargs: Mapping[str, Any]) -> AsyncIterator[steps.Step]:
        return steps.arun(self._engine, *self._chat_request(messages, kwargs))
