"""Critical scores in Triton: the softmax sums of every row, then each tile of keys goes over the rows on its own.

Each key's score is summed by one program, in one order: no atomics, the same bits every time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusionrag_kernels.launch import block_dim, key_index, score_factors
from fusionrag_kernels.runtime import backend
from fusionrag_kernels.tile_ops import finite_or_zero, load_queries, load_rows, scores, sees
from fusionrag_kernels.tuning import attention_tiles, precision

FURTHEST = tl.constexpr(2**29)
LN_2 = 0.6931471805599453
MODES = {"sum": 0, "l2": 1, "unnormalised": 2}


@triton.jit
def _tile_positions(key_positions, o_key, m_key, HAS_KEY_POSITIONS: tl.constexpr):
    if HAS_KEY_POSITIONS:
        return tl.load(key_positions + o_key, mask=m_key, other=FURTHEST)
    return o_key


@triton.jit
def row_sums_kernel(
    q, k, log_sums, row_positions, key_positions, tile_first, tile_last, num_rows, num_keys, num_tiles,
    q_stride_n, q_stride_h, q_stride_d, k_stride_n, k_stride_h, k_stride_d, window, factor, cap,
    GROUP: tl.constexpr, HAS_KEY_POSITIONS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (i_tile, i_kv_head): log2 of the softmax sums of a tile of folded rows, into [Hkv, num_rows * GROUP]."""
    i_tile = tl.program_id(0)
    i_kv_head = tl.program_id(1)
    o_folded = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    o_row = o_folded // GROUP
    m_row = o_row < num_rows
    b_q = load_queries(
        q, o_row, i_kv_head, o_folded % GROUP, m_row, q_stride_n, q_stride_h, q_stride_d, GROUP, DIM, BLOCK_DIM
    )
    b_row_position = tl.load(row_positions + o_row, mask=m_row, other=-FURTHEST).to(tl.int32)
    last = tl.max(b_row_position, 0)
    first = tl.min(tl.where(m_row, b_row_position, FURTHEST), 0)
    k += i_kv_head.to(tl.int64) * k_stride_h
    b_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    for i_keys in range(0, num_tiles):
        if HAS_KEY_POSITIONS:
            is_seen = tl.load(tile_first + i_keys) <= last
            if HAS_WINDOW:
                is_seen = is_seen & (first - tl.load(tile_last + i_keys) < window)
        else:
            is_seen = i_keys * BLOCK_N <= last
            if HAS_WINDOW:
                is_seen = is_seen & (first - (i_keys * BLOCK_N + BLOCK_N - 1) < window)
        if is_seen:
            o_key = i_keys * BLOCK_N + tl.arange(0, BLOCK_N)
            m_key = o_key < num_keys
            b_key_position = _tile_positions(key_positions, o_key, m_key, HAS_KEY_POSITIONS)
            m_seen = sees(b_row_position, b_key_position, window, HAS_WINDOW) & m_key[None, :]
            b_k = load_rows(k, o_key, m_key & (b_key_position <= last), k_stride_n, k_stride_d, DIM, BLOCK_DIM)
            b_s = scores(b_q, b_k, factor, cap, HAS_SOFTCAP, PRECISION)
            b_s = tl.where(m_seen, b_s, float("-inf"))
            b_new = tl.maximum(b_max, tl.max(b_s, 1))
            b_shift = finite_or_zero(b_new)
            b_sum = b_sum * tl.exp2(b_max - b_shift) + tl.sum(tl.exp2(b_s - b_shift[:, None]), 1)
            b_max = b_new
    o_out = i_kv_head.to(tl.int64) * num_rows * GROUP + o_folded
    tl.store(log_sums + o_out, finite_or_zero(b_max) + tl.log2(b_sum), mask=m_row)


