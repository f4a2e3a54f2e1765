"""What the launchers of the Triton kernels share; plain torch, no synchronisation with the device."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)
FURTHEST = 2**29  # beyond every position


@dataclass(frozen=True)
class KeyIndex:
    """Positions int32 [Nk] (FURTHEST where invalid) and the smallest and largest valid one of each tile of keys."""

    positions: Tensor
    tile_first: Tensor
    tile_last: Tensor


def key_index(
    kv_positions: Tensor | None, kv_valid: Tensor | None, num_keys: int, block_n: int, device: torch.device
) -> KeyIndex | None:
    """None where every key is valid and its row is its position: then tiles follow from positions alone."""
    if kv_positions is None and kv_valid is None:
        return None
    positions = torch.arange(num_keys, device=device) if kv_positions is None else kv_positions
    positions = positions.to(torch.int32)
    valid = torch.ones_like(positions, dtype=torch.bool) if kv_valid is None else kv_valid
    firsts, lasts = positions.masked_fill(~valid, FURTHEST), positions.masked_fill(~valid, -FURTHEST)
    missing = -num_keys % block_n
    by_tile = torch.nn.functional.pad(firsts, (0, missing), value=FURTHEST).view(-1, block_n)
    by_tile_last = torch.nn.functional.pad(lasts, (0, missing), value=-FURTHEST).view(-1, block_n)
    return KeyIndex(firsts, by_tile.amin(1), by_tile_last.amax(1))


def score_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """What `tile_ops.scores` multiplies by, before and after the soft cap, for scores in units of log2."""
    if softcap is None:
        return scale * LOG2_E, 1.0
    return scale / softcap, softcap * LOG2_E


def block_dim(dim: int) -> int:
    """The power of two a head is padded to; a matrix unit multiplies no less than 16."""
    return max(16, 1 << (dim - 1).bit_length())
