"""What the adapters' tests share: engines on tiny models, embeddings one can compute by hand, documents, nodes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import chromadb
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import Document, NodeWithScore, TextNode

from fusionrag_engine import Engine, EngineConfig, Request
from tests.tiny_models import build_model, build_tokenizer

SYSTEM = "Be brief."
QUESTION = "When does the harbour office close on Fridays?"
TEXTS = [
    "The harbour office in Lindmark opens at eight and closes at noon on Fridays.",
    "Every pump is tested for two hours before it leaves the hall in Lindmark.",
    "A valve that leaks is replaced, never repaired: order part 7741 from the store.",
    "Questions about holidays go to the people team; answers come within three days.",
    "Who signs the report? The shift lead signs it, and the engineer adds a date.",
]
_numbers = itertools.count()


@cache
def tiny_model() -> Any:
    """A model that tests share and must not change."""
    return build_model("llama")


@cache
def tiny_tokenizer() -> Any:
    """A tokenizer that tests share and must not change."""
    return build_tokenizer()


def tiny_engine(*, tokenizer: Any = None, **settings: Any) -> Engine:
    config = EngineConfig(**{"system_prompt": SYSTEM, "max_new_tokens": 8, "top_n": 2, **settings})
    return Engine(tiny_model(), tokenizer or tiny_tokenizer(), config)


class LetterEmbedding(BaseEmbedding):
    """Letter frequencies: deterministic, and texts with the same words are neighbours."""

    @classmethod
    def class_name(cls) -> str:
        return "LetterEmbedding"

    def _get_text_embedding(self, text: str) -> list[float]:
        return [1e-3 + text.lower().count(letter) for letter in "abcdefghijklmnopqrstuvwxyz"]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


def new_collection(name: str = "nodes") -> Any:
    """An empty collection in memory, of no other test."""
    return chromadb.EphemeralClient().create_collection(f"{name}-{next(_numbers)}")


def documents(texts: Sequence[str] = TEXTS) -> list[Document]:
    return [
        Document(text=text, doc_id=f"doc-{index}", metadata={"file": f"{index}.md"}) for index, text in enumerate(texts)
    ]


def splitter() -> SentenceSplitter:
    """Node ids that a second ingestion gives again."""
    return SentenceSplitter(
        chunk_size=200, chunk_overlap=0, id_func=lambda index, document: f"{document.node_id}-{index}"
    )


def scored_nodes(texts: Sequence[str] = TEXTS) -> list[NodeWithScore]:
    """Nodes as a retriever returns them, best first."""
    return [
        NodeWithScore(node=TextNode(text=text, id_=f"node-{index}"), score=1.0 - index / 10)
        for index, text in enumerate(texts)
    ]


def patch_forward(monkeypatch: Any, engine: Engine, before: Any) -> None:
    """Call `before()` ahead of each forward pass of the engine's model, whoever asks for it."""
    embedding = engine.model.get_input_embeddings()
    own = embedding.forward

    def forward(*args: Any, **settings: Any) -> Any:
        before()
        return own(*args, **settings)

    monkeypatch.setattr(embedding, "forward", forward)


def settle(engine: Engine) -> None:
    """Wait until the chunks met by earlier requests are in the store: every request waits for those before it."""
    engine.prefill(Request("settle", [], method="full"))


def statuses(response: Any) -> dict[str, str]:
    """What the cache did for each node of a response."""
    return {entry["node_id"]: entry["status"] for entry in response.metadata["fusionrag"]["nodes"]}
