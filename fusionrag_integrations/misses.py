"""Why a chunk missed, told from what was recorded with its node or document when it was ingested."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .chroma.record import CacheRecord

if TYPE_CHECKING:
    from fusionrag_engine import Chunk, Engine

NO_RECORD = "no cache of this text, and nothing recorded with it says that it ever had one: ingest it"


def why_missed(engine: Engine, chunk: Chunk, record: CacheRecord | None, others: Iterable[tuple[str, str]] = ()) -> str:
    """The reason for a miss, and what repairs it.

    Args:
        chunk: as it stood in the prompt.
        record: what ingestion noted with its node or document; None where there is nothing.
        others: `(what it would mean, text)`: texts that may be the ones that were cached, likeliest first.
    """
    if record is None:
        return NO_RECORD
    if record.scope != chunk.scope:
        return (
            f"cached in scope {record.scope!r}, asked for in scope {chunk.scope!r}: give the LLM the scope of ingestion"
        )
    if not record.fingerprint or engine.fingerprint(chunk.text) == record.fingerprint:
        if engine.content_key(chunk) == record.key:
            return "it was cached, but its file is gone (dropped for disk_bytes, deleted, or damaged): ingest it again"
        return (
            "it was cached by an engine with another model, tokenizer, dtype, codec or system prompt: ingest it again "
            "with this one"
        )
    differs = "the text differs from what was cached"
    for meaning, text in others:
        if engine.fingerprint(text) == record.fingerprint:
            return f"{differs}: {meaning}"
    num_tokens = engine.count_tokens(chunk.text)
    return (
        f"{differs} ({record.num_tokens} tokens then, {num_tokens} now): a postprocessor, query engine or template "
        f"changed it, or it was edited without a new ingestion"
    )


def may_store(engine: Engine, text: str, scope: str, record: CacheRecord | None) -> bool:
    """Whether a question may store a cache of this text under its node's name: not where the node's own, recorded text
    is another one, whose cache it would replace, nor where it was ingested into another scope."""
    if record is None:
        return True
    is_same = not record.fingerprint or engine.fingerprint(text) == record.fingerprint
    return is_same and record.scope == scope
