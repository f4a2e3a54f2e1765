"""Critical scores in plain torch: one block of rows at a time, summed as it goes."""

import torch
from torch import Tensor

from fusionrag_kernels.blocks import softmax_blocks
from fusionrag_kernels.visibility import visibility


@torch.no_grad()
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
    """The contract of `fusionrag_kernels.critical_scores`; any device."""
    seen = visibility(q_positions, kv_positions, kv_valid, k.shape[0], window)
    is_log = norm == "unnormalised"
    scores = torch.full((k.shape[0],), -torch.inf if is_log else 0, dtype=torch.float32, device=k.device)
    if seen.ends.shape[0] == 0:
        return scores
    rows = q if seen.q_order is None else q[seen.q_order]
    by_head = k.transpose(0, 1)
    reach = int(seen.ends[-1])
    keys = by_head[:, :reach] if seen.kv_order is None else by_head.index_select(1, seen.kv_order[:reach])
    in_order = scores[:reach] if seen.kv_order is None else scores[seen.kv_order[:reach]]
    for block in softmax_blocks(rows, keys.float(), seen, scale=scale, softcap=softcap, normalise=not is_log):
        per_key = in_order[block.start : block.end]
        if norm == "sum":
            per_key += block.weights.sum((0, 1))
        elif norm == "l2":
            per_key += block.weights.square_().sum((0, 1))
        else:
            torch.logaddexp(per_key, block.weights.logsumexp((0, 1)), out=per_key)
    if norm == "l2":
        in_order.sqrt_()
    if seen.kv_order is not None:
        scores[seen.kv_order[:reach]] = in_order
    return scores
