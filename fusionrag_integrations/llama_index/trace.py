"""What the cache did for one response: filled in while it is generated, kept in `response.metadata["fusionrag"]`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from llama_index.core.schema import NodeWithScore

from fusionrag_engine import Engine, Request
from fusionrag_engine.types import Stats, as_chunks
from fusionrag_integrations.explain import call_info

from .pieces import miss_reason


class Trace:
    """Collects the calls of one response. `fusionrag_integrations.explain.explain(response)` shows it as a table.

    Attributes:
        info: `stats` of the last call; `calls`, the stats of each; `nodes`, one entry a node and call with `node_id`,
            `status` and `miss_reason`; `groups`, the node ids of each prompt - more than one where the answer was
            refined or summarized over groups of nodes; `dropped_nodes`, nodes that did not fit into the context, with
            the reason; `notes`, why chunk caches could not be used at all. For a streamed response it is complete when
            the stream has ended.
    """

    def __init__(self) -> None:
        self.info: dict[str, Any] = {
            "stats": None,
            "calls": [],
            "nodes": [],
            "groups": [],
            "dropped_nodes": [],
            "notes": [],
        }

    def add(self, call: dict[str, Any]) -> None:
        """Take up the counts of one call, as `count_call` gives them."""
        self.info["stats"] = call
        self.info["calls"].append(call)
        self.info["nodes"] += node_entries(call)

    def group(self, node_ids: Sequence[str]) -> None:
        self.info["groups"].append(list(node_ids))

    def drop(self, node_id: str, reason: str) -> None:
        self.info["dropped_nodes"].append({"node_id": node_id, "reason": reason})

    def note(self, text: str) -> None:
        if text not in self.info["notes"]:
            self.info["notes"].append(text)


def count_call(engine: Engine, request: Request, stats: Stats, nodes: Sequence[NodeWithScore]) -> dict[str, Any]:
    """The counts of one call, with the reason for each miss. `nodes` are the request's, in prompt order."""
    chunks = as_chunks(request.chunks)
    if request.method != "full":
        reasons = [
            miss_reason(engine, chunk, node.node) if status == "miss" else reason
            for chunk, node, status, reason in zip(chunks, nodes, stats.chunk_status, stats.miss_reason, strict=True)
        ]
        stats = replace(stats, miss_reason=reasons)
    return call_info(stats, [chunk.id for chunk in chunks])


def node_entries(call: dict[str, Any]) -> list[dict[str, Any]]:
    """What the cache did for each node of a call, in prompt order."""
    entries = zip(call["chunk_ids"], call["chunk_status"], call["miss_reason"], strict=True)
    return [{"node_id": name, "status": status, "miss_reason": reason} for name, status, reason in entries]
