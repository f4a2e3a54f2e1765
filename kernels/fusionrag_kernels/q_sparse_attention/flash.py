"""The CPU flash kernel of torch, which unlike F.scaled_dot_product_attention returns the log-sum-exp to merge by."""

import torch
from torch import Tensor

MAX_SPLIT_ROWS = 64
MIN_SPLIT_KEYS = 256

# None in a torch that lacks it. Naming the overload saves half of a short call.
_kernel = getattr(getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None), "default", None)


def can_flash(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel takes these: CPU tensors of one head size, each head's row contiguous."""
    is_one_shape = k.shape[2] == v.shape[2] and k.stride(2) == v.stride(2) == 1
    return _kernel is not None and q.device.type == "cpu" and is_one_shape


def flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of q [Hkv, R, D] over k, v [Hkv, N, D], and its log-sum-exp, float32 [Hkv, R, D] and [Hkv, R].

    `mask` is additive [R, N] in q's dtype and leaves every row a key.
    """
    num_splits = _num_splits(q.shape[0], q.shape[1], k.shape[1]) if mask is None else 1
    if num_splits > 1:
        return _flash_split(q, k, v, scale, num_splits)
    out, logsumexp = _call(q[None], k[None], v[None], None if mask is None else mask[None, None], scale)
    return out[0].float(), logsumexp[0]


def _num_splits(num_kv_heads: int, num_rows: int, num_keys: int) -> int:
    """Parts to cut the keys into: few rows are one task a key head, which the threads cannot share out evenly."""
    num_threads = torch.get_num_threads()
    if num_rows > MAX_SPLIT_ROWS or num_kv_heads % num_threads == 0:
        return 1
    return min(num_threads, num_keys // MIN_SPLIT_KEYS)


def _flash_split(q: Tensor, k: Tensor, v: Tensor, scale: float, num_splits: int) -> tuple[Tensor, Tensor]:
    num_kv_heads, num_keys, head_dim = k.shape
    rest = num_keys % num_splits
    shape = (num_kv_heads, num_splits, num_keys // num_splits, head_dim)
    k_parts, v_parts = (x[:, rest:].view(shape).transpose(0, 1) for x in (k, v))
    out, logsumexp = _call(q.expand(num_splits, -1, -1, -1), k_parts, v_parts, None, scale)
    if rest:
        parts = (out, logsumexp), _call(q[None], k[None, :, :rest], v[None, :, :rest], None, scale)
        out, logsumexp = (torch.cat(same) for same in zip(*parts, strict=True))
    weights = torch.softmax(logsumexp, 0)[..., None]
    return (out.float() * weights).sum(0), torch.logsumexp(logsumexp, 0)


def _call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    assert _kernel is not None
    out, logsumexp = _kernel(q, k, v, attn_mask=mask, scale=scale)
    return out, logsumexp
