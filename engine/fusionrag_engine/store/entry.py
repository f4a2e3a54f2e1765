"""`Entry`: the rows of one chunk, as they were computed and as a codec keeps them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Entry:
    """Rows of one chunk. Immutable: tiers and requests share its tensors.

    Attributes:
        key: its content key.
        token_ids: the chunk's tokens, compared on every hit.
        start: position of its first row when it was computed.
        keys, values: `[num_layers, num_kv_heads, num_tokens, dim]` in the model's dtype, or as the codec keeps them.
        is_mapped: its tensors are a map of a file, which somebody might shorten in place.
        key_scales, value_scales: what the codec multiplies them with; None for codec "none". See `codecs`.
    """

    key: str
    token_ids: tuple[int, ...]
    start: int
    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None
    is_mapped: bool = False

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by field name."""
        named = {name: getattr(self, name) for name in ("keys", "values", "key_scales", "value_scales")}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    def is_lossy(self) -> bool:
        """Whether its rows are only near to those computed."""
        return self.key_scales is not None

    def to(self, device: torch.device, *, copy: bool = False) -> Entry:
        """The same rows on a device; with `copy` in memory of their own."""
        moved: dict[str, Any] = {name: tensor.to(device, copy=copy) for name, tensor in self.tensors().items()}
        return replace(self, is_mapped=self.is_mapped and not copy, **moved)
