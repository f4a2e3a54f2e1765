"""LangChain messages as chat turns, and the documents that travel with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, ToolMessage

from fusionrag_engine import FusionRAGError

from .documents import as_documents

if TYPE_CHECKING:
    from fusionrag_engine import Engine

_ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool", "function": "tool"}
_IGNORED_BLOCKS = ("text", "reasoning", "thinking", "tool_use", "tool_call", "tool_result", "non_standard")
"""Content blocks that are text, or whose meaning the message carries elsewhere."""


@dataclass
class Turn:
    """One message. `documents` came with it; those of a tool are what the tool made its text from. `has_context`:
    documents were put in front of the message's own text."""

    role: str
    content: str
    documents: list[Document] = field(default_factory=list)
    has_context: bool = False
    tool_calls: list[dict[str, Any]] = field(default_factory=list)


def make_turns(messages: Sequence[BaseMessage]) -> list[Turn]:
    """Turns of a chat, with the documents in `additional_kwargs["documents"]` and in tools' artifacts.

    Raises:
        FusionRAGError: a message holds an image, a file or sound.
    """
    return [_make_turn(message) for message in messages]


def _make_turn(message: BaseMessage) -> Turn:
    turn = Turn(_role(message), _text(message))
    if isinstance(message, AIMessage):  # "documents" in its kwargs are what another model cites
        turn.tool_calls = [
            {"type": "function", "id": call["id"], "function": {"name": call["name"], "arguments": call["args"]}}
            for call in message.tool_calls
        ]
    elif given := message.additional_kwargs.get("documents"):
        turn.documents = as_documents(given)
    elif isinstance(message, ToolMessage):
        turn.documents = _artifact_documents(message.artifact)
    return turn


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    kind = message.type.removesuffix("MessageChunk").lower()  # AIMessageChunk and its kin
    if kind not in _ROLES:
        raise FusionRAGError(f"a message of type {message.type!r} is not accepted; give one of {', '.join(_ROLES)}")
    return _ROLES[kind]


def _text(message: BaseMessage) -> str:
    for block in message.content if isinstance(message.content, list) else ():
        kind = block.get("type", "text") if isinstance(block, Mapping) else "text"
        if kind not in _IGNORED_BLOCKS:
            raise FusionRAGError(f"a message holds a block of type {kind!r}; the engine's models read text alone")
    return str(message.text)


def _artifact_documents(artifact: Any) -> list[Document]:
    """The Documents in a tool's artifact, which may be anything. From a checkpoint they come back as mappings."""
    items = artifact if isinstance(artifact, (list, tuple)) else [artifact]
    return as_documents([item for item in items if _is_document(item)])


def _is_document(item: Any) -> bool:
    is_mapped = isinstance(item, Mapping) and item.get("type") == "Document" and "page_content" in item
    return isinstance(item, Document) or is_mapped


def render(engine: Engine, turns: Sequence[Turn]) -> str:
    """The turns as the model's prompt text.

    A chat template that refuses them, as those do that want user and assistant in turn or know no tools, gets tool
    results as the user's, and neighbouring turns of one role as one.
    """
    from jinja2.exceptions import TemplateError

    try:
        return engine.render_chat([_message(turn) for turn in turns])
    except TemplateError:
        merged: list[dict[str, Any]] = []
        for turn in turns:
            role = "user" if turn.role == "tool" else turn.role
            if merged and merged[-1]["role"] == role:
                merged[-1]["content"] += "\n\n" + turn.content
            else:
                merged.append({"role": role, "content": turn.content})
        try:
            return engine.render_chat(merged)
        except TemplateError as error:
            roles = [turn.role for turn in turns]
            raise FusionRAGError(
                f"the model's chat template refuses messages of the roles {roles}: {error}; "
                f"give them in an order it takes"
            ) from error


def _message(turn: Turn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.tool_calls:
        message["tool_calls"] = turn.tool_calls
    return message
