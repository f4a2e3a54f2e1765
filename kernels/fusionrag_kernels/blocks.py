"""The blocked softmax both CPU ops share: position blocks of rows against only the keys they can see."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fusionrag_kernels.visibility import Visibility, row_segments

MAX_BLOCK_ROWS = 64
MAX_SCORES = 1 << 22  # 16 MB of float32: smaller blocks measured slower, larger ones gain nothing


class Block(NamedTuple):
    """Rows first <= i < beyond, their keys start <= j < end, and weights float32 [Hkv, rows*G, keys], reused."""

    first: int
    beyond: int
    start: int
    end: int
    weights: Tensor


def fold_heads(q: Tensor, num_kv_heads: int) -> Tensor:
    """q [Nq, Hq, D] as [Hkv, Nq*G, D]: the heads of a group become rows of their key head."""
    num_rows, num_heads, head_dim = q.shape
    group = num_heads // num_kv_heads
    by_key_head = q.reshape(num_rows, num_kv_heads, group, head_dim).transpose(0, 1)
    return by_key_head.reshape(num_kv_heads, num_rows * group, head_dim)


def unfold_heads(folded: Tensor, num_rows: int) -> Tensor:
    """[Hkv, Nq*G, D] back as contiguous [Nq, Hq, D]."""
    num_kv_heads, _, head_dim = folded.shape
    by_row = folded.view(num_kv_heads, num_rows, -1, head_dim).transpose(0, 1)
    return by_row.reshape(num_rows, -1, head_dim).contiguous()


def softmax_blocks(
    q: Tensor, k: Tensor, seen: Visibility, *, scale: float, softcap: float | None, normalise: bool = True
) -> Iterator[Block]:
    """Softmax weights of q [Nq, Hq, D] over k float32 [Hkv, Nk, D]; each Block is valid until the next.

    Without `normalise` the weights are the scores, -inf where a row does not see a key.

    Every key of a block is seen by at least one of its rows, so no unseen memory enters a product with the values.
    """
    num_kv_heads = k.shape[0]
    group = q.shape[1] // num_kv_heads
    folded = fold_heads(q, num_kv_heads).float() * (scale if softcap is None else scale / softcap)
    bounds = _block_bounds(seen, max(1, min(MAX_BLOCK_ROWS, MAX_SCORES // (q.shape[1] * k.shape[1]))))
    size = max((b - a) * group * (ends[1] - starts[0]) for a, b, starts, ends in bounds)
    buffer = torch.empty(num_kv_heads * size, dtype=torch.float32, device=q.device)
    for first, beyond, starts, ends in bounds:
        start, end = starts[0], ends[1]
        shape = (num_kv_heads, (beyond - first) * group, end - start)
        scores = buffer[: shape[0] * shape[1] * shape[2]].view(shape)
        torch.bmm(folded[:, first * group : beyond * group], k[:, start:end].transpose(1, 2), out=scores)
        if softcap is not None:
            scores.tanh_().mul_(softcap)
        by_row = scores.view(num_kv_heads, beyond - first, group, end - start)
        if ends[0] < ends[1]:
            later = torch.arange(ends[0], ends[1], device=q.device) >= seen.ends[first:beyond, None]
            by_row[..., ends[0] - start :].masked_fill_(later[:, None], -torch.inf)
        if starts[0] < starts[1]:
            gone = torch.arange(starts[0], starts[1], device=q.device) < seen.starts[first:beyond, None]
            by_row[..., : starts[1] - start].masked_fill_(gone[:, None], -torch.inf)
        if normalise:
            torch.softmax(scores, dim=-1, out=scores)
        yield Block(first, beyond, start, end, scores)


def _block_bounds(seen: Visibility, block_rows: int) -> list[tuple[int, int, tuple[int, int], tuple[int, int]]]:
    """Blocks of at most block_rows rows, each with the first and last of its rows' starts and ends."""
    starts, ends = seen.starts.tolist(), seen.ends.tolist()
    return [
        (a, b, (starts[a], starts[b - 1]), (ends[a], ends[b - 1]))
        for first, beyond in row_segments(seen)
        for a, b in pairwise([*range(first, beyond, block_rows), beyond])
    ]
