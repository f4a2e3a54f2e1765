"""`FusionRAGLLM`: the engine as a LangChain completion model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.llms import LLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from pydantic import PrivateAttr

from fusionrag_engine import TokenDelta

from .calls import Call, usage
from .messages import Turn
from .prompting import chat_prompt, holds, split_prompt
from .settings import FRAMEWORK, PER_CALL, EngineSettings


class FusionRAGLLM(EngineSettings, LLM):
    """A local causal LM that completes text as it is: no chat template. For instruction-tuned models rather use
    `ChatFusionRAG`.

    Documents come with a call - `invoke(text, documents=[...])`, `.bind(documents=[...])`. Where their text stands in
    the prompt, it is taken from their caches; a prompt that holds the text of none of them is a question, asked in the
    engine's own layout. What the cache did is in `generation_info["fusionrag"]`, which `CacheReport` collects.

    Settings and errors are those of `ChatFusionRAG`.
    """

    _given: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def _llm_type(self) -> str:
        return "fusionrag"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        return {**super()._identifying_params, **self._given}

    # LangChain's response caches know what a completion model is, not what a call was given: a copy tells them.

    def generate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
        return super(FusionRAGLLM, self._with_given(kwargs)).generate(prompts, *args, **kwargs)

    async def agenerate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
        return await super(FusionRAGLLM, self._with_given(kwargs)).agenerate(prompts, *args, **kwargs)

    def _with_given(self, given: Mapping[str, Any]) -> FusionRAGLLM:
        copy = self.model_copy()
        copy._given = {f"given_{name}": given[name] for name in (*PER_CALL, *FRAMEWORK) if given.get(name) is not None}
        return copy

    def _make_call(self, text: str, stop: Sequence[str] | None, given: dict[str, Any]) -> Call:
        settings = self._call_settings(stop, given)
        documents, can_place = self._call_documents(given)
        scope = settings.pop("scope")
        turn = Turn("user", text)
        if documents and can_place and not holds(turn, documents):
            prompt = chat_prompt(self.engine, [turn], documents, scope=scope)
        else:
            prompt = split_prompt(text, documents, text, scope)
        return Call(self.engine, self.model, prompt, prompt.request(**settings), self.timeout)

    def _call(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> str:
        return "".join(delta.text for delta in self._make_call(prompt, stop, kwargs).deltas())

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        calls = [self._make_call(prompt, stop, kwargs) for prompt in prompts]
        return LLMResult(generations=[[_generation(call, list(call.deltas()))] for call in calls])

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        calls = [self._make_call(prompt, stop, kwargs) for prompt in prompts]
        answers = [[delta async for delta in call.adeltas()] for call in calls]
        return LLMResult(generations=[[_generation(call, deltas)] for call, deltas in zip(calls, answers, strict=True)])

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        call = self._make_call(prompt, stop, kwargs)
        pieces: Any = call.pieces()
        with closing(pieces):
            for delta in pieces:
                item = GenerationChunk(text=delta.text, generation_info=_info(call, delta))
                if run_manager is not None:
                    run_manager.on_llm_new_token(item.text, chunk=item)
                yield item

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        call = self._make_call(prompt, stop, kwargs)
        pieces: Any = call.apieces()
        async with aclosing(pieces):
            async for delta in pieces:
                item = GenerationChunk(text=delta.text, generation_info=_info(call, delta))
                if run_manager is not None:
                    await run_manager.on_llm_new_token(item.text, chunk=item)
                yield item


def _generation(call: Call, deltas: Sequence[TokenDelta]) -> Generation:
    text = "".join(delta.text for delta in deltas)
    return Generation(text=text, generation_info=_info(call, deltas[-1]))


def _info(call: Call, delta: TokenDelta) -> dict[str, Any] | None:
    if delta.stats is None:
        return None
    return {**call.metadata(delta), "usage_metadata": usage(delta.stats)}
