"""Q-sparse attention in plain torch, blocked by position: no mask for the whole call, no repeated K/V heads."""

import torch
from torch import Tensor

from fusionrag_kernels.blocks import softmax_blocks
from fusionrag_kernels.visibility import visibility

BLOCK_ROWS = 64


@torch.no_grad()
def q_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_positions: Tensor,
    kv_positions: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    kv_valid: Tensor | None = None,
) -> Tensor:
    """The contract of `fusionrag_kernels.q_sparse_attention`; any device."""
    num_kv_heads, value_dim = v.shape[1:]
    seen = visibility(q_positions, kv_positions, kv_valid, k.shape[0], window)
    rows = q if seen.q_order is None else q[seen.q_order]
    num_rows, num_heads, _ = rows.shape
    group = num_heads // num_kv_heads
    reach = int(seen.ends[-1]) if num_rows else 0
    keys, values = (_by_head(x, seen.kv_order, reach) for x in (k, v))
    folded = torch.empty(num_kv_heads, num_rows * group, value_dim, dtype=torch.float32, device=q.device)
    for block in softmax_blocks(rows, keys, seen, scale=scale, softcap=softcap, block_rows=BLOCK_ROWS):
        span = slice(block.first * group, block.beyond * group)
        torch.bmm(block.weights, values[:, block.start : block.end], out=folded[:, span])
    out = folded.view(num_kv_heads, num_rows, group, value_dim).transpose(0, 1)
    out = out.to(q.dtype).reshape(num_rows, num_heads, value_dim)
    if seen.q_order is None:
        return out
    return out.new_zeros(q.shape[0], num_heads, value_dim).index_copy_(0, seen.q_order, out)


def _by_head(x: Tensor, order: Tensor | None, reach: int) -> Tensor:
    """The first `reach` rows of x [Nk, Hkv, D], in `order`, as float32 [Hkv, reach, D]; a canvas view stays a view."""
    by_head = x.transpose(0, 1)
    rows = by_head[:, :reach] if order is None else by_head.index_select(1, order[:reach])
    return rows.to(torch.float32)
