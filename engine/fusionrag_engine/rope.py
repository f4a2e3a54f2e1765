"""Moving cached keys: one float32 rotation from where they were computed to where they are needed.

RoPE is additive (FusionRAG, arXiv 2601.12904, appendix A.1): a key at position s, rotated by d positions, is the key at
s + d. Every key is moved from the stored original and cast once, never twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusionrag_kernels import assemble

from .errors import UnsupportedModelError


class Rope:
    """Rotation frequencies of every layer: `inv_freq` float32 `[num_layers, rotary_dim / 2]`, zero where a layer has
    none."""

    def __init__(self, inv_freq: Tensor) -> None:
        self.inv_freq = inv_freq

    def place(self, keys: Tensor, offset: int, out: Tensor) -> None:
        """Write `keys` `[num_layers, heads, rows, dim]`, moved by `offset` positions, into `out` of the same shape.

        Attention scaling (YaRN) is already in the stored keys. Dimensions behind `2 * half` are not rotated.
        """
        no_values = keys[..., :0], out[..., :0]
        assemble(keys, no_values[0], out, no_values[1], offset=offset, inv_freq=self.inv_freq)


LENGTH_DEPENDENT = ("dynamic", "longrope", "su")
"""RoPE types whose frequencies change with the length of the prompt: a stored key cannot be moved."""


def read_rope(model: Any) -> Rope:
    """Read the frequencies of each layer from the model's rotary module.

    Raises:
        UnsupportedModelError: there is none (absolute positions, ALiBi), or its frequencies depend on the length.
    """
    name = type(model).__name__
    config = model.config.get_text_config()
    num_layers = config.num_hidden_layers
    for kind in _rope_types(config):
        if kind in LENGTH_DEPENDENT:
            raise UnsupportedModelError(
                f"{name} uses RoPE type {kind!r}, whose frequencies depend on the prompt's length, so cached keys "
                f"cannot be moved; load the model with a default, linear, llama3 or yarn rope instead"
            )
    rotary = getattr(model.base_model, "rotary_emb", None)
    if rotary is None:
        raise UnsupportedModelError(
            f"{name} has no rotary position embedding (absolute or ALiBi positions, or a recurrent model); chunk "
            f"caches can be moved only in models with RoPE"
        )
    layer_types = getattr(config, "layer_types", None) or [None] * num_layers
    has_rope = getattr(config, "no_rope_layers", None) or [1] * num_layers
    rows = []
    for layer in range(num_layers):
        inv_freq = getattr(rotary, f"{layer_types[layer]}_inv_freq", None)
        if inv_freq is None:
            inv_freq = getattr(rotary, "inv_freq", None)
        if inv_freq is None:
            raise UnsupportedModelError(f"{name}: layer {layer} ({layer_types[layer]}) has no rotary frequencies")
        rows.append(inv_freq.detach().float() * float(bool(has_rope[layer])))
    if len({row.shape for row in rows}) != 1:
        raise UnsupportedModelError(f"{name} rotates a different number of dimensions in different layers")
    return Rope(torch.stack(rows))


def _rope_types(config: Any) -> set[str]:
    """RoPE types named by a config: one for the model, or one for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(item.get("rope_type", item.get("type", "default"))) for item in nested or [parameters]}
