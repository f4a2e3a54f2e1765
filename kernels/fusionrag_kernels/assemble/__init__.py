"""Laying the cached rows of one chunk out at their place in a request: rotation and dequantization in one pass."""

from collections.abc import Callable

import torch
from torch import Tensor

from fusionrag_kernels.assemble import cpu, reference
from fusionrag_kernels.checks import DTYPES
from fusionrag_kernels.dispatch import Implementation, resolve
from fusionrag_kernels.errors import ArgumentError

QUANTIZED = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def assemble(
    keys: Tensor,
    values: Tensor,
    out_keys: Tensor,
    out_values: Tensor,
    *,
    offset: int,
    inv_freq: Tensor,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    impl: str = "auto",
) -> None:
    """Write stored rows of all layers into `out_keys` and `out_values`, the keys moved by `offset` positions.

    RoPE is additive (FusionRAG, arXiv 2601.12904, appendix A.1): a key rotated for position s, rotated again by
    `offset`, is the key at s + offset. Stored numbers are multiplied by their scales, rotated in float32 by the angle
    offset * inv_freq (taken in float64), and cast once. Dimension d < H = inv_freq.shape[1] is paired with d + H; those
    from 2 * H on are not rotated.

    Args:
        keys: [L, Hkv, N, D]; values: [L, Hkv, N, Dv]: float32, float16, bfloat16, or int8 / float8 with scales.
        out_keys: [L, Hkv, N, D]; out_values: [L, Hkv, N, Dv]: written; usually views of a request's cache. Must not
            overlap `keys` or `values`.
        offset: positions to move by; negative moves back.
        inv_freq: float32 [L, H], radians a position.
        key_scales: [L, Hkv, 1, D], one a channel; value_scales: [L, Hkv, N, 1], one a token; float32 or float16.
        impl: "auto", "triton", "cpu" (plain torch, any device) or "reference".

    Raises:
        ArgumentError: a shape, dtype or device does not fit the above.
        ImplementationError: `impl` is unknown or not available.
    """
    _check("keys", keys, out_keys, key_scales, (*keys.shape[:2], 1, keys.shape[-1]))
    _check("values", values, out_values, value_scales, (*values.shape[:3], 1))
    if keys.shape[:3] != values.shape[:3] or keys.device != values.device:
        raise ArgumentError(f"keys and values share layers, heads, rows: {tuple(keys.shape)}, {tuple(values.shape)}")
    if inv_freq.ndim != 2 or inv_freq.shape[0] != keys.shape[0] or 2 * inv_freq.shape[1] > keys.shape[3]:
        raise ArgumentError(f"inv_freq is [L, at most D / 2] beside keys {tuple(keys.shape)}, got {inv_freq.shape}")
    op = _implementation(resolve(impl, keys.device, max(keys.shape[3], values.shape[3])))
    op(keys, values, out_keys, out_values, offset, inv_freq.to(keys.device), key_scales, value_scales)


def _check(name: str, stored: Tensor, out: Tensor, scales: Tensor | None, scale_shape: tuple[int, ...]) -> None:
    if stored.ndim != 4 or out.shape != stored.shape or out.device != stored.device:
        raise ArgumentError(f"{name} and its output are [L, Hkv, N, D] on one device, got {stored.shape}, {out.shape}")
    if out.dtype not in DTYPES or stored.dtype not in DTYPES + QUANTIZED:
        raise ArgumentError(f"{name} of {stored.dtype} cannot become {out.dtype}; outputs are one of {DTYPES}")
    if (scales is not None) != (stored.dtype in QUANTIZED):
        raise ArgumentError(f"{name} of {stored.dtype} take scales if and only if they are one of {QUANTIZED}")
    if scales is not None and (scales.shape != scale_shape or scales.device != stored.device):
        raise ArgumentError(f"scales of {name} are {scale_shape} on {stored.device}, got {tuple(scales.shape)}")


def _implementation(name: Implementation) -> Callable[..., None]:
    if name == "triton":
        from fusionrag_kernels.assemble import kernel

        return kernel.assemble
    return cpu.assemble if name == "cpu" else reference.assemble
