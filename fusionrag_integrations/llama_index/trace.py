"""What the cache did for one response: filled in while it is generated, kept in `response.metadata["fusionrag"]`."""

from __future__ import annotations

from typing import Any

from fusionrag_engine import Request
from fusionrag_engine.types import Stats, as_chunks


class Trace:
    """Collects the calls of one response.

    Attributes:
        info: `stats` of the last call; `calls`, the stats of each; `nodes`, one entry a node and call with `node_id`,
            `status` and `miss_reason`; `dropped_nodes`, nodes that did not fit into the context, with the reason. For a
            streamed response it is complete when the stream has ended.
    """

    def __init__(self) -> None:
        self.info: dict[str, Any] = {"stats": None, "calls": [], "nodes": [], "dropped_nodes": []}

    def add(self, request: Request, stats: Stats) -> None:
        values = stats.as_dict()
        self.info["stats"] = values
        self.info["calls"].append(values)
        for chunk, status, reason in zip(as_chunks(request.chunks), stats.chunk_status, stats.miss_reason, strict=True):
            self.info["nodes"].append({"node_id": chunk.id, "status": status, "miss_reason": reason})

    def drop(self, node_id: str, reason: str) -> None:
        self.info["dropped_nodes"].append({"node_id": node_id, "reason": reason})
