"""What the engine's tests share: engines on tiny models, a corpus of any size, and comparisons by name."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusionrag_engine import Chunk, Engine, EngineConfig, Prefill, Request
from tests.tiny_models import TEXTS, build_model, build_tokenizer

SYSTEM = "Be brief."
EXACT = 1e-4
"""Relative RMS below which two ways to compute the same logits in float32 agree (law 1)."""
DIFFERENT = 1e-2
"""Relative RMS above which a control differs beyond doubt."""


@cache
def tiny_model(architecture: str = "llama") -> Any:
    """A model that tests share and must not change."""
    return build_model(architecture)


@cache
def tiny_tokenizer() -> Any:
    """A tokenizer that tests share and must not change."""
    return build_tokenizer()


def tiny_engine(architecture: str = "llama", *, model: Any = None, tokenizer: Any = None, **settings: Any) -> Engine:
    config = EngineConfig(**{"system_prompt": SYSTEM, "max_new_tokens": 8, **settings})
    return Engine(model or tiny_model(architecture), tokenizer or tiny_tokenizer(), config)


def documents(count: int, *, first: int = 0, scope: str = "") -> list[Chunk]:
    """Distinct chunks of different lengths, with ids."""
    return [
        Chunk(f"{TEXTS[index % len(TEXTS)][: 50 - 7 * (index % 4)]} Note {index}.", id=f"doc-{index}", scope=scope)
        for index in range(first, first + count)
    ]


def ring(count: int, size: int = 2) -> list[list[int]]:
    """Neighbour lists: the next `size` chunks, round."""
    return [[(index + step) % count for step in range(1, size + 1)] for index in range(count)]


def settle(engine: Engine) -> None:
    """Wait until the chunks met by earlier requests are in the store: every request waits for those before it."""
    engine.prefill(Request("settle", [], method="full"))


def forget(engine: Engine, texts: Iterable[str]) -> None:
    """Undo what an earlier request stored, so that these texts are misses again."""
    settle(engine)
    engine.delete(Chunk(text) for text in texts)


def full(engine: Engine, request: Request) -> Prefill:
    """The same prompt by ordinary prefill."""
    return engine.prefill(replace(request, method="full", recompute_ratio=None))


def relative_rms(ours: Tensor, reference: Tensor) -> float:
    """Independent of the engine's own, so that a fault there cannot hide itself. NaN anywhere gives NaN."""
    ours, reference = ours.detach().double().cpu(), reference.detach().double().cpu()
    return float(((ours - reference) ** 2).mean().sqrt() / (reference**2).mean().sqrt())


def assert_same(ours: Tensor, reference: Tensor, tolerance: float = EXACT) -> None:
    difference = relative_rms(ours, reference)
    assert difference <= tolerance, f"relative RMS {difference:.2e} above {tolerance:.0e}"  # NaN fails too


def assert_differs(ours: Tensor, reference: Tensor, least: float = DIFFERENT) -> None:
    difference = relative_rms(ours, reference)
    assert difference > least, f"relative RMS {difference:.2e}: the control must differ by more than {least:.0e}"


def eager_copy(model: Any) -> Any:
    """The same weights under Hugging Face's own eager attention, in a model that the engine never saw."""
    from transformers import AutoModelForCausalLM

    config = type(model.config).from_dict(model.config.to_dict())
    config._attn_implementation = "eager"
    copy = AutoModelForCausalLM.from_config(config).to(model.dtype).eval()
    copy.load_state_dict(model.state_dict())
    assert copy.config._attn_implementation == "eager"
    return copy


@torch.inference_mode()
def own_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    """Logits behind the last token, by a model as transformers runs it."""
    logits: Tensor = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0, -1]
    return logits.float()


def cache_files(directory: Path) -> list[Path]:
    """Every stored cache below a cache directory."""
    return sorted(directory.rglob("*.safetensors"))


def cache_file(engine: Engine, key: str | None) -> Path:
    """The file of one cache, found by its name alone."""
    assert key is not None
    (path,) = Path(str(engine.config.cache_dir)).rglob(f"{key}.safetensors")
    return path


def contents(paths: Iterable[Path]) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in paths}


def in_threads(jobs: Sequence[Any], timeout: float = 60.0) -> list[Any]:
    """Run callables at the same time; their results in order. An error in any of them is raised."""
    barrier = threading.Barrier(len(jobs))
    results: list[Any] = [None] * len(jobs)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            barrier.wait()
            results[index] = jobs[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
        assert not thread.is_alive(), f"a thread hangs after {timeout} s"
    if errors:
        raise errors[0]
    return results
