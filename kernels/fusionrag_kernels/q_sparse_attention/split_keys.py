"""Merging the parts of attention whose keys were split over programs."""

import triton
import triton.language as tl
from torch import Tensor

from fusionrag_kernels.tile_ops import finite_or_zero
from fusionrag_kernels.tuning import MERGE_WARPS


@triton.jit
def merge_kernel(parts, log_sums, out, num_items, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, NUM_SPLITS: tl.constexpr):
    """out [num_items, DIM] from parts [NUM_SPLITS, num_items, DIM] weighed by log_sums (log2) [NUM_SPLITS, num_items].

    One program an item (a row and head).
    """
    i_item = tl.program_id(0).to(tl.int64)
    o_dim = tl.arange(0, BLOCK_DIM)
    m_dim = o_dim < DIM
    b_largest = tl.load(log_sums + i_item)
    for i_split in range(1, NUM_SPLITS):
        b_largest = tl.maximum(b_largest, tl.load(log_sums + i_split * num_items + i_item))
    b_shift = finite_or_zero(b_largest)
    b_total = b_shift * 0.0
    b_out = tl.zeros([BLOCK_DIM], dtype=tl.float32)
    for i_split in range(NUM_SPLITS):
        o_part = i_split * num_items + i_item
        b_weight = tl.exp2(tl.load(log_sums + o_part) - b_shift)
        b_total += b_weight
        b_out += b_weight * tl.load(parts + o_part * DIM + o_dim, mask=m_dim, other=0.0)
    b_out = b_out / tl.where(b_total > 0, b_total, 1.0)
    tl.store(out + i_item * DIM + o_dim, b_out.to(out.dtype.element_ty), mask=m_dim)


def merge(parts: Tensor, log_sums: Tensor, out: Tensor) -> None:
    """Parts float32 [S, N, Hq, Dv] and log2 of their softmax sums [S, N, Hq] into `out` [N, Hq, Dv]."""
    num_splits, dim = parts.shape[0], parts.shape[3]
    num_items = out.shape[0] * out.shape[1]
    merge_kernel[(num_items,)](
        parts,
        log_sums,
        out,
        num_items,
        DIM=dim,
        BLOCK_DIM=triton.next_power_of_2(dim),
        NUM_SPLITS=num_splits,
        num_warps=MERGE_WARPS,
    )
