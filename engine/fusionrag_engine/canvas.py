"""`Canvas`: the keys and values of one sequence, one row a position, allocated once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KVShape:
    """Shape of the keys and values of one token. All layers are alike; another model is refused at load."""

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_elements(self) -> int:
        """Elements of one token's keys and values over all layers."""
        return self.num_layers * self.num_kv_heads * (self.key_dim + self.value_dim)


class Canvas:
    """Keys `[num_layers, num_kv_heads, capacity, key_dim]` and values of one sequence; row index = position.

    Rows start unwritten (not zero). Whoever attends must see only rows that were written: the forward pass writes the
    rows it computes before it attends, `place` writes cached ones.
    """

    def __init__(self, shape: KVShape, capacity: int, *, dtype: torch.dtype, device: torch.device) -> None:
        lead = (shape.num_layers, shape.num_kv_heads, capacity)
        self.keys = torch.empty(*lead, shape.key_dim, dtype=dtype, device=device)
        self.values = torch.empty(*lead, shape.value_dim, dtype=dtype, device=device)

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def write(self, layer: int, place: Tensor | slice, keys: Tensor, values: Tensor) -> None:
        """Scatter fresh rows `[num_kv_heads, num_rows, dim]` of one layer to their positions (a slice is quicker)."""
        self.keys[layer, :, place] = keys
        self.values[layer, :, place] = values

    def rows(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values of positions `start .. stop - 1`, all layers."""
        return self.keys[:, :, start:stop].clone(), self.values[:, :, start:stop].clone()
