"""`FusionRAGSynthesizer`: sends the retrieved nodes to the LLM, whole, so that their caches can be used."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.llms import LLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.response_synthesizers.base import BaseSynthesizer, QueryTextType
from llama_index.core.schema import NodeWithScore
from llama_index.core.types import RESPONSE_TEXT_TYPE

from fusionrag_engine import ConfigError, Engine

from .llm import FusionRAGLLM
from .modes import MODES, Job, Plan
from .prompting import default_refine_template, default_text_qa_template
from .trace import Trace

STRUCTURED = "structured output (output_cls) takes LlamaIndex's own path; chunk caches are not used for it"


class FusionRAGSynthesizer(BaseSynthesizer):
    """Answers from whole nodes: all in one prompt where they fit, else over groups of whole nodes.

    With another LLM than `FusionRAGLLM`, or with `output_cls`, it behaves as LlamaIndex's own synthesizer of that mode.
    What the cache did is in `response.metadata["fusionrag"]` (see `Trace`); nodes that cannot fit are named there.

    Args:
        llm: None is `Settings.llm`.
        response_mode: "compact", "refine", "simple_summarize" or "tree_summarize", as in LlamaIndex.
        text_qa_template: takes `context_str` and `query_str`. None renders to the engine's own layout, where the first
            chunk is an exact prefix.
        refine_template: takes `context_msg`, `query_str` and `existing_answer`.
        summary_template: of "tree_summarize"; takes `context_str` and `query_str`.
        streaming: answer with a stream.
        trace: where to note what the cache did; None is a new one for each response.

    Raises:
        ConfigError: the mode is none of these.
    """

    def __init__(
        self,
        llm: LLM | None = None,
        *,
        response_mode: str | ResponseMode = ResponseMode.COMPACT,
        text_qa_template: BasePromptTemplate | None = None,
        refine_template: BasePromptTemplate | None = None,
        summary_template: BasePromptTemplate | None = None,
        streaming: bool = False,
        callback_manager: CallbackManager | None = None,
        trace: Trace | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(llm=llm, callback_manager=callback_manager, streaming=streaming, **settings)
        self._mode = response_mode.value if isinstance(response_mode, ResponseMode) else response_mode
        if self._mode not in MODES:
            raise ConfigError(f"response_mode={response_mode!r} is not accepted; choose one of {', '.join(MODES)}")
        self._given = {
            "text_qa_template": text_qa_template,
            "refine_template": refine_template,
            "summary_template": summary_template,
        }
        self._trace = trace

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
        trace = self._trace or Trace()
        travelling = {**response_kwargs, "retrieved_nodes": list(nodes), "fusionrag_trace": trace}
        return _annotate(super().synthesize(query, nodes, additional_source_nodes, **travelling), trace)

    async def asynthesize(
        self,
        query: QueryTextType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        trace = self._trace or Trace()
        travelling = {**response_kwargs, "retrieved_nodes": list(nodes), "fusionrag_trace": trace}
        return _annotate(await super().asynthesize(query, nodes, additional_source_nodes, **travelling), trace)

    def get_response(
        self, query_str: str, text_chunks: Sequence[str], prev_response: Any = None, **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        plan, others = self._plan(query_str, prev_response, response_kwargs)
        if plan is None:
            return self._llama_index().get_response(query_str, text_chunks, **others)
        llm: Any = self._llm
        step = next(plan)
        while not step.is_last:
            step = plan.send([llm.predict(ask.template, **ask.arguments) for ask in step.asks])
        (ask,) = step.asks
        answer: Any = (llm.stream if self._streaming else llm.predict)(ask.template, **ask.arguments)
        return answer  # type: ignore[no-any-return]

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], prev_response: Any = None, **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        plan, others = self._plan(query_str, prev_response, response_kwargs)
        if plan is None:
            return await self._llama_index().aget_response(query_str, text_chunks, **others)
        llm: Any = self._llm
        step = next(plan)
        while not step.is_last:
            answers = await asyncio.gather(*(llm.apredict(ask.template, **ask.arguments) for ask in step.asks))
            step = plan.send(answers)
        (ask,) = step.asks
        answer: Any = await (llm.astream if self._streaming else llm.apredict)(ask.template, **ask.arguments)
        return answer  # type: ignore[no-any-return]

    def _plan(
        self, query_str: str, previous: Any, response_kwargs: dict[str, Any]
    ) -> tuple[Plan | None, dict[str, Any]]:
        """The prompts to ask, or None and what LlamaIndex's own synthesizer is called with."""
        others = dict(response_kwargs)
        nodes: list[NodeWithScore] = others.pop("retrieved_nodes", None) or []
        trace = others.pop("fusionrag_trace", None) or Trace()
        if isinstance(self._llm, FusionRAGLLM) and self._output_cls is not None:
            trace.note(STRUCTURED)
        elif isinstance(self._llm, FusionRAGLLM) and nodes:
            first, again = self._templates(self._llm)
            job = Job(self._llm, query_str, nodes, trace, first, again, others, previous)
            return MODES[self._mode](job), {}
        if self._mode in ("compact", "refine"):
            others["prev_response"] = previous
        return None, others

    def _llama_index(self) -> BaseSynthesizer:
        """LlamaIndex's own synthesizer of this mode, with our templates."""
        return get_response_synthesizer(
            llm=self._llm,
            callback_manager=self._callback_manager,
            prompt_helper=self._prompt_helper,
            response_mode=ResponseMode(self._mode),
            text_qa_template=self._given["text_qa_template"],
            simple_template=self._given["text_qa_template"],
            refine_template=self._given["refine_template"],
            summary_template=self._given["summary_template"],
            output_cls=self._output_cls,
            streaming=self._streaming,
        )

    def _templates(self, llm: FusionRAGLLM) -> tuple[BasePromptTemplate, BasePromptTemplate]:
        """Templates of a first prompt, and of one that improves an answer."""
        first = self._given["summary_template" if self._mode == "tree_summarize" else "text_qa_template"]
        again = self._given["refine_template"]
        return first or default_text_qa_template(llm.engine), again or default_refine_template(llm.engine)

    def _get_prompts(self) -> PromptDictType:
        if not isinstance(self._llm, FusionRAGLLM):
            return self._llama_index()._get_prompts()
        first, again = self._templates(self._llm)
        if self._mode == "tree_summarize":
            return {"summary_template": first}
        if self._mode == "simple_summarize":
            return {"text_qa_template": first}
        return {"text_qa_template": first, "refine_template": again}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        self._given.update({name: template for name, template in prompts.items() if name in self._given})


def _annotate(response: RESPONSE_TYPE, trace: Trace) -> RESPONSE_TYPE:
    """Show what the cache did where users look for it; a stream fills it in while it runs."""
    response.metadata = {**(response.metadata or {}), "fusionrag": trace.info}
    return response
