"""`FusionRAGSynthesizer`: sends the retrieved nodes to the LLM, whole, so that their caches can be used."""

from __future__ import annotations

import logging
from collections.abc import Sequence
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

from fusionrag_engine import ContextOverflowError

from .llm import FusionRAGLLM
from .prompting import (
    context_text,
    context_variable,
    default_refine_template,
    default_text_qa_template,
    node_text,
    render_messages,
)
from .trace import Trace

logger = logging.getLogger("fusionrag")


class FusionRAGSynthesizer(BaseSynthesizer):
    """Answers from whole nodes: all in one prompt where they fit, else refined over groups of whole nodes.

    With another LLM than `FusionRAGLLM` it behaves as LlamaIndex's `CompactAndRefine`. What the cache did is in
    `response.metadata["fusionrag"]` (see `Trace`); nodes that cannot fit are named there.

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
    def from_engine(cls, engine: Any, **settings: Any) -> FusionRAGSynthesizer:
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
        groups = self._pack(llm, query_str, nodes, trace)
        for number, group in enumerate(groups):
            template, arguments = self._arguments(llm, query_str, group, answer)
            arguments.update(others, retrieved_nodes=group, fusionrag_trace=trace)
            is_last = number == len(groups) - 1
            answer = (llm.stream if self._streaming and is_last else llm.predict)(template, **arguments)
        return answer  # type: ignore[no-any-return]

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], prev_response: Any = None, **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        llm, nodes, trace, others = self._unpack(response_kwargs)
        if llm is None or not nodes:
            return await self._compact_and_refine().aget_response(query_str, text_chunks, prev_response, **others)
        answer: Any = prev_response
        groups = self._pack(llm, query_str, nodes, trace)
        for number, group in enumerate(groups):
            template, arguments = self._arguments(llm, query_str, group, answer)
            arguments.update(others, retrieved_nodes=group, fusionrag_trace=trace)
            is_last = number == len(groups) - 1
            answer = await (llm.astream if self._streaming and is_last else llm.apredict)(template, **arguments)
        return answer  # type: ignore[no-any-return]

    def _unpack(
        self, response_kwargs: dict[str, Any]
    ) -> tuple[FusionRAGLLM | None, list[NodeWithScore], Trace, dict[str, Any]]:
        others = dict(response_kwargs)
        nodes = others.pop("retrieved_nodes", None) or []
        trace = others.pop("fusionrag_trace", None) or Trace()
        return (self._llm if isinstance(self._llm, FusionRAGLLM) else None), nodes, trace, others

    def _compact_and_refine(self) -> CompactAndRefine:
        """LlamaIndex's own synthesizer with our templates, for other LLMs."""
        return CompactAndRefine(
            llm=self._llm,
            callback_manager=self._callback_manager,
            prompt_helper=self._prompt_helper,
            text_qa_template=self._given_qa,
            refine_template=self._given_refine,
            output_cls=self._output_cls,
            streaming=self._streaming,
        )

    def _templates(self, llm: FusionRAGLLM) -> tuple[BasePromptTemplate, BasePromptTemplate]:
        qa = self._given_qa or default_text_qa_template(llm.engine)
        return qa, self._given_refine or default_refine_template(llm.engine)

    def _arguments(
        self, llm: FusionRAGLLM, query_str: str, group: list[NodeWithScore], answer: Any
    ) -> tuple[BasePromptTemplate, dict[str, Any]]:
        qa, refine = self._templates(llm)
        template = qa if answer is None else refine
        name = context_variable(template) or ("context_str" if answer is None else "context_msg")
        arguments: dict[str, Any] = {"query_str": query_str, name: context_text(llm.engine, group)}
        if answer is not None:
            arguments["existing_answer"] = str(answer)
        return template, arguments

    def _pack(
        self, llm: FusionRAGLLM, query_str: str, nodes: list[NodeWithScore], trace: Trace
    ) -> list[list[NodeWithScore]]:
        """Groups of whole nodes, in order, that fit into the context with the question and room for the answer.

        Raises:
            ContextOverflowError: not a single node fits.
        """
        engine = llm.engine
        separator = engine.count_tokens(engine.config.chunk_separator)
        single = self._room(llm, query_str, is_refined=False)
        sizes = [engine.count_tokens(node_text(node)) for node in nodes]
        room = single if sum(sizes) + separator * len(sizes) <= single else self._room(llm, query_str, is_refined=True)
        groups: list[list[NodeWithScore]] = []
        left = 0
        for node, size in zip(nodes, sizes, strict=True):
            if size > room:
                reason = f"the node has {size} tokens, but only {room} fit beside the question and the answer"
                logger.warning("node %s is left out: %s", node.node.node_id, reason)
                trace.drop(node.node.node_id, reason)
                continue
            if not groups or size + separator > left:
                groups.append([])
                left = room
            groups[-1].append(node)
            left -= size + separator
        if not groups:
            raise ContextOverflowError(f"none of {len(nodes)} nodes fits into the context; split the documents smaller")
        return groups

    def _room(self, llm: FusionRAGLLM, query_str: str, is_refined: bool) -> int:
        """Tokens that nodes may take in one prompt."""
        engine = llm.engine
        template, arguments = self._arguments(llm, query_str, [], "" if is_refined else None)
        rendered = render_messages(engine, llm._get_messages(template, **arguments))
        num_answers = 2 if is_refined else 1  # the answer so far stands in a refine prompt
        return engine.max_context - engine.count_tokens(rendered) - num_answers * llm.max_new_tokens

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
