"""Which models are served: refusals by name, and a numerical check of everything the engine relies on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .canvas import Canvas
from .errors import UnsupportedModelError
from .rope import Rope
from .runner import ModelRunner, Rows

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest relative RMS difference between two ways to compute the same rows."""

ATTENTION_LAYERS = ("full_attention", "sliding_attention")


def refuse_by_config(model: Any) -> None:
    """Refuse what a model's config already rules out.

    Raises:
        UnsupportedModelError: naming the feature.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder; only decoder-only causal language models are served"
        )
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(f"{name} has no language-model head; load it with AutoModelForCausalLM")
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModelError(
            f"{name} uses multi-head latent attention (kv_lora_rank={config.kv_lora_rank}), whose cached latents "
            f"cannot be moved by a rotation"
        )
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", "rotary") in ("alibi", "absolute"):
        raise UnsupportedModelError(f"{name} has absolute or ALiBi positions; chunk caches can be moved only with RoPE")
    others = sorted(set(getattr(config, "layer_types", None) or []) - set(ATTENTION_LAYERS))
    if others:
        raise UnsupportedModelError(
            f"{name} has layers of type {others}; only {ATTENTION_LAYERS} keep their whole state in keys and values"
        )


def self_check(runner: ModelRunner, rope: Rope) -> None:
    """Compute a few rows in several ways that must agree, on the model as it is.

    The packed forward against the model's own attention; two sequences packed against each alone; rows moved by a
    rotation against rows computed at the other place.

    Raises:
        UnsupportedModelError: naming the pair that differs, and by how much.
    """
    generator = torch.Generator().manual_seed(0)
    vocab = runner.config.vocab_size
    long, short = (torch.randint(0, vocab, (size,), generator=generator).to(runner.device) for size in (24, 7))

    alone = _rows(runner, long, 0)
    logits = runner.forward_logits([alone])
    _compare(runner, "the packed forward and the model's own attention", logits[0], _own_logits(runner, long))

    packed, other = _rows(runner, long, 0), _rows(runner, short, 3)
    runner.forward([_rows(runner, short, 0), packed, other])
    _compare(runner, "packed sequences and a single one", packed.canvas.values, alone.canvas.values)
    _compare(runner, "packed sequences and a single one", packed.canvas.keys, alone.canvas.keys)

    offset = min(1009, runner.config.max_position_embeddings - len(long))
    there = _rows(runner, long, offset)
    runner.forward([there])
    moved = Canvas(runner.shape, len(long), dtype=runner.dtype, device=runner.device)
    rope.place(alone.canvas.keys, offset, moved.keys)
    keys, values = there.canvas.rows(offset, offset + len(long))
    _compare(
        runner, "keys moved by a rotation and keys computed there (positions that are not rotary)", moved.keys, keys
    )
    _compare(runner, "values at two places (positions that are not relative)", alone.canvas.values, values)


def _rows(runner: ModelRunner, token_ids: Tensor, start: int) -> Rows:
    canvas = runner.canvas(start + len(token_ids))
    valid = None
    if start:  # nothing stands before `start`
        valid = torch.arange(start + len(token_ids), device=runner.device) >= start
    return Rows(token_ids, torch.arange(start, start + len(token_ids), device=runner.device), canvas, valid)


@torch.inference_mode()
def _own_logits(runner: ModelRunner, token_ids: Tensor) -> Tensor:
    """Logits behind the last token, by the model as transformers runs it."""
    logits: Tensor = runner.model(input_ids=token_ids[None], use_cache=False).logits[0, -1]
    return logits.float()


def _compare(runner: ModelRunner, what: str, ours: Tensor, reference: Tensor) -> None:
    difference = relative_rms(ours, reference)
    tolerance = TOLERANCE[runner.dtype]
    if not difference <= tolerance:
        raise UnsupportedModelError(
            f"{type(runner.model).__name__} ({runner.config.model_type}) fails the self-check: {what} differ by "
            f"{difference:.2e} (relative RMS), more than {tolerance:.0e}; its chunk caches would give wrong answers"
        )


def relative_rms(ours: Tensor, reference: Tensor) -> float:
    """Root mean square of the difference over that of the reference."""
    ours, reference = ours.double(), reference.double()
    return float((ours - reference).norm() / reference.norm().clamp_min(1e-30))
