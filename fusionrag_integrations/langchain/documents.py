"""Documents of a call, and the reference that ingestion leaves in a document's metadata."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from langchain_core.documents import Document

from fusionrag_engine import Chunk, ConfigError
from fusionrag_integrations.chroma.record import PREFIX

ID_KEY = PREFIX + "id"
SCOPE_KEY = PREFIX + "scope"
KEYS = (ID_KEY, SCOPE_KEY)
"""The metadata that `FusionRAGDocumentTransformer` writes. LangChain prompts often print a document's whole metadata,
and `index()` hashes it: so there is little, and it is the same whenever the same document is ingested."""

_TEXT_DIGITS = 16


def reference(document: Document, scope: str) -> str:
    """The name of a document's caches: 16 hex digits over its text, "-", 8 over its metadata and the scope.

    Documents of different sources have different names, though their text and so their cache may be the same.
    """
    metadata = {key: value for key, value in document.metadata.items() if key not in KEYS}
    beside = json.dumps([metadata, scope], sort_keys=True, default=str)
    return f"{_digest(document.page_content)[:_TEXT_DIGITS]}-{_digest(beside)[:8]}"


def with_reference(document: Document, scope: str) -> Document:
    """A copy that names its caches; the document is left alone."""
    metadata = {key: value for key, value in document.metadata.items() if key not in KEYS}
    metadata[ID_KEY] = reference(document, scope)
    if scope:
        metadata[SCOPE_KEY] = scope
    return document.model_copy(update={"metadata": metadata})


def ingested_scope(document: Document, otherwise: str) -> str:
    """The scope a document was ingested into; `otherwise` where it was not."""
    return str(document.metadata.get(SCOPE_KEY) or "") if ID_KEY in document.metadata else otherwise


def is_ingested_text(text: str, metadata: Mapping[str, Any]) -> bool:
    """Whether a text is the one its document had at ingestion; True where the document was never ingested."""
    name = metadata.get(ID_KEY)
    return not isinstance(name, str) or name[:_TEXT_DIGITS] == _digest(text)[:_TEXT_DIGITS]


def make_chunk(document: Document, text: str, scope: str | None) -> Chunk:
    """The chunk of a document that stands in the prompt as `text`. `scope` None is the one it was ingested into."""
    name = document.metadata.get(ID_KEY) or document.id
    used = ingested_scope(document, "") if scope is None else scope
    # What a compressor made for one question must not take the ingested text's place under the document's name.
    is_own = is_ingested_text(text, document.metadata) and used == ingested_scope(document, used)
    return Chunk(text, id=None if name is None else str(name), scope=used, can_store=is_own)


def miss_reason(document: Document, chunk: Chunk) -> str:
    """Why a document's chunk was not found, and what repairs it."""
    if ID_KEY not in document.metadata:
        return (
            "no cache of this text, and the document was not ingested by FusionRAGDocumentTransformer; its plain cache "
            "is made now, in the background"
        )
    if not is_ingested_text(chunk.text, document.metadata):
        return (
            "the text differs from what was ingested: a compressor, splitter or template changed it; ingest the text "
            "that reaches the prompt"
        )
    if (scope := ingested_scope(document, chunk.scope)) != chunk.scope:
        return f"ingested into scope {scope!r}, asked for in scope {chunk.scope!r}; leave the model's scope at None"
    return (
        "ingested, but there is no cache of it: it was dropped, or made by an engine with another model, tokenizer, "
        "dtype or system prompt; run the transformer again"
    )


def as_documents(given: Any) -> list[Document]:
    """Documents given as such, as text, or as mappings with "page_content" or "text".

    Raises:
        ConfigError: something else is among them.
    """
    if isinstance(given, (Document, str, Mapping)) or not isinstance(given, Iterable):
        given = [given]
    return [_as_document(item) for item in given]


def _as_document(item: Any) -> Document:
    if isinstance(item, Document):
        return item
    if isinstance(item, str):
        return Document(item)
    if isinstance(item, Mapping):
        text = item.get("page_content", item.get("text"))
        if isinstance(text, str):
            return Document(text, id=item.get("id"), metadata=dict(item.get("metadata") or {}))
    raise ConfigError(
        f"documents contain {item!r}, which is not accepted; give LangChain Documents, strings, or mappings with "
        f"'page_content' or 'text'"
    )


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
