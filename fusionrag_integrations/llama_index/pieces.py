"""From a node to its piece of the prompt: a chunk, and the text beside it that is not the node's own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore

from fusionrag_engine import Chunk
from fusionrag_integrations.chroma.record import PREFIX, CacheRecord
from fusionrag_integrations.misses import may_store, why_missed

if TYPE_CHECKING:
    from fusionrag_engine import Engine

_CITATION = re.compile(r"(Source \d+:\n)(.*)(\n)", re.DOTALL)
"""How `CitationQueryEngine` numbers a source, in the text of a new node with the metadata of the old one."""


def node_text(node: NodeWithScore | BaseNode) -> str:
    """Exactly the text of a node that reaches the prompt, and that ingestion caches."""
    return (node.node if isinstance(node, NodeWithScore) else node).get_content(metadata_mode=MetadataMode.LLM)


def split_text(node: NodeWithScore) -> tuple[str, str, str]:
    """A node's text in the prompt: what stands before its chunk, the chunk, and what stands after it.

    The number of a citation stands before the chunk (and before its metadata, if the LLM is shown any), so that the
    chunk is the text that ingestion cached.
    """
    before, original, after = _without_label(node.node)
    return before, node_text(original), after


def make_piece(engine: Engine, node: NodeWithScore, scope: str) -> tuple[str, Chunk, str]:
    """As `split_text`, with the text's chunk.

    What lives for one question is not stored, because nobody would delete it later: a numbered source, an answer to a
    sub-question (no retriever gave it a score), text that a postprocessor put in.
    """
    before, text, after = split_text(node)
    record = CacheRecord.from_metadata(node.node.metadata)
    is_retrieved = record is not None or node.score is not None
    can_store = is_retrieved and not before and may_store(engine, text, scope, record)
    return before, Chunk(text, id=node.node.node_id, scope=scope, can_store=can_store), after


def _without_label(node: BaseNode) -> tuple[str, BaseNode, str]:
    match = _CITATION.fullmatch(node.get_content(MetadataMode.NONE))
    if match is None:
        return "", node, ""
    before, text, after = match.groups()
    original = node.model_copy()
    original.set_content(text)
    return before, original, after


def context_text(engine: Engine, nodes: Sequence[NodeWithScore]) -> str:
    """The nodes' texts as one context, for whatever wants a string."""
    return engine.config.chunk_separator.join("".join(split_text(node)) for node in nodes)


def miss_reason(engine: Engine, chunk: Chunk, node: BaseNode) -> str:
    """Why this node's chunk was not found."""
    return why_missed(engine, chunk, CacheRecord.from_metadata(node.metadata), _cached_instead(node))


def _cached_instead(node: BaseNode) -> Iterator[tuple[str, str]]:
    """Texts that may have been cached in place of the one in the prompt, with what each would mean."""
    _, original, _ = _without_label(node)
    for key, value in node.metadata.items():
        if isinstance(value, str) and value:
            before = original.model_copy()
            before.set_content(value)
            yield f"a postprocessor replaced it; what was cached is metadata[{key!r}] now", node_text(before)
    hidden = node.excluded_llm_metadata_keys
    for key in (key for key in node.metadata if not key.startswith(PREFIX)):
        is_shown = key not in hidden
        other = [*hidden, key] if is_shown else [name for name in hidden if name != key]
        before = original.model_copy(update={"excluded_llm_metadata_keys": other})
        meaning = "reaches the prompt now, and did not then" if is_shown else "is excluded from the prompt now"
        yield f"metadata {key!r} {meaning}; see excluded_llm_metadata_keys, or ingest again", node_text(before)
    for mode in (MetadataMode.NONE, MetadataMode.EMBED, MetadataMode.ALL):
        meaning = f"it was cached with metadata mode {mode.value!r}, the prompt has {MetadataMode.LLM.value!r}"
        yield f"{meaning}: excluded_llm_metadata_keys changed since", original.get_content(mode)
