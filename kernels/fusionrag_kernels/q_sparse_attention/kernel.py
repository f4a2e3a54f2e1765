"""Q-sparse attention in Triton: row tiles with the group's heads folded in, over only the key tiles their rows see."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusionrag_kernels.launch import KeyIndex, block_dim, key_index, score_factors
from fusionrag_kernels.q_sparse_attention.split_keys import merge
from fusionrag_kernels.runtime import backend, num_processors
from fusionrag_kernels.tile_ops import accumulate, finite_or_zero, load_queries, load_rows, scores, seen_by_any, sees
from fusionrag_kernels.tuning import Tiles, attention_tiles, num_splits, precision

FURTHEST = tl.constexpr(2**29)  # position of a key or padding row that takes part in nothing


@triton.jit
def _attend_tile(
    b_out, b_max, b_sum, b_q, b_row_position, i_start, num_keys, last, k, v, key_positions,
    k_stride_n, k_stride_d, v_stride_n, v_stride_d, window, factor, cap,
    IS_EDGE: tl.constexpr, HAS_KEY_POSITIONS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of one tile over keys i_start ... of one head; `IS_EDGE`: some row does not see some of them."""
    o_key = i_start + tl.arange(0, BLOCK_N)
    m_key = o_key < num_keys
    b_key_position = o_key
    if HAS_KEY_POSITIONS:
        b_key_position = tl.load(key_positions + o_key, mask=m_key, other=FURTHEST)
    if IS_EDGE:
        m_seen = sees(b_row_position, b_key_position, window, HAS_WINDOW) & m_key[None, :]
        m_key = m_key & (b_key_position <= last)
        if HAS_WINDOW:
            m_key = m_key & seen_by_any(m_seen)
    b_k = load_rows(k, o_key, m_key, k_stride_n, k_stride_d, DIM, BLOCK_DIM)
    b_s = scores(b_q, b_k, factor, cap, HAS_SOFTCAP, PRECISION)
    if IS_EDGE:
        b_s = tl.where(m_seen, b_s, float("-inf"))
    b_v = load_rows(v, o_key, m_key, v_stride_n, v_stride_d, VALUE_DIM, BLOCK_VALUE_DIM)
    return accumulate(b_out, b_max, b_sum, b_s, b_v, PRECISION)