@triton.jit
def key_scores_kernel(
    q, k, log_sums, out, row_positions, key_positions, tile_first, tile_last, num_rows, num_keys,
    q_stride_n, q_stride_h, q_stride_d, k_stride_n, k_stride_h, k_stride_d, window, factor, cap,
    GROUP: tl.constexpr, HAS_KEY_POSITIONS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    MODE: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (i_keys, i_kv_head): a tile of keys over all rows of one key head, into out [Hkv, num_keys].

    MODE 0: sum of weights; 1: sum of their squares; 2: log2 of the sum of exponentials.
    """
    i_keys = tl.program_id(0)
    i_kv_head = tl.program_id(1)
    o_key = i_keys * BLOCK_N + tl.arange(0, BLOCK_N)
    m_key = o_key < num_keys
    b_key_position = _tile_positions(key_positions, o_key, m_key, HAS_KEY_POSITIONS)
    if HAS_KEY_POSITIONS:
        first_key = tl.load(tile_first + i_keys)
        last_key = tl.load(tile_last + i_keys)
    else:
        first_key = i_keys * BLOCK_N
        last_key = first_key + BLOCK_N - 1
    b_k = load_rows(
        k + i_kv_head.to(tl.int64) * k_stride_h, o_key, m_key & (b_key_position < FURTHEST), k_stride_n, k_stride_d,
        DIM, BLOCK_DIM,
    )  # fmt: skip
    b_max = tl.full([BLOCK_N], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_N], dtype=tl.float32)
    for i_start in range(0, num_rows * GROUP, BLOCK_M):
        o_folded = i_start + tl.arange(0, BLOCK_M)
        o_row = o_folded // GROUP
        m_row = o_row < num_rows
        b_row_position = tl.load(row_positions + o_row, mask=m_row, other=-FURTHEST).to(tl.int32)
        is_seen = first_key <= tl.max(b_row_position, 0)
        if HAS_WINDOW:
            is_seen = is_seen & (tl.min(tl.where(m_row, b_row_position, FURTHEST), 0) - last_key < window)
        if is_seen:
            b_q = load_queries(
                q, o_row, i_kv_head, o_folded % GROUP, m_row, q_stride_n, q_stride_h, q_stride_d, GROUP, DIM, BLOCK_DIM
            )
            m_seen = sees(b_row_position, b_key_position, window, HAS_WINDOW) & m_key[None, :] & m_row[:, None]
            b_s = scores(b_q, b_k, factor, cap, HAS_SOFTCAP, PRECISION)
            b_s = tl.where(m_seen, b_s, float("-inf"))
            if MODE == 2:
                b_new = tl.maximum(b_max, tl.max(b_s, 0))
                b_shift = finite_or_zero(b_new)
                b_sum = b_sum * tl.exp2(b_max - b_shift) + tl.sum(tl.exp2(b_s - b_shift[None, :]), 0)
                b_max = b_new
            else:
                o_sum = i_kv_head.to(tl.int64) * num_rows * GROUP + o_folded
                b_log_sum = tl.load(log_sums + o_sum, mask=m_row, other=0.0)
                b_p = tl.exp2(b_s - finite_or_zero(b_log_sum)[:, None])
                if MODE == 1:
                    b_p = b_p * b_p
                b_sum += tl.sum(b_p, 0)
    if MODE == 2:
        b_sum = finite_or_zero(b_max) + tl.log2(b_sum)
    tl.store(out + i_kv_head.to(tl.int64) * num_keys + o_key, b_sum, mask=m_key)


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
    """The contract of `fusionrag_kernels.critical_scores`, for head sizes up to 256; positions below 2**29."""
    (num_rows, num_heads, dim), (num_keys, num_kv_heads, _) = q.shape, k.shape
    if num_rows == 0 or num_keys == 0:
        return q.new_full((num_keys,), -torch.inf if norm == "unnormalised" else 0, dtype=torch.float32)
    group = num_heads // num_kv_heads
    tiles = attention_tiles(backend(), q.element_size(), num_rows * group, dim)
    index = key_index(kv_positions, kv_valid, num_keys, tiles.block_n, q.device)
    positions = q_positions, index and index.positions, index and index.tile_first, index and index.tile_last
    factor, cap = score_factors(scale, softcap)
    numbers = (*q.stride(), *k.stride(), min(window or 1, 2**29), factor, cap)
    common = {
        "GROUP": group, "HAS_KEY_POSITIONS": index is not None, "HAS_WINDOW": window is not None,
        "HAS_SOFTCAP": softcap is not None, "DIM": dim, "BLOCK_DIM": block_dim(dim), "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n, "PRECISION": precision(backend()), "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }  # fmt: skip
    num_tiles = triton.cdiv(num_keys, tiles.block_n)
    log_sums = None
    if norm != "unnormalised":
        log_sums = q.new_empty(num_kv_heads, num_rows * group, dtype=torch.float32)
        grid = (triton.cdiv(num_rows * group, tiles.block_m), num_kv_heads)
        row_sums_kernel[grid](q, k, log_sums, *positions, num_rows, num_keys, num_tiles, *numbers, **common)
    out = q.new_empty(num_kv_heads, num_keys, dtype=torch.float32)
    key_scores_kernel[(num_tiles, num_kv_heads)](
        q, k, log_sums, out, *positions, num_rows, num_keys, *numbers, MODE=MODES[norm], **common
    )
    if norm == "unnormalised":
        return torch.logsumexp(out * LN_2, 0)
    total = out.sum(0)
    return total.sqrt_() if norm == "l2" else total
