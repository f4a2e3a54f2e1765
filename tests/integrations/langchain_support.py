"""What the LangChain tests share: embeddings one can compute by hand, documents, a model of another maker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import Runnable

from fusionrag_engine import Engine
from fusionrag_integrations.langchain import ChatFusionRAG, FusionRAGDocumentTransformer
from tests.integrations.support import TEXTS

MODES = ["invoke", "ainvoke", "stream", "astream", "batch", "abatch"]


class LetterEmbeddings(Embeddings):
    """Letter frequencies: deterministic, and texts with the same words are neighbours."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [[1e-3 + text.lower().count(letter) for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


def plain_documents(texts: Sequence[str] = TEXTS) -> list[Document]:
    return [Document(text, id=f"doc-{index}", metadata={"source": f"{index}.md"}) for index, text in enumerate(texts)]


def ingest(engine: Engine, texts: Sequence[str] = TEXTS, **settings: Any) -> list[Document]:
    """Documents whose enriched caches are in the engine."""
    transformer = FusionRAGDocumentTransformer.from_engine(engine, embeddings=LetterEmbeddings(), **settings)
    return list(transformer.transform_documents(plain_documents(texts)))


def exact_model(engine: Engine, **settings: Any) -> ChatFusionRAG:
    """A model whose answers are ordinary prefill's."""
    return ChatFusionRAG.from_engine(engine, recompute_ratio=1.0, **settings)


async def run(runnable: Runnable[Any, Any], value: Any, mode: str, config: Any = None, **kwargs: Any) -> Any:
    """Call a runnable in one of the `MODES`; the pieces of a stream are added up."""
    if mode == "invoke":
        return runnable.invoke(value, config, **kwargs)
    if mode == "ainvoke":
        return await runnable.ainvoke(value, config, **kwargs)
    if mode == "batch":
        return runnable.batch([value], config, **kwargs)[0]
    if mode == "abatch":
        return (await runnable.abatch([value], config, **kwargs))[0]
    pieces: AsyncIterator[Any] | Any
    if mode == "stream":
        pieces = list(runnable.stream(value, config, **kwargs))
    else:
        pieces = [piece async for piece in runnable.astream(value, config, **kwargs)]
    whole = pieces[0]
    for piece in pieces[1:]:
        whole = whole + piece
    return whole


class Tokens(BaseCallbackHandler):
    """Counts the tokens and calls that LangChain reports."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.num_starts = self.num_ends = self.num_errors = 0

    def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        self.tokens.append(token)

    def on_llm_start(self, *args: Any, **kwargs: Any) -> None:
        self.num_starts += 1

    def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
        self.num_starts += 1

    def on_llm_end(self, *args: Any, **kwargs: Any) -> None:
        self.num_ends += 1

    def on_llm_error(self, *args: Any, **kwargs: Any) -> None:
        self.num_errors += 1
