"""The ways an answer is put together from nodes: which prompts, over which of them, in which order.

A mode is a generator of rounds. It gets the answers of a round back, except of the last one, whose answer is the
response. So one plan serves sync, async and streaming.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.schema import NodeWithScore

from .llm import FusionRAGLLM
from .packing import pack, pack_best, pack_texts
from .pieces import context_text
from .prompting import MARK, context_variable, count_frame_tokens
from .trace import Trace


@dataclass(frozen=True)
class Ask:
    """One prompt: a template and what it is called with."""

    template: BasePromptTemplate
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Round:
    """Prompts that do not need each other's answers. The last round has one."""

    asks: list[Ask]
    is_last: bool


Plan = Generator[Round, list[str], None]


@dataclass(frozen=True)
class Job:
    """One question to put together an answer for.

    Attributes:
        first, again: templates of a first prompt, and of one that improves an answer.
        others: further template variables, from the caller of the synthesizer.
        previous: an answer to begin with, or None.
    """

    llm: FusionRAGLLM
    query: str
    nodes: list[NodeWithScore]
    trace: Trace
    first: BasePromptTemplate
    again: BasePromptTemplate
    others: Mapping[str, Any]
    previous: Any = None

    def ask(self, nodes: Sequence[NodeWithScore], answer: Any = None) -> Ask:
        """A prompt over nodes; `answer` is the answer so far, None before the first one."""
        return self._ask(context_text(self.llm.engine, nodes), answer, list(nodes))

    def ask_over(self, text: str) -> Ask:
        """A first prompt over text that is no node's."""
        return self._ask(text, None, [])

    def _ask(self, context: str, answer: Any, nodes: list[NodeWithScore]) -> Ask:
        template = self.first if answer is None else self.again
        name = context_variable(template) or ("context_str" if answer is None else "context_msg")
        arguments: dict[str, Any] = {"query_str": self.query, name: context, **self.others}
        if answer is not None:
            arguments["existing_answer"] = str(answer)
        return Ask(template, {**arguments, "retrieved_nodes": nodes, "fusionrag_trace": self.trace})

    def room(self, is_refined: bool) -> int:
        """Tokens that context may take in a prompt; one that refines has the answer so far in it as well."""
        ask = self._ask(MARK, "" if is_refined else None, [])
        num_frame = count_frame_tokens(self.llm.engine, self.llm._get_messages(ask.template, **ask.arguments))
        num_answers = 2 if is_refined else 1
        return self.llm.engine.max_context - num_frame - num_answers * self.llm.max_new_tokens


def compact(job: Job) -> Plan:
    """As many nodes a prompt as fit; the answer is improved from prompt to prompt."""
    return _improve(job, pack(job.llm.engine, job.nodes, job.room, job.trace))


def refine(job: Job) -> Plan:
    """As `compact`, with one node a prompt."""
    return _improve(job, pack(job.llm.engine, job.nodes, job.room, job.trace, is_one_each=True))


def _improve(job: Job, groups: list[list[NodeWithScore]]) -> Plan:
    answer: Any = job.previous
    for number, group in enumerate(groups, start=1):
        (answer,) = yield Round([job.ask(group, answer)], number == len(groups))


def simple_summarize(job: Job) -> Plan:
    """One prompt; nodes that do not fit are left out, lowest scores first."""
    yield Round([job.ask(pack_best(job.llm.engine, job.nodes, job.room, job.trace))], True)


def tree_summarize(job: Job) -> Plan:
    """An answer a group of nodes, then an answer from these answers, until one is left."""
    groups = pack(job.llm.engine, job.nodes, lambda _is_refined: job.room(False), job.trace)
    asks = [job.ask(group) for group in groups]
    while len(asks) > 1:
        answers = yield Round(asks, False)
        asks = [job.ask_over(text) for text in pack_texts(job.llm.engine, answers, job.room(False))]
    yield Round(asks, True)


MODES: dict[str, Callable[[Job], Plan]] = {
    "compact": compact,
    "refine": refine,
    "simple_summarize": simple_summarize,
    "tree_summarize": tree_summarize,
}
"""By the names of LlamaIndex's `ResponseMode`."""
