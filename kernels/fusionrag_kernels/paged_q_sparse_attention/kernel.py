"""Paged q-sparse attention in Triton: a row tile walks its sequence's page table, one page a key tile.

Keys are turned to their place as they are loaded, stale originals and rows that do not belong are never loaded.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusionrag_kernels.launch import block_dim, score_factors
from fusionrag_kernels.paged_q_sparse_attention.pages import SCATTERED, PageTable
from fusionrag_kernels.q_sparse_attention.kernel import store_attention
from fusionrag_kernels.q_sparse_attention.split_keys import merge
from fusionrag_kernels.runtime import backend, num_processors
from fusionrag_kernels.tile_ops import accumulate, load_queries, load_rows, scores, seen_by_any, sees
from fusionrag_kernels.tuning import Tiles, attention_tiles, num_splits, precision

FURTHEST = tl.constexpr(2**29)
SCATTERED_START = tl.constexpr(SCATTERED)


@triton.jit
def _load_turned_keys(
    k, cos, sin, o_row, m_row, stride_n, stride_d,
    HALF: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """[page_size, BLOCK_DIM] keys rotated by one angle a dimension pair; HALF = 0: as they are."""
    b_k = load_rows(k, o_row, m_row, stride_n, stride_d, DIM, BLOCK_DIM)
    if HALF > 0:
        o_dim = tl.arange(0, BLOCK_DIM)
        m_turned = o_dim < 2 * HALF
        o_partner = tl.where(o_dim < HALF, o_dim + HALF, o_dim - HALF)
        pointers = k + o_row.to(tl.int64)[:, None] * stride_n + o_partner.to(tl.int64)[None, :] * stride_d
        b_y = tl.load(pointers, mask=m_row[:, None] & m_turned[None, :], other=0.0)
        b_cos = tl.load(cos + o_dim % HALF, mask=m_turned, other=1.0)
        b_sin = tl.load(sin + o_dim % HALF, mask=m_turned, other=0.0)
        b_sin = tl.where(o_dim < HALF, -b_sin, b_sin)
        b_turned = b_k.to(tl.float32) * b_cos[None, :] + b_y.to(tl.float32) * b_sin[None, :]
        b_k = b_turned.to(b_k.dtype)
    return b_k


@triton.jit
def paged_attention_kernel(
    q, k, v, out, log_sums, row_positions, tile_sequence, tile_index, row_starts,
    page, start, first, beyond, num_entries, page_positions, stale, cos, sin,
    num_rows, num_sequences, max_entries,
    q_stride_n, q_stride_h, q_stride_d,
    k_stride_p, k_stride_n, k_stride_h, k_stride_d, v_stride_p, v_stride_n, v_stride_h, v_stride_d,
    window, factor, cap,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr, HALF: tl.constexpr,
    HAS_SCATTERED: tl.constexpr, HAS_STALE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    NUM_SPLITS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (i_tile, i_kv_head, i_split): a tile of folded rows of one sequence over a part of its page table.

    Table fields are contiguous [B, max_entries], stale [B, max_entries, PAGE_SIZE / 32], cos and sin float32
    [B, max_entries, HALF]. out and log_sums as in `attention_kernel`.
    """
    i_sequence = tl.load(tile_sequence + tl.program_id(0))
    i_kv_head = tl.program_id(1)
    i_split = tl.program_id(2)
    if i_sequence < num_sequences:
        first_row = tl.load(row_starts + i_sequence).to(tl.int32)
        stop_row = tl.load(row_starts + i_sequence + 1).to(tl.int32)
        o_folded = tl.load(tile_index + tl.program_id(0)) * BLOCK_M + tl.arange(0, BLOCK_M)
        o_row = first_row + o_folded // GROUP
        m_row = o_row < stop_row
        b_q = load_queries(
            q, o_row, i_kv_head, o_folded % GROUP, m_row, q_stride_n, q_stride_h, q_stride_d, GROUP, DIM, BLOCK_DIM
        )
        b_row_position = tl.load(row_positions + o_row, mask=m_row, other=-FURTHEST).to(tl.int32)
        last_row_position = tl.max(b_row_position, 0)
        first_row_position = tl.min(tl.where(m_row, b_row_position, FURTHEST), 0)
        k += i_kv_head.to(tl.int64) * k_stride_h
        v += i_kv_head.to(tl.int64) * v_stride_h
        b_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
        b_out = tl.zeros([BLOCK_M, BLOCK_VALUE_DIM], dtype=tl.float32)
        count = tl.load(num_entries + i_sequence)
        per_split = tl.cdiv(count, NUM_SPLITS)
        o_key = tl.arange(0, PAGE_SIZE)
        for i_entry in range(i_split * per_split, tl.minimum((i_split + 1) * per_split, count)):
            o_entry = i_sequence.to(tl.int64) * max_entries + i_entry
            i_page = tl.load(page + o_entry).to(tl.int64)
            page_start = tl.load(start + o_entry)
            page_first = tl.load(first + o_entry)
            page_beyond = tl.load(beyond + o_entry)
            m_key = (o_key >= page_first) & (o_key < page_beyond)
            b_key_position = page_start + o_key
            if HAS_SCATTERED:
                b_scattered = tl.load(
                    page_positions + i_page * PAGE_SIZE + o_key,
                    mask=m_key & (page_start == SCATTERED_START), other=FURTHEST,
                )  # fmt: skip
                b_key_position = tl.where(page_start == SCATTERED_START, b_scattered, b_key_position)
            if HAS_STALE:
                b_word = tl.load(stale + o_entry * (PAGE_SIZE // 32) + o_key // 32)
                m_key = m_key & (((b_word >> (o_key % 32)) & 1) == 0)
            m_key = m_key & (b_key_position <= last_row_position)
            if HAS_WINDOW:
                m_key = m_key & (first_row_position - b_key_position < window)
            if tl.max(m_key.to(tl.int32), 0) > 0:
                m_seen = sees(b_row_position, b_key_position, window, HAS_WINDOW) & m_key[None, :]
                if HAS_WINDOW:
                    m_key = m_key & seen_by_any(m_seen)
                b_k = _load_turned_keys(
                    k + i_page * k_stride_p, cos + o_entry * HALF, sin + o_entry * HALF, o_key, m_key,
                    k_stride_n, k_stride_d, HALF, DIM, BLOCK_DIM,
                )  # fmt: skip
                b_s = scores(b_q, b_k, factor, cap, HAS_SOFTCAP, PRECISION)
                b_s = tl.where(m_seen, b_s, float("-inf"))
                b_v = load_rows(
                    v + i_page * v_stride_p, o_key, m_key, v_stride_n, v_stride_d, VALUE_DIM, BLOCK_VALUE_DIM
                )
                b_out, b_max, b_sum = accumulate(b_out, b_max, b_sum, b_s, b_v, PRECISION)
        store_attention(
            out, log_sums, i_split * num_rows, o_row, i_kv_head * GROUP + o_folded % GROUP, m_row, b_out, b_max, b_sum,
            NUM_KV_HEADS * GROUP, NUM_SPLITS > 1, VALUE_DIM, BLOCK_VALUE_DIM,
        )  # fmt: skip


def row_tiles(row_starts: Tensor, num_rows: int, group: int, block_m: int) -> tuple[Tensor, Tensor]:
    """Sequence and index within it of every row tile, int32, on the device and without asking it for a number.

    There are as many as there could be; those left over have the sequence B.
    """
    num_sequences = row_starts.shape[0] - 1
    counts = (row_starts.diff() * group + block_m - 1) // block_m
    ends = counts.cumsum(0)
    tiles = torch.arange(min(num_rows, num_sequences) + num_rows * group // block_m, device=row_starts.device)
    sequence = torch.searchsorted(ends, tiles, right=True)
    begins = torch.cat([ends - counts, ends[-1:]])
    return sequence.to(torch.int32), (tiles - begins[sequence]).to(torch.int32)


@torch.no_grad()
def paged_q_sparse_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: PageTable,
    q_positions: Tensor,
    row_starts: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    inv_freq: Tensor | None,
) -> Tensor:
    """The contract of `fusionrag_kernels.paged_q_sparse_attention`, for head sizes up to 256."""
    (num_rows, num_heads, dim), (_, _, num_kv_heads, value_dim) = q.shape, v_pages.shape
    out = q.new_empty(num_rows, num_heads, value_dim)
    num_sequences, max_entries = table.page.shape
    if num_rows == 0 or max_entries == 0:
        return out.zero_()
    group = num_heads // num_kv_heads
    average = -(-num_rows // num_sequences) * group
    tiles = attention_tiles(backend(), q.element_size(), average, max(dim, value_dim))
    which = row_tiles(row_starts, num_rows, group, tiles.block_m)
    splits = num_splits(which[0].shape[0] * num_kv_heads, max_entries, num_processors(q.device))
    target, log_sums = out, None
    if splits > 1:
        target = q.new_empty(splits, *out.shape, dtype=torch.float32)
        log_sums = q.new_empty(splits, num_rows, num_heads, dtype=torch.float32)
    _launch(q, k_pages, v_pages, target, log_sums, table, q_positions, row_starts, which, tiles, splits,
            scale, window, softcap, inv_freq)  # fmt: skip
    if log_sums is not None:
        merge(target, log_sums, out)
    return out


def _launch(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    out: Tensor,
    log_sums: Tensor | None,
    table: PageTable,
    q_positions: Tensor,
    row_starts: Tensor,
    which: tuple[Tensor, Tensor],
    tiles: Tiles,
    splits: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    inv_freq: Tensor | None,
) -> None:
    (num_rows, num_heads, dim), (_, page_size, num_kv_heads, value_dim) = q.shape, v_pages.shape
    num_sequences, max_entries = table.page.shape
    factor, cap = score_factors(scale, softcap)
    cos = sin = out  # never read where nothing is turned
    if inv_freq is not None:
        angle = table.turn.double()[..., None] * inv_freq.double()
        cos, sin = angle.cos().float(), angle.sin().float()
    fields = (table.page, table.start, table.first, table.beyond, table.num_entries, table.row_positions, table.stale)
    paged_attention_kernel[(which[0].shape[0], num_kv_heads, splits)](
        q, k_pages, v_pages, out, log_sums, q_positions, *which, row_starts.contiguous(),
        *(None if field is None else field.contiguous() for field in fields), cos, sin,
        num_rows, num_sequences, max_entries, *q.stride(), *k_pages.stride(), *v_pages.stride(),
        min(window or 1, 2**29), factor, cap,
        NUM_KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads, PAGE_SIZE=page_size,
        HALF=0 if inv_freq is None else inv_freq.shape[0], HAS_SCATTERED=table.row_positions is not None,
        HAS_STALE=table.stale is not None, HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None,
        NUM_SPLITS=splits, DIM=dim, BLOCK_DIM=block_dim(dim), VALUE_DIM=value_dim,
        BLOCK_VALUE_DIM=block_dim(value_dim), BLOCK_M=tiles.block_m, PRECISION=precision(backend()),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
