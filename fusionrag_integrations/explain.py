"""`explain`: what the cache did for one answer, as a small table. Needs no framework.

Adapters keep a call's counts (`call_info`) where their framework has room for them: LlamaIndex in
`response.metadata["fusionrag"]` and `raw["fusionrag"]`, LangChain in `response_metadata["fusionrag"]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fusionrag_engine import FusionRAGError, Stats

_KEEPERS = ("metadata", "response_metadata", "raw", "stats", "raw_output", "message", "tool_output")
"""Attributes that may hold the counts, directly or below "fusionrag"."""

_TIMES = {"load_s": "load", "assemble_s": "place", "select_s": "select", "prefill_s": "prefill", "decode_s": "decode"}

NOT_EXACT = (
    "the first chunk does not stand behind the engine's own prefix, so even its cached rows are approximate; a prompt "
    "that begins with EngineConfig.system_prompt and then the first chunk (the adapters' default templates) makes it "
    "exact"
)


def call_info(stats: Stats, chunk_ids: Sequence[str | None]) -> dict[str, Any]:
    """What adapters keep of one call: the engine's counts, and the chunks' names in prompt order."""
    return {**stats.as_dict(), "chunk_ids": list(chunk_ids)}


@dataclass(frozen=True)
class ExplainedChunk:
    """One chunk of a prompt.

    Attributes:
        call: number of the prompt it stood in, from 1; an answer may take several.
        id: the caller's name for it (a node or document ID), or None.
        status: see `fusionrag_engine.types.ChunkStatus`.
        num_tokens, num_reused, num_recomputed: its length, rows used as cached, rows cached and computed again. What
            is left of a miss was computed.
        reason: why it is a miss, else None.
    """

    call: int
    id: str | None
    status: str
    num_tokens: int
    num_reused: int
    num_recomputed: int
    reason: str | None = None


@dataclass(frozen=True)
class Explanation:
    """What the cache did for one answer. `str()` is the table.

    Attributes:
        rows: one a chunk and call, in prompt order.
        calls: the engine's counts of each call (`Stats` as a dict), times in seconds.
        dropped: `(id, reason)` of what did not fit into the context.
        notes: what a user could change to get more from the caches.
    """

    rows: list[ExplainedChunk]
    calls: list[Mapping[str, Any]]
    dropped: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = _table(self.rows, with_calls=len(self.calls) > 1) if self.rows else ["no chunks"]
        lines += [_totals(number, call, len(self.calls)) for number, call in enumerate(self.calls, start=1)]
        lines += [f"left out: {name}: {reason}" for name, reason in self.dropped]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def explain(answer: Any) -> Explanation:
    """What the cache did for an answer.

    Args:
        answer: a LlamaIndex response (query or chat engine, LLM, tool output), a LangChain message or generation, an
            engine's `Generation`, `Prefill` or `Stats`, or the dict that an adapter kept. A streamed answer can be
            explained when its stream has ended.

    Raises:
        FusionRAGError: it carries no counts, because no `FusionRAG` LLM answered, or its stream has not ended.
    """
    found = _find(answer)
    if found is None:
        raise FusionRAGError(
            f"a {type(answer).__name__} without cache statistics cannot be explained; give the response or message of "
            f"a FusionRAG LLM, query engine or chain, and read a stream to its end first"
        )
    calls = list(found["calls"]) if "calls" in found else [found]
    rows = [row for number, call in enumerate(calls, start=1) for row in _rows(number, call)]
    dropped = [(str(item["node_id"]), str(item["reason"])) for item in found.get("dropped_nodes", ())]
    notes = list(found.get("notes", ()))
    if any(call["chunk_status"][:1] in (["enriched"], ["plain"]) for call in calls):
        notes.append(NOT_EXACT)
    return Explanation(rows, calls, dropped, notes)


def _find(answer: Any, depth: int = 4) -> Mapping[str, Any] | None:
    """The counts that an object carries, itself or below the attributes adapters use."""
    if isinstance(answer, Stats):
        return answer.as_dict()
    if isinstance(answer, Mapping):
        if "chunk_status" in answer or answer.get("calls"):
            return answer
        if "sub_qa" in answer:  # LlamaIndex's MultiStepQueryEngine: (question, response) of each step
            return _all_of([response for _, response in answer["sub_qa"]], depth)
        return _find(answer["fusionrag"], depth - 1) if "fusionrag" in answer else None
    if depth == 0 or answer is None or isinstance(answer, str):
        return None
    for name in _KEEPERS:
        if (found := _find(getattr(answer, name, None), depth - 1)) is not None:
            return found
    lists = [getattr(answer, name, None) for name in ("sources", "tool_calls")]  # of chat engines and agents
    return _all_of([item for value in lists if isinstance(value, list) for item in value], depth)


def _all_of(answers: Iterable[Any], depth: int) -> Mapping[str, Any] | None:
    """The calls of several answers as those of one."""
    found = [counts for answer in answers if (counts := _find(answer, depth - 1)) is not None]
    if not found:
        return None
    merged: dict[str, Any] = {"calls": [call for counts in found for call in counts.get("calls", [counts])]}
    for name in ("dropped_nodes", "notes"):
        merged[name] = [item for counts in found for item in counts.get(name, ())]
    return merged


def _rows(number: int, call: Mapping[str, Any]) -> list[ExplainedChunk]:
    count = len(call["chunk_status"])
    ids = call.get("chunk_ids") or [None] * count
    rows = []
    for name, status, reason, length, recomputed in zip(
        ids, call["chunk_status"], call["miss_reason"], call["chunk_tokens"], call["chunk_recomputed"], strict=True
    ):
        reused = 0 if status == "miss" else length - recomputed
        rows.append(ExplainedChunk(number, name, status, length, reused, recomputed, reason))
    return rows


def _table(rows: Sequence[ExplainedChunk], with_calls: bool) -> list[str]:
    head = ["chunk", "status", "tokens", "reused", "recomputed", "reason"]
    cells = [
        [row.id or "-", row.status, str(row.num_tokens), str(row.num_reused), str(row.num_recomputed), row.reason or ""]
        for row in rows
    ]
    if with_calls:
        head = ["call", *head]
        cells = [[str(row.call), *cell] for row, cell in zip(rows, cells, strict=True)]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    numbers = {"call", "tokens", "reused", "recomputed"}

    def line(cell: Sequence[str]) -> str:
        pairs = zip(head, cell, widths, strict=True)
        return "  ".join(text.rjust(w) if name in numbers else text.ljust(w) for name, text, w in pairs).rstrip()

    return [line(head), line(["-" * width for width in widths]), *map(line, cells)]


def _totals(number: int, call: Mapping[str, Any], num_calls: int) -> str:
    label = f"call {number}: " if num_calls > 1 else ""
    times = ", ".join(f"{name} {call[key]:.3f}" for key, name in _TIMES.items())
    return (
        f"{label}prompt {call['num_prompt_tokens']} tokens: {call['num_reused_tokens']} reused, "
        f"{call['num_computed_tokens']} computed ({call['num_recomputed_tokens']} of them cached before); "
        f"first token after {call['ttft_s']:.3f} s ({times})"
    )
