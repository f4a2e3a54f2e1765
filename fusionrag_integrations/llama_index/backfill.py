"""Nodes out of the rows of a Chroma collection, and their cache records back into them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.utils import metadata_dict_to_node, node_to_metadata_dict

from fusionrag_integrations.chroma.record import KEYS

if TYPE_CHECKING:
    from chromadb.api.models.Collection import Collection

logger = logging.getLogger("fusionrag")

NODE = "_node_content"
"""LlamaIndex reads a node from this key alone, and filters by the keys beside it: both copies are written."""


def read_nodes(collection: Collection) -> list[BaseNode]:
    """The nodes that LlamaIndex wrote into a collection, with their embeddings."""
    nodes: list[BaseNode] = []
    num_others = 0
    for row in _rows(collection):
        if not row["metadata"] or NODE not in row["metadata"]:
            num_others += 1
            continue
        node = metadata_dict_to_node(row["metadata"], text=row["document"] or "")
        node.embedding = [float(value) for value in row["embedding"]]
        nodes.append(node)
    if num_others:
        logger.warning("%d rows of %s were not written by LlamaIndex and are left alone", num_others, collection.name)
    return nodes


def write_records(collection: Collection, nodes: Sequence[BaseNode]) -> None:
    """Write the nodes' metadata over that of their rows; texts and embeddings stay."""
    size = collection._client.get_max_batch_size()
    for start in range(0, len(nodes), size):
        batch = nodes[start : start + size]
        # An update merges, so keys that a record does not have any more are taken away by None.
        metadatas: list[Any] = [{**dict.fromkeys(KEYS), **_metadata(node)} for node in batch]
        collection.update(ids=[node.node_id for node in batch], metadatas=metadatas)


def _metadata(node: BaseNode) -> dict[str, Any]:
    found = node_to_metadata_dict(node, remove_text=True, flat_metadata=True)
    return {key: "" if value is None else value for key, value in found.items()}


def _rows(collection: Collection) -> Iterator[dict[str, Any]]:
    """Every row, read in pages."""
    size = collection._client.get_max_batch_size()
    for offset in range(0, collection.count(), size):
        page = collection.get(limit=size, offset=offset, include=["documents", "metadatas", "embeddings"])
        columns: list[Any] = [page["metadatas"], page["documents"], page["embeddings"]]
        for metadata, document, embedding in zip(*columns, strict=True):
            yield {"metadata": metadata, "document": document, "embedding": embedding}
