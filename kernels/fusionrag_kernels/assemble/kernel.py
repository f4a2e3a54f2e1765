"""Assembly in Triton: every stored number is read once and every row written once, all layers in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusionrag_kernels.launch import block_dim
from fusionrag_kernels.tuning import ASSEMBLE_ROWS, ASSEMBLE_WARPS, padded


@triton.jit
def assemble_kernel(
    stored, out, scales, cos, sin, num_heads, num_rows,
    stored_stride_l, stored_stride_h, stored_stride_n, stored_stride_d,
    out_stride_l, out_stride_h, out_stride_n, out_stride_d,
    scale_stride_l, scale_stride_h, scale_stride_n, scale_stride_d,
    HAS_SCALES: tl.constexpr, HALF: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (i_rows, layer * head): `BLOCK_N` rows; cos, sin float32 [L, HALF]. `HALF` = 0: nothing is rotated."""
    i_rows = tl.program_id(0)
    i_layer = (tl.program_id(1) // num_heads).to(tl.int64)
    i_head = (tl.program_id(1) % num_heads).to(tl.int64)
    o_row = (i_rows * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    o_dim = tl.arange(0, BLOCK_DIM)
    m_dim = o_dim < DIM
    m_tile = (o_row < num_rows)[:, None] & m_dim[None, :]
    stored += i_layer * stored_stride_l + i_head * stored_stride_h
    scales_at = scales
    if HAS_SCALES:
        scales_at += i_layer * scale_stride_l + i_head * scale_stride_h
    p_row = stored + o_row[:, None] * stored_stride_n
    b_x = tl.load(p_row + o_dim.to(tl.int64)[None, :] * stored_stride_d, mask=m_tile, other=0.0).to(tl.float32)
    if HAS_SCALES:
        o_scale = o_row[:, None] * scale_stride_n + o_dim.to(tl.int64)[None, :] * scale_stride_d
        b_x = b_x * tl.load(scales_at + o_scale, mask=m_tile, other=0.0).to(tl.float32)
    if HALF > 0:
        # Each dimension with its partner, which the same program reads and the processor's cache holds.
        m_turned = o_dim < 2 * HALF
        o_partner = tl.where(o_dim < HALF, o_dim + HALF, o_dim - HALF)
        m_partner = m_tile & m_turned[None, :]
        b_y = tl.load(p_row + o_partner.to(tl.int64)[None, :] * stored_stride_d, mask=m_partner, other=0.0)
        b_y = b_y.to(tl.float32)
        if HAS_SCALES:
            o_scale = o_row[:, None] * scale_stride_n + o_partner.to(tl.int64)[None, :] * scale_stride_d
            b_y = b_y * tl.load(scales_at + o_scale, mask=m_partner, other=0.0).to(tl.float32)
        o_angle = i_layer * HALF + o_dim % HALF
        b_cos = tl.load(cos + o_angle, mask=m_turned, other=1.0)
        b_sin = tl.load(sin + o_angle, mask=m_turned, other=0.0)
        b_sin = tl.where(o_dim < HALF, -b_sin, b_sin)
        b_x = b_x * b_cos[None, :] + b_y * b_sin[None, :]
    out += i_layer * out_stride_l + i_head * out_stride_h
    o_out = o_row[:, None] * out_stride_n + o_dim.to(tl.int64)[None, :] * out_stride_d
    tl.store(out + o_out, b_x.to(out.dtype.element_ty), mask=m_tile)


@torch.no_grad()
def assemble(
    keys: Tensor,
    values: Tensor,
    out_keys: Tensor,
    out_values: Tensor,
    offset: int,
    inv_freq: Tensor,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """The contract of `fusionrag_kernels.assemble`, for head sizes up to 256."""
    angle = inv_freq.double() * offset
    half = inv_freq.shape[1] if offset else 0
    _launch(keys, out_keys, key_scales, angle.cos().float(), angle.sin().float(), half)
    _launch(values, out_values, value_scales, None, None, 0)


def _launch(
    stored: Tensor, out: Tensor, scales: Tensor | None, cos: Tensor | None, sin: Tensor | None, half: int
) -> None:
    num_layers, num_heads, num_rows, dim = stored.shape
    if stored.numel() == 0:
        return
    block_n = ASSEMBLE_ROWS[padded(dim)]
    strides = (0, 0, 0, 0) if scales is None else scales.expand(stored.shape).stride()
    assemble_kernel[(triton.cdiv(num_rows, block_n), num_layers * num_heads)](
        stored, out, scales, cos, sin, num_heads, num_rows, *stored.stride(), *out.stride(), *strides,
        HAS_SCALES=scales is not None, HALF=half, DIM=dim, BLOCK_DIM=block_dim(dim), BLOCK_N=block_n,
        num_warps=ASSEMBLE_WARPS,
    )  # fmt: skip
