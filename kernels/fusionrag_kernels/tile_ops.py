"""Device functions the Triton kernels share: scores of a tile, the online softmax, a row's place in the folded tile.

Only kernel modules import this: it needs triton.
"""

import triton
import triton.language as tl


@triton.jit
def load_queries(
    q, i_row, i_kv_head, i_group, m_row, q_stride_n, q_stride_h, q_stride_d,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_DIM] queries of folded rows: the heads of a group are rows of their key head; 0 in padding."""
    o_dim = tl.arange(0, BLOCK_DIM)
    o_head = i_kv_head * GROUP + i_group
    o_q = i_row.to(tl.int64)[:, None] * q_stride_n + o_head.to(tl.int64)[:, None] * q_stride_h
    mask = m_row[:, None] & (o_dim < DIM)[None, :]
    return tl.load(q + o_q + o_dim.to(tl.int64)[None, :] * q_stride_d, mask=mask, other=0.0)


@triton.jit
def load_rows(base, o_row, m_row, stride_n, stride_d, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """[BLOCK_N, BLOCK_DIM] keys or values at rows `o_row` of one head; 0 where `m_row` is false and in padding."""
    o_dim = tl.arange(0, BLOCK_DIM)
    pointers = base + o_row.to(tl.int64)[:, None] * stride_n + o_dim.to(tl.int64)[None, :] * stride_d
    return tl.load(pointers, mask=m_row[:, None] & (o_dim < DIM)[None, :], other=0.0)


@triton.jit
def scores(b_q, b_k, factor, cap, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """[BLOCK_M, BLOCK_N] scores in units of log2: factor * q.k, or cap * tanh(factor * q.k)."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * factor
    if HAS_SOFTCAP:
        b_s = cap * (2.0 * tl.sigmoid(2.0 * b_s) - 1.0)
    return b_s


@triton.jit
def finite_or_zero(b_max):
    """A row that has seen nothing has maximum -inf; subtracting 0 instead keeps its weights 0 and not NaN."""
    return tl.where(b_max == float("-inf"), 0.0, b_max)


@triton.jit
def accumulate(b_out, b_max, b_sum, b_s, b_v, PRECISION: tl.constexpr):
    """One step of the online softmax: scores [BLOCK_M, BLOCK_N] (-inf where unseen) and values [BLOCK_N, BLOCK_DV]."""
    b_new = tl.maximum(b_max, tl.max(b_s, 1))
    b_shift = finite_or_zero(b_new)
    b_alpha = tl.exp2(b_max - b_shift)
    b_p = tl.exp2(b_s - b_shift[:, None])
    b_sum = b_sum * b_alpha + tl.sum(b_p, 1)
    b_out = tl.dot(b_p.to(b_v.dtype), b_v, b_out * b_alpha[:, None], input_precision=PRECISION)
    return b_out, b_new, b_sum


@triton.jit
def sees(b_row_position, b_key_position, window, HAS_WINDOW: tl.constexpr):
    """[BLOCK_M, BLOCK_N]: which rows see which keys, by position."""
    m_seen = b_key_position[None, :] <= b_row_position[:, None]
    if HAS_WINDOW:
        m_seen = m_seen & (b_row_position[:, None] - b_key_position[None, :] < window)
    return m_seen


@triton.jit
def seen_by_any(m_seen):
    """[BLOCK_N]: keys that some row of the tile sees. What no row sees may be NaN, and 0 * NaN is NaN."""
    return tl.max(m_seen.to(tl.int32), 0) > 0
