"""What the cache did for one response: filled in while it is generated, kept in `response.metadata["fusionrag"]`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusionrag_engine import Request
from fusionrag_engine.types import Stats, as_chunks


class Trace:
    """Collects the calls of one response.

    Attributes:
        info: `stats` of the last call; `calls`, the stats of each; `nodes`, one entry a node and call with `node_id`,
            `status` and `miss_reason`; `groups`, the node ids of each prompt - more than one where the answer was
            refined over groups of nodes; `dropped_nodes`, nodes that did not fit into the context, with the reason. For
            a streamed response it is complete when the stream has ended.
    """

    def __init__(self) -> None:
        self.info: dict[str, Any] = {"stats": None, "calls": [], "nodes": [], "groups": [], "dropped_nodes": []}

    def add(self, request: Request, stats: Stats) -> None:
        values = stats.as_dict()
        self.info["stats"] = values
        self.info["calls"].append(values)
        self.info["nodes"] += node_entries(request, stats)

    def group(self, node_ids: Sequence[str]) -> None:
        self.info["groups"].append(list(node_ids))

    def drop(self, node_id: str, reason: str) -> None:
        self.info["dropped_nodes"].append({"node_id": node_id, "reason": reason})


def node_entries(request: Request, stats: Stats) -> list[dict[str, Any]]:
    """What the cache did for each node of a request, in prompt order."""
    entries = zip(as_chunks(request.chunks), stats.chunk_status, stats.miss_reason, strict=True)
    return [{"node_id": chunk.id, "status": status, "miss_reason": reason} for chunk, status, reason in entries]
