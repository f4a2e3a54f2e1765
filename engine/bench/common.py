"""What the engine's benchmarks share: examples, neighbours, machine facts, timing, memory."""

from __future__ import annotations

import json
import random
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from fusionrag_engine import Chunk
from fusionrag_engine.evaluation import Example, embed_bag_of_words, embedder, load_examples, machine

__all__ = [
    "Example",
    "PeakMemory",
    "embed_bag_of_words",
    "embedder",
    "load_examples",
    "machine",
    "median_of",
    "synthetic_example",
    "write_json",
]


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
