"""Times of attention beside flash, masked SDPA and FlexAttention, and the machine's limits; part of gpu_check.py."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fusionrag_kernels import q_sparse_attention

CONTEXTS = (8192, 32768, 131072)
RATIOS = (0.05, 0.15, 0.5, 1.0)
HEADS, KV_HEADS, DIM = 28, 4, 128  # Qwen2.5-7B
MAX_MASK_BYTES = 8 << 30
Function = Callable[[], object]


def milliseconds(function: Function, device: torch.device) -> float:
    """Median. On a CPU one call, which only shows that it runs."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return float(do_bench(function, warmup=20, rep=80, return_mode="median"))
    begin = time.perf_counter()
    function()
    return 1000 * (time.perf_counter() - begin)


def time_roofline(device: torch.device, *, is_dry_run: bool) -> dict[str, float]:
    """Bytes/s of a copy (read + written) and FLOP/s of a bfloat16 matrix product, measured."""
    size = 256 if is_dry_run else 8192
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    source = torch.randn(size * size if is_dry_run else 1 << 28, device=device)
    target = torch.empty_like(source)
    copy_s = milliseconds(lambda: target.copy_(source), device) / 1000
    product_s = milliseconds(lambda: a @ b, device) / 1000
    return {"bytes_per_s": 2 * source.nbytes / copy_s, "flop_per_s": 2 * size**3 / product_s}


def time_attention(device: torch.device, roofline: dict[str, float], *, is_dry_run: bool) -> list[dict[str, Any]]:
    results = []
    for context in (96,) if is_dry_run else CONTEXTS:
        random = torch.Generator(device).manual_seed(context)
        shape = {"device": device, "dtype": torch.bfloat16, "generator": random}
        q = torch.randn(context, HEADS, DIM, **shape)
        k, v = (torch.randn(KV_HEADS, context, DIM, **shape).transpose(0, 1) for _ in range(2))
        flash_ms = _full_causal(q, k, v, device)
        for ratio in RATIOS[1:2] if is_dry_run else RATIOS:
            rows = torch.randperm(context, device=device, generator=random)[: round(ratio * context)].sort().values
            results.append(_row(context, ratio, q[rows], k, v, rows, flash_ms, roofline, device))
        last = torch.tensor([context - 1], device=device)
        results.append(_row(context, 0.0, q[-1:], k, v, last, flash_ms, roofline, device))
    return results


def _row(
    context: int,
    ratio: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    flash_ms: float,
    roofline: dict[str, float],
    device: torch.device,
) -> dict[str, Any]:
    """Ratio 0.0 is decode: the last row alone."""
    ours = milliseconds(lambda: q_sparse_attention(q, k, v, rows, scale=DIM**-0.5), device)
    seen = int((rows + 1).sum())
    flops = 4 * DIM * HEADS * seen
    num_bytes = 2 * (q.numel() * 2 + k.numel() + v.numel())
    least_s = max(flops / roofline["flop_per_s"], num_bytes / roofline["bytes_per_s"])
    result: dict[str, Any] = {
        "context": context,
        "ratio": ratio,
        "num_rows": len(rows),
        "ours_ms": ours,
        "flash_causal_all_rows_ms": flash_ms,
        "flop_per_s": flops / ours * 1000,
        "bytes_per_s": num_bytes / ours * 1000,
        "of_roofline": 1000 * least_s / ours,
        "speedup_over_flash": flash_ms / ours,
    }
    for name, function in (("masked_sdpa", _masked(q, k, v, rows)), ("flex_attention", _flex(q, k, v, rows, device))):
        if function is not None:
            other = milliseconds(function, device)
            result[f"{name}_ms"], result[f"speedup_over_{name}"] = other, other / ours
    return result


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [tensor.transpose(0, 1)[None] for tensor in tensors]


def _full_causal(q: Tensor, k: Tensor, v: Tensor, device: torch.device) -> float:
    """Flash attention of all rows; K and V repeated beforehand, since not every backend groups heads."""
    all_q, all_k, all_v = _heads_first(q, *(x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v)))
    return milliseconds(lambda: scaled_dot_product_attention(all_q, all_k, all_v, is_causal=True), device)


def _masked(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Function | None:
    """SDPA of our rows with a boolean mask; None where the mask and its widened copies would fill the memory."""
    num_keys = k.shape[0]
    if len(rows) * num_keys > MAX_MASK_BYTES // 4:
        return None
    mask = torch.arange(num_keys, device=rows.device) <= rows[:, None]
    all_q, all_k, all_v = _heads_first(q, *(x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v)))
    return lambda: scaled_dot_product_attention(all_q, all_k, all_v, attn_mask=mask)


def _flex(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, device: torch.device) -> Function | None:
    """FlexAttention compiled with a block mask by position, where torch has it; CUDA only, as it compiles for long."""
    if device.type != "cuda" or len(rows) < 128 or k.shape[0] > CONTEXTS[1]:
        return None
    try:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    except ImportError:
        return None

    def sees(_batch: Tensor, _head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return key <= rows[row]

    block_mask = create_block_mask(sees, None, None, len(rows), k.shape[0], device=device)
    attend = torch.compile(flex_attention, dynamic=False)
    all_q, all_k, all_v = _heads_first(q, k, v)
    return lambda: attend(all_q, all_k, all_v, block_mask=block_mask, enable_gqa=True)
