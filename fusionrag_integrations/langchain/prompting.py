"""From a chat, or a text, with documents to an engine request: the prompt is rendered whole, then split around the
documents' texts, each of which becomes a chunk."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document

from fusionrag_engine import Chunk, Request
from fusionrag_engine.types import Stats
from fusionrag_integrations.explain import call_info

from .documents import ID_KEY, make_chunk, miss_reason
from .locate import locate
from .messages import Turn, render

if TYPE_CHECKING:
    from fusionrag_engine import Engine

logger = logging.getLogger("fusionrag")


@dataclass(frozen=True)
class DocumentPrompt:
    """A prompt over documents: chunks, the documents they are from, and the text around them (`Request.text_around`).
    `notes` says which documents could not be found in it."""

    question: str
    chunks: list[Chunk]
    documents: list[Document]
    text_around: list[str]
    notes: list[str]

    def request(self, **settings: Any) -> Request:
        """The request. Without chunks there is no cache to look for: ordinary prefill."""
        if not self.chunks:
            settings.update(method="full", recompute_ratio=None)
        return Request(self.question, self.chunks, text_around=self.text_around, **settings)


def chat_prompt(
    engine: Engine, turns: Sequence[Turn], documents: Sequence[Document], *, scope: str | None, can_place: bool = True
) -> DocumentPrompt:
    """The prompt of a chat.

    Args:
        documents: beside those that came with the turns. Where the chat holds the text of none of them, all are put in
            front of the last user turn, and documents of a user turn in front of that one, in the engine's own layout:
            its system prompt where the chat has none, its separators, its question template.
        scope: whose caches are used; None is the one each document was ingested into.
        can_place: False where the chat is known to hold `documents` in some form.
    """
    turns = list(turns)
    known = {document.page_content for turn in turns for document in turn.documents}
    others = [document for document in documents if document.page_content not in known]
    if others and can_place and not any(holds(turn, others) for turn in turns):
        users = [index for index, turn in enumerate(turns) if turn.role == "user"]
        last = users[-1] if users else len(turns) - 1
        turns[last] = _in_front(engine, others, turns[last])
    for index, turn in enumerate(turns):
        if turn.documents and turn.role == "user" and not holds(turn, turn.documents):
            turns[index] = _in_front(engine, turn.documents, turn)
    if any(turn.has_context for turn in turns) and all(turn.role != "system" for turn in turns):
        system = [item for item in engine.default_messages("", "") if item["role"] == "system"]
        turns = [Turn(item["role"], item["content"]) for item in system] + turns
    everything = [document for turn in turns for document in turn.documents] + others
    question = next((turn.content for turn in reversed(turns) if turn.role == "user"), "")
    return split_prompt(render(engine, turns), everything, question, scope)


def holds(turn: Turn, documents: Sequence[Document]) -> bool:
    """Whether a turn's text has the text of one of the documents in it."""
    return any(locate([document.page_content], turn.content)[0] for document in documents)


def _in_front(engine: Engine, documents: Sequence[Document], turn: Turn) -> Turn:
    """The turn with documents before its text, as in the engine's own layout."""
    context = engine.config.chunk_separator.join(document.page_content for document in documents)
    question = engine.config.question_template.replace("{question}", turn.content)
    return replace(turn, content=context + question, has_context=True)


def split_prompt(prompt: str, documents: Sequence[Document], question: str, scope: str | None) -> DocumentPrompt:
    """A rendered prompt, split around the texts of the documents that stand in it."""
    spans = locate([document.page_content for document in documents], prompt)
    placed = sorted(
        ((span, document) for span, document in zip(spans, documents, strict=True) if span), key=lambda item: item[0]
    )
    chunks, around, end = [], [], 0
    for (start, stop), document in placed:
        chunks.append(make_chunk(document, prompt[start:stop], scope))
        around.append(prompt[end:start])
        end = stop
    notes = [_note(document, prompt) for span, document in zip(spans, documents, strict=True) if span is None]
    for note in notes:
        logger.warning("%s", note)
    return DocumentPrompt(question, chunks, [document for _, document in placed], [*around, prompt[end:]], notes)


def _note(document: Document, prompt: str) -> str:
    text = document.page_content.strip()
    name = document.metadata.get(ID_KEY) or document.id or f"{text[:30]!r}..."
    if not text:
        reason = "it has no text"
    elif text in prompt:
        reason = "its text stands in the prompt less often than it was given, or within another document's"
    else:
        reason = (
            "its text does not stand in the prompt as it is: a prompt, tool or chat template changed it or left it out"
        )
    return f"document {name} uses no cache: {reason}"


def call_metadata(prompt: DocumentPrompt, request: Request, stats: Stats) -> dict[str, Any]:
    """What is kept of a call for `explain`; flat values, lists and strings."""
    info = call_info(stats, [chunk.id for chunk in prompt.chunks])
    if request.method != "full":
        rows = zip(stats.chunk_status, prompt.documents, prompt.chunks, strict=True)
        info["miss_reason"] = [
            miss_reason(document, chunk) if status == "miss" else None for status, document, chunk in rows
        ]
    return {**info, "notes": prompt.notes}
