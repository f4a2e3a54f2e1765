"""`FusionRAGSynthesizer`: sends the retrieved nodes to the LLM, whole, so that their caches can be used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.llms import LLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers import CompactAndRefine
from llama_index.core.response_synthesizers.base import BaseSynthesizer, QueryTextType
from llama_index.core.schema import NodeWithScore
from llama_index.core.types import RESPONSE_TEXT_TYPE

from fusionrag_engine import Engine

from .llm import FusionRAGLLM
from .packing import pack
from .prompting import (
    MARK,
    context_text,
    context_variable,
    count_frame_tokens,
    default_refine_template,
    default_text_qa_template,
)
from .trace import Trace


class FusionRAGSynthesizer(BaseSynthesizer):
    """Answers from whole nodes: all in one prompt where they fit, else refined over groups of whole nodes.

    With another LLM than `FusionRAGLLM`, or with `output_cls`, it behaves as LlamaIndex's `CompactAndRefine`. What the
    cache did is in `response.metadata["fusionrag"]` (see `Trace`); nodes that cannot fit are named there.

    Args:
        llm: None is `Settings.llm`.
        text_qa_template: takes `context_str` and `query_str`. None renders to the engine's own layout, where the first
            chunk is an exact prefix.
        refine_template: takes `context_msg`, `query_str` and `existing_answer`.
        streaming: answer with a stream.
    """

    def __init__(
        self,
        llm: LLM | None = None,
        *,
        text_qa_template: BasePromptTemplate | None = None,
        refine_template: BasePromptTemplate | None = None,
        streaming: bool = False,
        callback_manager: CallbackManager | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(llm=llm, callback_manager=callback_manager, streaming=streaming, **settings)
        self._given_qa = text_qa_template
        self._given_refine = refine_template

    @classmethod
    def from_engine(cls, engine: Engine, **settings: Any) -> FusionRAGSynthesizer:
        """A synthesizer with a `FusionRAGLLM` of its own."""
        return cls(FusionRAGLLM.from_engine(engine), **settings)

    def synthesize(
        self,
        query: QueryTextType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        trace = Trace()
        travelling = {**response_kwargs, "retrieved_nodes": list(nodes), "fusionrag_trace": trace}
        return _annotate(super().synthesize(query, nodes, additional_source_nodes, **travelling), trace)

    async def asynthesize(
        self,
        query: QueryTextType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        trace = Trace()
        travelling = {**response_kwargs, "retrieved_nodes": list(nodes), "fusionrag_trace": trace}
        return _annotate(await super().asynthesize(query, nodes, additional_source_nodes, **travelling), trace)

    def get_response(
        self, query_str: str, text_chunks: Sequence[str], prev_response: Any = None, **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        llm, nodes, trace, others = self._unpack(response_kwargs)
        if llm is None or not nodes:
            return self._compact_and_refine().get_response(query_str, text_chunks, prev_response, **others)
        answer: Any = prev_response
        for group, is_last in self._groups(llm, query_str, nodes, trace, others):
            template, arguments = self._arguments(llm, query_str, context_text(llm.engine, group), answer)
            arguments.update(others, retrieved_nodes=group, fusionrag_trace=trace)
            answer = (llm.stream if self._streaming and is_last else llm.predict)(template, **arguments)
        return answer  # type: ignore[no-any-return]

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], prev_response: Any = None, **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        llm, nodes, trace, others = self._unpack(response_kwargs)
        if llm is None or not nodes:
            return await self._compact_and_refine().aget_response(query_str, text_chunks, prev_response, **others)
        answer: Any = prev_response
        for group, is_last in self._groups(llm, query_str, nodes, trace, others):
            template, arguments = self._arguments(llm, query_str, context_text(llm.engine, group), answer)
            arguments.update(others, retrieved_nodes=group, fusionrag_trace=trace)
            answer = await (llm.astream if self._streaming and is_last else llm.apredict)(template, **arguments)
        return answer  # type: ignore[no-any-return]

    def _unpack(
        self, response_kwargs: dict[str, Any]
    ) -> tuple[FusionRAGLLM | None, list[NodeWithScore], Trace, dict[str, Any]]:
        others = dict(response_kwargs)
        nodes = others.pop("retrieved_nodes", None) or []
        trace = others.pop("fusionrag_trace", None) or Trace()
        is_ours = isinstance(self._llm, FusionRAGLLM) and self._output_cls is None
        return (self._llm if is_ours else None), nodes, trace, others  # type: ignore[return-value]

    def _compact_and_refine(self) -> CompactAndRefine:
        """LlamaIndex's own synthesizer with our templates."""
        return CompactAndRefine(
            llm=self._llm,
            callback_manager=self._callback_manager,
            prompt_helper=self._prompt_helper,
            text_qa_template=self._given_qa,
            refine_template=self._given_refine,
            output_cls=self._output_cls,
            streaming=self._streaming,
        )

    def _groups(
        self, llm: FusionRAGLLM, query_str: str, nodes: list[NodeWithScore], trace: Trace, others: dict[str, Any]
    ) -> Iterator[tuple[list[NodeWithScore], bool]]:
        """The nodes of each prompt, and whether it is the last one."""

        def room(is_refined: bool) -> int:
            num_answers = 2 if is_refined else 1  # the answer so far stands in a refine prompt
            template, arguments = self._arguments(llm, query_str, MARK, "" if is_refined else None)
            num_frame = count_frame_tokens(llm.engine, llm._get_messages(template, **{**arguments, **others}))
            return llm.engine.max_context - num_frame - num_answers * llm.max_new_tokens

        groups = pack(llm.engine, nodes, room, trace)
        for number, group in enumerate(groups, start=1):
            yield group, number == len(groups)

    def _arguments(
        self, llm: FusionRAGLLM, query_str: str, context: str, answer: Any
    ) -> tuple[BasePromptTemplate, dict[str, Any]]:
        """Template and its arguments for one prompt; `answer` is the answer so far, None before the first one."""
        qa, refine = self._templates(llm)
        template = qa if answer is None else refine
        name = context_variable(template) or ("context_str" if answer is None else "context_msg")
        arguments: dict[str, Any] = {"query_str": query_str, name: context}
        if answer is not None:
            arguments["existing_answer"] = str(answer)
        return template, arguments

    def _templates(self, llm: FusionRAGLLM) -> tuple[BasePromptTemplate, BasePromptTemplate]:
        qa = self._given_qa or default_text_qa_template(llm.engine)
        return qa, self._given_refine or default_refine_template(llm.engine)

    def _get_prompts(self) -> PromptDictType:
        if isinstance(self._llm, FusionRAGLLM):
            qa, refine = self._templates(self._llm)
            return {"text_qa_template": qa, "refine_template": refine}
        return self._compact_and_refine()._get_prompts()

    def _update_prompts(self, prompts: PromptDictType) -> None:
        self._given_qa = prompts.get("text_qa_template", self._given_qa)
        self._given_refine = prompts.get("refine_template", self._given_refine)


def _annotate(response: RESPONSE_TYPE, trace: Trace) -> RESPONSE_TYPE:
    """Show what the cache did where users look for it; a stream fills it in while it runs."""
    response.metadata = {**(response.metadata or {}), "fusionrag": trace.info}
    return response
