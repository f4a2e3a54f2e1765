"""Attention of some rows of many sequences over pages that they share, each with its own recomputed rows."""

from typing import Any

from torch import Tensor

from fusionrag_kernels.dispatch import resolve
from fusionrag_kernels.paged_q_sparse_attention.arguments import check_pages
from fusionrag_kernels.paged_q_sparse_attention.pages import SCATTERED, PageTable, mark_stale
from fusionrag_kernels.paged_q_sparse_attention.reference import attend_gathered
from fusionrag_kernels.q_sparse_attention import cpu, reference

__all__ = ["SCATTERED", "PageTable", "mark_stale", "paged_q_sparse_attention"]


def paged_q_sparse_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: PageTable,
    q_positions: Tensor,
    row_starts: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    inv_freq: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """`q_sparse_attention` of a packed batch over pages (Q-Sparse-Attn: FusionRAG, arXiv 2601.12904 section 4.3).

    Sequence b has the rows row_starts[b] <= i < row_starts[b + 1] of `q`, and its cache is what `table` says. A row
    sees the keys of its sequence that are valid, not stale, at most at its position, and closer than `window`. Keys of
    an entry are rotated by `turn` positions as they are read (RoPE on load: float32, angle from float64, cast once to
    the pages' dtype), which equals assembling them first. Pages are only read; sequences may name the same ones.

    Args:
        q: [N, Hq, D] packed rows, float32, float16 or bfloat16.
        k_pages: [num_pages, page_size, Hkv, D], v_pages: [num_pages, page_size, Hkv, Dv]: the pool of one layer, q's
            dtype and device; page_size a power of two from 16 to 128 (a multiple of 32 for stale bits). Rows that are
            not valid, and pages nobody names, may be unwritten memory.
        table: see `PageTable`.
        q_positions: int64 [N]; ascending within a sequence is fast.
        row_starts: int64 [B + 1], ascending from 0 to N. A sequence may have no rows, and no keys.
        scale, window, softcap: see `q_sparse_attention`.
        inv_freq: float32 [H], radians a position; dimension d < H is paired with d + H. None: nothing is rotated.
        impl: "auto", "triton", "cpu" (gathers each sequence, then the CPU path) or "reference".

    Returns:
        [N, Hq, Dv] in q's dtype, contiguous; zeros for a row that sees no key.

    Raises:
        ArgumentError: a shape, dtype or device does not fit the above.
        ImplementationError: `impl` is unknown or not available.
    """
    check_pages(q, k_pages, v_pages, table, q_positions, row_starts, window, softcap, inv_freq)
    name = resolve(impl, q.device, max(q.shape[2], v_pages.shape[3]))
    rules: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "inv_freq": inv_freq}
    if name == "triton":
        from fusionrag_kernels.paged_q_sparse_attention import kernel

        return kernel.paged_q_sparse_attention(q, k_pages, v_pages, table, q_positions, row_starts, **rules)
    attention = cpu.q_sparse_attention if name == "cpu" else reference.q_sparse_attention
    return attend_gathered(attention, q, k_pages, v_pages, table, q_positions, row_starts, **rules)
