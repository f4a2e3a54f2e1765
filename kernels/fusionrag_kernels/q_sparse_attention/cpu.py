"""Q-sparse attention in plain torch: no mask for the whole call, no repeated K/V heads, any device."""

import torch
from torch import Tensor

from fusionrag_kernels.blocks import fold_heads, softmax_blocks, unfold_heads
from fusionrag_kernels.q_sparse_attention.flash import can_flash, flash_only
from fusionrag_kernels.q_sparse_attention.flash_rows import FlashRows
from fusionrag_kernels.visibility import Visibility, visibility


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
    """The contract of `fusionrag_kernels.q_sparse_attention`."""
    if torch.is_grad_enabled():  # entering no_grad costs a decode step more than asking
        with torch.no_grad():
            return q_sparse_attention(
                q, k, v, q_positions, kv_positions, scale=scale, window=window, softcap=softcap, kv_valid=kv_valid
            )
    use_flash = softcap is None and can_flash(q, k, v)
    if use_flash and q.shape[0] == 1 and kv_positions is None and kv_valid is None:
        return _decode(q, k, v, int(q_positions), scale, window)
    seen = visibility(q_positions, kv_positions, kv_valid, k.shape[0], window)
    shape = q.shape[0], q.shape[1], v.shape[2]
    if seen.ends.shape[0] == 0:
        return q.new_zeros(shape)
    rows = q if seen.q_order is None else q[seen.q_order]
    keys, values = _by_head(k, seen.kv_order), _by_head(v, seen.kv_order)
    if use_flash:
        folded = _flash_rows(rows, keys, values, seen, scale)
    else:
        folded = _blocked_rows(rows, keys, values, seen, scale, softcap)
    out = unfold_heads(folded.to(q.dtype), rows.shape[0])
    return out if seen.q_order is None else q.new_zeros(shape).index_copy_(0, seen.q_order, out)


def _decode(q: Tensor, k: Tensor, v: Tensor, position: int, scale: float, window: int | None) -> Tensor:
    """One row over keys whose row is their position: the step that must not cost more than its kernel call."""
    end = min(position + 1, k.shape[0])
    start = 0 if window is None else max(position + 1 - window, 0)
    if start >= end:
        return torch.zeros_like(q, memory_format=torch.contiguous_format)
    folded = q.reshape(k.shape[1], -1, q.shape[2])
    keys, values = k[start:end].transpose(0, 1), v[start:end].transpose(0, 1)
    if q.dtype == torch.float16:
        folded, keys, values = folded.float(), keys.float(), values.float()
    return flash_only(folded, keys, values, scale).to(q.dtype).reshape(q.shape)


def _flash_rows(q: Tensor, keys: Tensor, values: Tensor, seen: Visibility, scale: float) -> Tensor:
    if q.dtype == torch.float16:  # the kernel is slower in float16 than a conversion and float32
        reach = int(seen.ends[-1])
        q, keys, values = q.float(), keys[:, :reach].float(), values[:, :reach].float()
    return FlashRows(fold_heads(q, keys.shape[0]), keys, values, seen, scale).run()


def _blocked_rows(
    q: Tensor, keys: Tensor, values: Tensor, seen: Visibility, scale: float, softcap: float | None
) -> Tensor:
    """What the flash kernel does not do: a soft cap, values of another size than keys, another device."""
    reach = int(seen.ends[-1])
    keys, values = keys[:, :reach].float(), values[:, :reach].float()
    group = q.shape[1] // keys.shape[0]
    out = torch.empty(keys.shape[0], q.shape[0] * group, values.shape[2], dtype=torch.float32, device=q.device)
    for block in softmax_blocks(q, keys, seen, scale=scale, softcap=softcap):
        rows = slice(block.first * group, block.beyond * group)
        torch.bmm(block.weights, values[:, block.start : block.end], out=out[:, rows])
    return out


def _by_head(x: Tensor, order: Tensor | None) -> Tensor:
    """x [Nk, Hkv, D] as [Hkv, Nk, D], in `order`; a canvas view stays a view."""
    by_head = x.transpose(0, 1)
    return by_head if order is None else by_head.index_select(1, order)
