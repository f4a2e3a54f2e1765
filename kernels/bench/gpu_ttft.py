"""Time to first token of the engine on a random model of Qwen2.5-7B's shape; part of gpu_check.py."""

import random
import statistics
from typing import Any

import torch

from fusionrag_engine import Chunk, Engine, EngineConfig, Request

QWEN_7B: dict[str, Any] = {
    "vocab_size": 32768,  # smaller than the real one: no tokenizer of that size is at hand
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
TINY: dict[str, Any] = {
    **QWEN_7B,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
METHODS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("full", {"method": "full"}),
    ("r=0", {"method": "fusionrag", "recompute_ratio": 0.0}),
    ("r=0.15", {"method": "fusionrag", "recompute_ratio": 0.15}),
)
CHUNK_TOKENS = 512


def time_to_first_token(device: torch.device, *, is_dry_run: bool) -> list[dict[str, Any]]:
    lengths = (256,) if is_dry_run else (8192, 27648)
    engine = _engine(device, TINY if is_dry_run else QWEN_7B)
    try:
        return [row for length in lengths for row in _at_length(engine, length, is_dry_run=is_dry_run)]
    finally:
        engine.close()


def _at_length(engine: Engine, length: int, *, is_dry_run: bool) -> list[dict[str, Any]]:
    chunk_tokens = 64 if is_dry_run else CHUNK_TOKENS
    draw = random.Random(length)
    chunks = [Chunk(_text(draw, chunk_tokens)) for _ in range(length // chunk_tokens)]
    neighbours = [[(index + 1) % len(chunks)] for index in range(len(chunks))]
    engine.precompute(chunks, neighbours=neighbours)
    rows: list[dict[str, Any]] = []
    for name, settings in METHODS:
        request = Request("w1 w2 w3 w4 w5 w6 w7 w8", chunks, max_new_tokens=1, **settings)
        engine.generate(request)  # compiles what is not compiled yet
        runs = [engine.generate(request).stats for _ in range(1 if is_dry_run else 3)]
        ttft_s = statistics.median(stats.ttft_s for stats in runs)
        rows.append(
            {
                "method": name,
                "num_prompt_tokens": runs[-1].num_prompt_tokens,
                "num_reused_tokens": runs[-1].num_reused_tokens,
                "ttft_s": ttft_s,
                "speedup_over_full": rows[0]["ttft_s"] / ttft_s if rows else 1.0,
                "parts_s": {
                    part: statistics.median(getattr(stats, part) for stats in runs)
                    for part in ("load_s", "assemble_s", "select_s", "prefill_s")
                },
            }
        )
    return rows


def _engine(device: torch.device, sizes: dict[str, Any]) -> Engine:
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**sizes), dtype=dtype).eval()
    return Engine(model, _tokenizer(), config=EngineConfig(cache_dir=None, host_bytes=48 << 30, top_n=1))


def _text(draw: random.Random, num_tokens: int) -> str:
    return " ".join(f"w{draw.randrange(400)}" for _ in range(num_tokens))


def _tokenizer() -> Any:
    """One token a word: lengths come out as asked for."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "</s>", "<pad>", "<unk>", *(f"w{index}" for index in range(400))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
