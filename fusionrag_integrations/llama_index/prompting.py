"""From a LlamaIndex prompt template and nodes to an engine request.

The template is rendered with a mark in place of the context, the chat template is applied once, and the text is split
at the mark. The nodes' texts go between, each a chunk of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.prompts import BasePromptTemplate, ChatPromptTemplate
from llama_index.core.schema import NodeWithScore

from fusionrag_engine import Chunk

from .pieces import make_piece

if TYPE_CHECKING:
    from fusionrag_engine import Engine

MARK = "\u2402retrieved-nodes\u2403"
CONTEXT_VARIABLES = ("context_str", "context_msg")


@dataclass(frozen=True)
class NodePrompt:
    """A prompt over nodes: a chunk each, and the rendered text around them (`Request.text_around`)."""

    question: str
    nodes: list[NodeWithScore]
    chunks: list[Chunk]
    text_around: list[str]


def default_text_qa_template(engine: Engine) -> ChatPromptTemplate:
    """The template whose rendering is the engine's own layout, so that the first chunk is an exact prefix."""
    messages = engine.default_messages("{context_str}", "{query_str}")
    return ChatPromptTemplate([ChatMessage(role=turn["role"], content=turn["content"]) for turn in messages])


def default_refine_template(engine: Engine) -> ChatPromptTemplate:
    """As the default template, with the answer so far behind the question."""
    question = "{query_str}\nThe answer so far, from other documents: {existing_answer}\nImprove it if these help."
    messages = engine.default_messages("{context_msg}", question)
    return ChatPromptTemplate([ChatMessage(role=turn["role"], content=turn["content"]) for turn in messages])


def context_variable(prompt: BasePromptTemplate) -> str | None:
    """The variable of a template that takes the context; None where there is none, or a function computes it."""
    names = [name for name in CONTEXT_VARIABLES if name in _variables(prompt)]
    functions = prompt.function_mappings or {}
    return names[0] if len(names) == 1 and names[0] not in functions else None


def _variables(prompt: BasePromptTemplate) -> set[str]:
    """Names a caller may pass to a template: its variables, under the names it maps them from."""
    mappings = prompt.template_var_mappings or {}
    return set(prompt.template_vars) | set(mappings)


def render_messages(engine: Engine, messages: Sequence[ChatMessage]) -> str:
    """Chat messages as the model's prompt text."""
    return engine.render_chat([{"role": _role(item), "content": item.content or ""} for item in messages])


def _role(message: ChatMessage) -> str:
    role = message.role
    return role.value if isinstance(role, MessageRole) else str(role)


def split_prompt(
    engine: Engine, messages: Sequence[ChatMessage], nodes: Sequence[NodeWithScore], question: str, scope: str
) -> NodePrompt | None:
    """A prompt over nodes from messages that contain `MARK`; None unless the mark is rendered exactly once."""
    rendered = render_messages(engine, messages)
    if rendered.count(MARK) != 1:
        return None
    head, tail = rendered.split(MARK)
    chunks, around = [], [head]
    for number, node in enumerate(nodes, start=1):
        before, chunk, after = make_piece(engine, node, scope)
        chunks.append(chunk)
        around[-1] += before
        around.append(after + (engine.config.chunk_separator if number < len(nodes) else tail))
    return NodePrompt(question, list(nodes), chunks, around)


def count_frame_tokens(engine: Engine, messages: Sequence[ChatMessage]) -> int:
    """Tokens of a prompt without its nodes, from messages that contain `MARK`; each piece is tokenized apart."""
    pieces = render_messages(engine, messages).split(MARK)
    return 1 + sum(engine.count_tokens(piece) for piece in pieces)  # 1: a BOS
