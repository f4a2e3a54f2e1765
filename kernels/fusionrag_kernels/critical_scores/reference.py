"""Critical scores as their definition: one full softmax matrix, reduced over heads and rows, float32."""

import torch
from torch import Tensor


def critical_scores(
    q: Tensor,
    k: Tensor,
    q_positions: Tensor,
    kv_positions: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    kv_valid: Tensor | None = None,
    norm: str = "sum",
) -> Tensor:
    """The contract of `fusionrag_kernels.critical_scores`, written to be obviously right."""
    num_heads, (num_keys, num_kv_heads, _) = q.shape[1], k.shape
    if kv_positions is None:
        kv_positions = torch.arange(num_keys, device=q.device)
    distance = q_positions[:, None] - kv_positions[None, :]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    if kv_valid is not None:
        visible &= kv_valid
    k_all = k.float().repeat_interleave(num_heads // num_kv_heads, 1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k_all) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if norm == "unnormalised":
        return scores.flatten(0, 1).logsumexp(0)
    weights = scores.softmax(-1).masked_fill(~visible, 0)  # a row that sees no key has NaN weights
    return weights.square().sum((0, 1)).sqrt() if norm == "l2" else weights.sum((0, 1))
