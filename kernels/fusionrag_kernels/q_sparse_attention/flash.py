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


def flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of q [Hkv, R, D] to all of k, v [Hkv, N, D], and its log-sum-exp, float32 [Hkv, R, D] and [Hkv, R]."""
    out, logsumexp = _flash_parts(q, k, v, scale)
    if out.shape[0] == 1:
        return out[0].float(), logsumexp[0]
    return _merge(out, logsumexp), torch.logsumexp(logsumexp, 0)


def flash_only(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The same without the log-sum-exp."""
    out, logsumexp = _flash_parts(q, k, v, scale)
    return out[0].float() if out.shape[0] == 1 else _merge(out, logsumexp)


def flash_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """As `flash`, of rows * G folded rows under an additive mask [rows, N] in q's dtype that leaves every row a key."""
    group = q.shape[1] // mask.shape[0]
    by_head = q.view(q.shape[0], mask.shape[0], group, q.shape[2]).transpose(1, 2)  # one mask serves all G heads
    k, v = (x[:, None].expand(-1, group, -1, -1) for x in (k, v))
    out, logsumexp = _call(by_head, k, v, mask, scale)
    return out.transpose(1, 2).reshape(q.shape).float(), logsumexp.transpose(1, 2).reshape(q.shape[:2])


def _flash_parts(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention to each of some parts of the keys, with log-sum-exps, [parts, Hkv, R, D] and [parts, Hkv, R]."""
    num_kv_heads, num_keys, head_dim = k.shape
    num_splits = _num_splits(num_kv_heads, q.shape[1], num_keys)
    if num_splits == 1:
        return _call(q[None], k[None], v[None], None, scale)
    rest = num_keys % num_splits
    shape = (num_kv_heads, num_splits, num_keys // num_splits, head_dim)
    k_parts, v_parts = (x[:, rest:].view(shape).transpose(0, 1) for x in (k, v))
    parts = _call(q.expand(num_splits, -1, -1, -1), k_parts, v_parts, None, scale)
    if not rest:
        return parts
    rest_part = _call(q[None], k[None, :, :rest], v[None, :, :rest], None, scale)
    return torch.cat((parts[0], rest_part[0])), torch.cat((parts[1], rest_part[1]))


def _merge(out: Tensor, logsumexp: Tensor) -> Tensor:
    return (out.float() * torch.softmax(logsumexp, 0)[..., None]).sum(0)


def _num_splits(num_kv_heads: int, num_rows: int, num_keys: int) -> int:
    """Parts to cut the keys into: few rows are one task a key head, which the threads cannot share out evenly."""
    num_threads = torch.get_num_threads()
    if num_rows > MAX_SPLIT_ROWS or num_kv_heads % num_threads == 0:
        return 1
    return max(1, min(num_threads, num_keys // MIN_SPLIT_KEYS))


def _call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    assert _kernel is not None
    out, logsumexp = _kernel(q, k, v, attn_mask=mask, scale=scale)
    return out, logsumexp