@triton.jit
def attention_kernel(
    q, k, v, out, log_sums, row_positions, key_positions, tile_first, tile_last,
    num_rows, num_keys, num_tiles,
    q_stride_n, q_stride_h, q_stride_d, k_stride_n, k_stride_h, k_stride_d, v_stride_n, v_stride_h, v_stride_d,
    window, factor, cap,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HAS_KEY_POSITIONS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, NUM_SPLITS: tl.constexpr,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (i_tile, i_kv_head, i_split): `BLOCK_M` folded rows over one of `NUM_SPLITS` parts of the keys they see.

    out [NUM_SPLITS, num_rows, Hq, VALUE_DIM], log_sums (log2; only with splits) [NUM_SPLITS, num_rows, Hq], contiguous.
    Keys in tiles: positions of keys lie in tile_first[t] ... tile_last[t] (only with `HAS_KEY_POSITIONS`).
    """
    i_tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last rows see most keys: they go first
    i_kv_head = tl.program_id(1)
    i_split = tl.program_id(2)
    o_folded = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    o_row = o_folded // GROUP
    o_group = o_folded % GROUP
    m_row = o_row < num_rows
    b_q = load_queries(q, o_row, i_kv_head, o_group, m_row, q_stride_n, q_stride_h, q_stride_d, GROUP, DIM, BLOCK_DIM)
    b_row_position = tl.load(row_positions + o_row, mask=m_row, other=-FURTHEST).to(tl.int32)
    last = tl.max(b_row_position, 0)
    first = tl.min(tl.where(m_row, b_row_position, FURTHEST), 0)

    k += i_kv_head.to(tl.int64) * k_stride_h
    v += i_kv_head.to(tl.int64) * v_stride_h
    b_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    b_out = tl.zeros([BLOCK_M, BLOCK_VALUE_DIM], dtype=tl.float32)
    if HAS_KEY_POSITIONS:
        per_split = tl.cdiv(num_tiles, NUM_SPLITS)
        for i_keys in range(i_split * per_split, tl.minimum((i_split + 1) * per_split, num_tiles)):
            b_tile_first = tl.load(tile_first + i_keys)
            b_tile_last = tl.load(tile_last + i_keys)
            is_seen = b_tile_first <= last
            if HAS_WINDOW:
                is_seen = is_seen & (first - b_tile_last < window)
            if is_seen:
                b_out, b_max, b_sum = _attend_tile(
                    b_out, b_max, b_sum, b_q, b_row_position, i_keys * BLOCK_N, num_keys, last, k, v, key_positions,
                    k_stride_n, k_stride_d, v_stride_n, v_stride_d, window, factor, cap,
                    True, True, HAS_WINDOW, HAS_SOFTCAP, DIM, BLOCK_DIM, VALUE_DIM, BLOCK_VALUE_DIM, BLOCK_N, PRECISION,
                )  # fmt: skip
    else:
        # Some row sees a key of [start, stop); all rows see all keys of [whole, whole_stop).
        stop = tl.maximum(tl.minimum(last + 1, num_keys), 0)
        start = stop * 0
        whole = start
        if HAS_WINDOW:
            start = tl.maximum(first - window + 1, 0) // BLOCK_N * BLOCK_N
            whole = tl.cdiv(tl.maximum(last - window + 1, 0), BLOCK_N) * BLOCK_N
        per_split = tl.cdiv(tl.maximum(stop - start, 0), NUM_SPLITS * BLOCK_N) * BLOCK_N
        start += i_split * per_split
        stop = tl.minimum(stop, start + per_split)
        whole = tl.minimum(tl.maximum(whole, start), tl.maximum(stop, start))
        whole_stop = tl.maximum(tl.minimum(first + 1, stop), 0) // BLOCK_N * BLOCK_N
        whole_stop = tl.maximum(whole_stop, whole)
        if HAS_WINDOW:
            for i_start in range(start, whole, BLOCK_N):
                b_out, b_max, b_sum = _attend_tile(
                    b_out, b_max, b_sum, b_q, b_row_position, i_start, num_keys, last, k, v, key_positions,
                    k_stride_n, k_stride_d, v_stride_n, v_stride_d, window, factor, cap,
                    True, False, True, HAS_SOFTCAP, DIM, BLOCK_DIM, VALUE_DIM, BLOCK_VALUE_DIM, BLOCK_N, PRECISION,
                )  # fmt: skip
        for i_start in range(whole, whole_stop, BLOCK_N):
            b_out, b_max, b_sum = _attend_tile(
                b_out, b_max, b_sum, b_q, b_row_position, i_start, num_keys, last, k, v, key_positions,
                k_stride_n, k_stride_d, v_stride_n, v_stride_d, window, factor, cap,
                False, False, HAS_WINDOW, HAS_SOFTCAP, DIM, BLOCK_DIM, VALUE_DIM, BLOCK_VALUE_DIM, BLOCK_N, PRECISION,
            )  # fmt: skip
        for i_start in range(whole_stop, stop, BLOCK_N):
            b_out, b_max, b_sum = _attend_tile(
                b_out, b_max, b_sum, b_q, b_row_position, i_start, num_keys, last, k, v, key_positions,
                k_stride_n, k_stride_d, v_stride_n, v_stride_d, window, factor, cap,
                True, False, HAS_WINDOW, HAS_SOFTCAP, DIM, BLOCK_DIM, VALUE_DIM, BLOCK_VALUE_DIM, BLOCK_N, PRECISION,
            )  # fmt: skip
    store_attention(
        out, log_sums, i_split * num_rows, o_row, i_kv_head * GROUP + o_group, m_row, b_out, b_max, b_sum,
        NUM_KV_HEADS * GROUP, NUM_SPLITS > 1, VALUE_DIM, BLOCK_VALUE_DIM,
    )  # fmt: skip


@triton.jit
def store_attention(
    out, log_sums, first_row, o_row, o_head, m_row, b_out, b_max, b_sum,
    NUM_HEADS: tl.constexpr, IS_PART: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Normalise and store rows; a row that saw no key is 0."""
    o_dim = tl.arange(0, BLOCK_VALUE_DIM)
    b_out = b_out / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
    o_item = (first_row + o_row).to(tl.int64) * NUM_HEADS + o_head
    m_out = m_row[:, None] & (o_dim < VALUE_DIM)[None, :]
    tl.store(out + o_item[:, None] * VALUE_DIM + o_dim[None, :], b_out.to(out.dtype.element_ty), mask=m_out)
    if IS_PART:
        tl.store(log_sums + o_item, finite_or_zero(b_max) + tl.log2(b_sum), mask=m_row)


@torch.no_grad()
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
    """The contract of `fusionrag_kernels.q_sparse_attention`, for head sizes up to 256; positions below 2**29."""
    (num_rows, num_heads, _), (num_keys, num_kv_heads, value_dim) = q.shape, v.shape
    out = q.new_empty(num_rows, num_heads, value_dim)
    if num_rows == 0 or num_keys == 0:
        return out.zero_()
    num_folded = num_rows * (num_heads // num_kv_heads)
    tiles = attention_tiles(backend(), q.element_size(), num_folded, max(q.shape[2], value_dim))
    num_programs = triton.cdiv(num_folded, tiles.block_m) * num_kv_heads
    splits = num_splits(num_programs, triton.cdiv(num_keys, tiles.block_n), num_processors(q.device))
    index = key_index(kv_positions, kv_valid, num_keys, tiles.block_n, q.device)
    if splits == 1:
        _launch(q, k, v, out, None, q_positions, index, tiles, 1, scale, window, softcap)
        return out
    parts = q.new_empty(splits, *out.shape, dtype=torch.float32)
    log_sums = q.new_empty(splits, num_rows, num_heads, dtype=torch.float32)
    _launch(q, k, v, parts, log_sums, q_positions, index, tiles, splits, scale, window, softcap)
    merge(parts, log_sums, out)
    return out


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor | None,
    q_positions: Tensor,
    index: KeyIndex | None,
    tiles: Tiles,
    splits: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    (num_rows, num_heads, dim), (num_keys, num_kv_heads, value_dim) = q.shape, v.shape
    group = num_heads // num_kv_heads
    factor, cap = score_factors(scale, softcap)
    attention_kernel[(triton.cdiv(num_rows * group, tiles.block_m), num_kv_heads, splits)](
        q, k, v, out, log_sums, q_positions,
        index and index.positions, index and index.tile_first, index and index.tile_last,
        num_rows, num_keys, triton.cdiv(num_keys, tiles.block_n),
        *q.stride(), *k.stride(), *v.stride(), min(window or 1, 2**29), factor, cap,
        NUM_KV_HEADS=num_kv_heads, GROUP=group, HAS_KEY_POSITIONS=index is not None,
        HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None, NUM_SPLITS=splits,
        DIM=dim, BLOCK_DIM=block_dim(dim), VALUE_DIM=value_dim, BLOCK_VALUE_DIM=block_dim(value_dim),
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, PRECISION=precision(backend()),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
