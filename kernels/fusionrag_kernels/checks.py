"""Argument checks shared by the ops; cheap enough to run on every decode step."""

import torch
from torch import Tensor

from fusionrag_kernels.errors import ArgumentError

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_queries_and_keys(q: Tensor, k: Tensor) -> None:
    """q [Nq, Hq, D] and k [Nk, Hkv, D] agree in dtype, device and D, and Hkv divides Hq."""
    if q.ndim != 3 or k.ndim != 3:
        raise ArgumentError(f"q is [Nq, Hq, D] and k is [Nk, Hkv, D], got {tuple(q.shape)} and {tuple(k.shape)}")
    if q.dtype not in DTYPES or k.dtype != q.dtype:
        raise ArgumentError(f"q and k share one dtype of float32, float16, bfloat16, got {q.dtype} and {k.dtype}")
    if k.device != q.device:
        raise ArgumentError(f"q and k are on one device, got {q.device} and {k.device}")
    if q.shape[2] != k.shape[2]:
        raise ArgumentError(f"q and k share head_dim, got {q.shape[2]} and {k.shape[2]}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ArgumentError(f"query heads are a multiple of key heads, got Hq={q.shape[1]} and Hkv={k.shape[1]}")


def check_values(k: Tensor, v: Tensor) -> None:
    """v [Nk, Hkv, Dv] has the keys' rows, heads, dtype and device."""
    if v.ndim != 3 or v.shape[:2] != k.shape[:2]:
        raise ArgumentError(f"v is [Nk, Hkv, Dv] beside k {tuple(k.shape)}, got {tuple(v.shape)}")
    if v.dtype != k.dtype or v.device != k.device:
        raise ArgumentError(f"v shares the keys' {k.dtype} on {k.device}, got {v.dtype} on {v.device}")


def check_visibility(
    q: Tensor,
    k: Tensor,
    q_positions: Tensor,
    kv_positions: Tensor | None,
    kv_valid: Tensor | None,
    window: int | None,
    softcap: float | None,
) -> None:
    """Positions, validity, window and soft cap fit q [Nq, ...] and k [Nk, ...]."""
    _check_row("q_positions", q_positions, q, torch.int64)
    if kv_positions is not None:
        _check_row("kv_positions", kv_positions, k, torch.int64)
    if kv_valid is not None:
        _check_row("kv_valid", kv_valid, k, torch.bool)
    if window is not None and window < 1:
        raise ArgumentError(f"window is None or at least 1 token, got {window}")
    if softcap is not None and softcap <= 0:
        raise ArgumentError(f"softcap is None or positive, got {softcap}")


def _check_row(name: str, row: Tensor, like: Tensor, dtype: torch.dtype) -> None:
    if row.ndim != 1 or row.shape[0] != like.shape[0] or row.dtype != dtype or row.device != like.device:
        raise ArgumentError(
            f"{name} is {dtype} [{like.shape[0]}] on {like.device}, got {row.dtype} {tuple(row.shape)} on {row.device}"
        )
