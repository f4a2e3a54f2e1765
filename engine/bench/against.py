"""Other engines on the same prompt: Hugging Face's own forward and cached loop, and llama.cpp where it is installed."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import PeakMemory

from fusionrag_engine import Engine
from fusionrag_engine.loading import choose_dtype
from fusionrag_engine.runner import ATTENTION_NAME

NAMES = ("hf", "llama_cpp")


@dataclass(frozen=True)
class Timing:
    """Seconds to the first token's logits, seconds of each further token, and peak memory of the prefill in bytes."""

    ttft_s: float
    token_s: float
    peak_bytes: int


Contender = Callable[[list[int], int], Timing]
"""Prefill these tokens, then generate so many more, greedily."""


def contenders(names: list[str], engine: Engine, gguf: Path | None) -> dict[str, Contender]:
    """By name: Hugging Face in the engine's dtype, and in bfloat16 where that is not emulated; llama.cpp on a GGUF
    file."""
    found: dict[str, Contender] = {}
    if "hf" in names:
        fastest = choose_dtype("auto", engine.runner.device)
        for dtype in dict.fromkeys([engine.runner.dtype, fastest]):
            name = f"hugging_face {str(dtype).removeprefix('torch.')}"
            found[name] = lambda ids, num_new, dtype=dtype: hugging_face(engine, dtype, ids, num_new)  # type: ignore[misc]
    if "llama_cpp" in names:
        if gguf is None:
            raise SystemExit("--against llama_cpp needs --gguf FILE")
        try:
            import llama_cpp  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            print("llama_cpp is not installed (pip install llama-cpp-python): left out")
        else:
            found["llama_cpp"] = lambda ids, num_new: run_llama_cpp(llama_cpp, gguf, ids, num_new)
    return found


@torch.inference_mode()
def hugging_face(engine: Engine, dtype: torch.dtype, token_ids: list[int], num_new: int) -> Timing:
    """The model's own forward with torch's fused attention, logits of the last token only, then its cached loop."""
    model = engine.model if dtype == engine.runner.dtype else copy.deepcopy(engine.model).to(dtype)
    model.set_attn_implementation("sdpa")
    try:
        begin = time.perf_counter()
        with PeakMemory() as memory:
            out = model(input_ids=engine.runner.tensor(token_ids)[None], use_cache=True, logits_to_keep=1)
            token = out.logits[0, -1].argmax()
        middle = time.perf_counter()
        for _ in range(num_new):
            out = model(input_ids=token.view(1, 1), use_cache=True, **cache_keyword(out))
            token = out.logits[0, -1].argmax()
        end = time.perf_counter()
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    return Timing(middle - begin, (end - middle) / max(num_new, 1), memory.num_bytes)


def cache_keyword(out: Any) -> dict[str, Any]:
    """A model output's cache under the name that its forward takes it by: transformers 5.24 renamed it."""
    name = "cache" if "cache" in out else "past_key_values"
    return {name: out[name]}


def run_llama_cpp(llama_cpp: Any, gguf: Path, token_ids: list[int], num_new: int) -> Timing:
    """llama.cpp by its Python binding, in the file's own quantization."""
    threads = torch.get_num_threads()
    llama = llama_cpp.Llama(
        str(gguf), n_ctx=len(token_ids) + num_new + 8, n_threads=threads, n_threads_batch=threads, verbose=False
    )
    begin = time.perf_counter()
    with PeakMemory() as memory:
        tokens = llama.generate(token_ids, temp=0.0)
        next(tokens)
    middle = time.perf_counter()
    for _ in range(num_new):
        next(tokens)
    return Timing(middle - begin, (time.perf_counter() - middle) / max(num_new, 1), memory.num_bytes)
