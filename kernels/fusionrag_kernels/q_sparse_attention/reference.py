"""Q-sparse attention as its definition: one full mask, one softmax, float32."""

import torch
from torch import Tensor


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
    """The contract of `fusionrag_kernels.q_sparse_attention`, written to be obviously right."""
    num_heads, (num_keys, num_kv_heads, _) = q.shape[1], k.shape
    if kv_positions is None:
        kv_positions = torch.arange(num_keys, device=q.device)
    distance = q_positions[:, None] - kv_positions[None, :]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    if kv_valid is not None:
        visible &= kv_valid
    unseen = ~visible.any(0)[:, None, None]
    k_all = k.float().masked_fill(unseen, 0).repeat_interleave(num_heads // num_kv_heads, 1)
    v_all = v.float().masked_fill(unseen, 0).repeat_interleave(num_heads // num_kv_heads, 1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k_all) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    weights = weights.masked_fill(~visible, 0)  # a row that sees no key has NaN weights
    return torch.einsum("hqk,khd->qhd", weights, v_all).to(q.dtype).contiguous()
