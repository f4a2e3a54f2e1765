"""A template and the retrieved nodes become one chat call: its messages, and beside them the prompt over chunks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.schema import BaseNode, NodeWithScore

from . import steps
from .pieces import context_text
from .prompting import MARK, NodePrompt, context_variable, split_prompt
from .trace import Trace

if TYPE_CHECKING:
    from .llm import FusionRAGLLM

logger = logging.getLogger("fusionrag")


@dataclass(frozen=True)
class NodeCall:
    """What travels beside the messages of one chat call: the prompt over nodes, if the template allows one, and where
    its counts go."""

    prompt: NodePrompt | None
    trace: Trace


@dataclass(frozen=True)
class Prepared:
    """A call that is ready: messages as any LLM would get them, and the variables they were rendered from."""

    call: NodeCall
    messages: list[ChatMessage]
    arguments: dict[str, Any]


def take_nodes(prompt_args: Mapping[str, Any]) -> tuple[list[NodeWithScore], Trace | None, dict[str, Any]]:
    """What the synthesizer sent along, and the template's own variables."""
    arguments = dict(prompt_args)
    given: list[NodeWithScore | BaseNode] = arguments.pop("retrieved_nodes", None) or []
    nodes = [node if isinstance(node, NodeWithScore) else NodeWithScore(node=node) for node in given]
    return nodes, arguments.pop("fusionrag_trace", None), arguments


def prepare(llm: FusionRAGLLM, prompt: BasePromptTemplate, prompt_args: Mapping[str, Any]) -> Prepared | None:
    """The call over the nodes among `prompt_args`; None where there are none and nobody wants to know what was done."""
    nodes, trace, arguments = take_nodes(prompt_args)
    if not nodes and trace is None:
        return None
    trace = trace or Trace()
    with steps.own_errors():
        found = _over_nodes(llm, prompt, nodes, arguments, trace) if nodes else None
        return Prepared(NodeCall(found, trace), llm._get_messages(prompt, **arguments), arguments)


def _over_nodes(
    llm: FusionRAGLLM,
    prompt: BasePromptTemplate,
    nodes: list[NodeWithScore],
    arguments: dict[str, Any],
    trace: Trace,
) -> NodePrompt | None:
    """The prompt over nodes; None, with a warning, where the template does not take its context in one place.

    Where `arguments` have no context yet, they get the nodes' texts.
    """
    variable = context_variable(prompt)
    if variable is None:
        _refuse(trace, "the prompt template has no plain context variable (context_str or context_msg)")
        return None
    marked = {**arguments, variable: MARK}
    question = {**prompt.kwargs, **arguments}.get("query_str", "")
    found = split_prompt(llm.engine, llm._get_messages(prompt, **marked), nodes, str(question), llm.scope)
    if variable not in arguments:
        arguments[variable] = context_text(llm.engine, nodes)
    if found is None:
        _refuse(trace, f"the prompt template does not put {variable} into the prompt exactly once")
    return found


def _refuse(trace: Trace, reason: str) -> None:
    text = f"{reason}; chunk caches are not used for it"
    logger.warning("%s", text)
    trace.note(text)
