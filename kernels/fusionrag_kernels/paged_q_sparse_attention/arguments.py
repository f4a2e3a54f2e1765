"""Argument checks of the paged form: shapes and dtypes, nothing that would ask the device for a number."""

import torch
from torch import Tensor

from fusionrag_kernels.checks import DTYPES
from fusionrag_kernels.errors import ArgumentError
from fusionrag_kernels.paged_q_sparse_attention.pages import WORD, PageTable

PAGE_SIZES = (16, 32, 64, 128)


def check_pages(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: PageTable,
    q_positions: Tensor,
    row_starts: Tensor,
    window: int | None,
    softcap: float | None,
    inv_freq: Tensor | None,
) -> None:
    """All arguments fit q [N, Hq, D] and the pool [num_pages, page_size, Hkv, D]."""
    if q.ndim != 3 or k_pages.ndim != 4 or v_pages.ndim != 4 or v_pages.shape[:3] != k_pages.shape[:3]:
        raise ArgumentError(
            f"q is [N, Hq, D] and pages are [num_pages, page_size, Hkv, D], got {tuple(q.shape)}, "
            f"{tuple(k_pages.shape)} and {tuple(v_pages.shape)}"
        )
    if q.dtype not in DTYPES or not q.dtype == k_pages.dtype == v_pages.dtype:
        raise ArgumentError(f"q and pages share one dtype of {DTYPES}, got {q.dtype}, {k_pages.dtype}, {v_pages.dtype}")
    if q.shape[2] != k_pages.shape[3] or k_pages.shape[2] == 0 or q.shape[1] % k_pages.shape[2]:
        raise ArgumentError(
            f"q and k_pages share D, and Hkv divides Hq, got {tuple(q.shape)} and {tuple(k_pages.shape)}"
        )
    if k_pages.shape[1] not in PAGE_SIZES:
        raise ArgumentError(f"page_size is one of {PAGE_SIZES}, got {k_pages.shape[1]}")
    if window is not None and window < 1:
        raise ArgumentError(f"window is None or at least 1 token, got {window}")
    if softcap is not None and softcap <= 0:
        raise ArgumentError(f"softcap is None or positive, got {softcap}")
    if inv_freq is not None and (inv_freq.ndim != 1 or 2 * inv_freq.shape[0] > q.shape[2]):
        raise ArgumentError(f"inv_freq is [at most D / 2 = {q.shape[2] // 2}], got {tuple(inv_freq.shape)}")
    _check_table(table, k_pages)
    num_sequences = table.page.shape[0]
    for name, tensor, length in (
        ("q_positions", q_positions, q.shape[0]),
        ("row_starts", row_starts, num_sequences + 1),
    ):
        if tensor.dtype != torch.int64 or tensor.shape != (length,) or tensor.device != q.device:
            raise ArgumentError(f"{name} is int64 [{length}] on {q.device}, got {tensor.dtype} {tuple(tensor.shape)}")


def _check_table(table: PageTable, k_pages: Tensor) -> None:
    num_pages, page_size = k_pages.shape[:2]
    if table.page.ndim != 2:
        raise ArgumentError(f"table.page is [B, E], got {tuple(table.page.shape)}")
    entries = tuple(table.page.shape)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("page", "start", "first", "beyond", "turn"), entries)
    shapes["num_entries"] = entries[:1]
    if table.row_positions is not None:
        shapes["row_positions"] = (num_pages, page_size)
    if table.stale is not None:
        if page_size % WORD:
            raise ArgumentError(f"page_size is a multiple of {WORD} for stale bits, got {page_size}")
        shapes["stale"] = (*entries, page_size // WORD)
    for name, shape in shapes.items():
        field: Tensor = getattr(table, name)
        if field.dtype != torch.int32 or field.shape != shape or field.device != k_pages.device:
            raise ArgumentError(
                f"table.{name} is int32 {shape} on {k_pages.device}, got {field.dtype} {tuple(field.shape)} on "
                f"{field.device}"
            )
