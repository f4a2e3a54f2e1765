"""Assembly in plain torch, layer by layer: intermediate float32 tensors stay in the processor's cache."""

import torch
from torch import Tensor


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
    """The contract of `fusionrag_kernels.assemble`; any device."""
    _place_values(values, value_scales, out_values)
    if offset == 0 and key_scales is None:
        out_keys.copy_(keys)
        return
    half, end = inv_freq.shape[1], 2 * inv_freq.shape[1]
    angle = (inv_freq.double() * offset)[:, None, None, :]
    # Rotation is linear, so a channel's scale goes into its cosine and sine: dequantization costs nothing more.
    cos, sin = angle.cos().float(), angle.sin().float()
    first_scale, second_scale, rest_scale = _channel_scales(key_scales, half)
    from_first = cos * first_scale, sin * first_scale
    from_second = cos * second_scale, sin * second_scale
    for layer in range(keys.shape[0]):
        stored, out = keys[layer], out_keys[layer]
        first, second = stored[..., :half].float(), stored[..., half:end].float()
        _turn(first, from_first[0][layer], second, from_second[1][layer], -1, out[..., :half])
        _turn(second, from_second[0][layer], first, from_first[1][layer], 1, out[..., half:end])
    if end < keys.shape[3]:
        out_keys[..., end:].copy_(keys[..., end:] if key_scales is None else keys[..., end:].float() * rest_scale)


def _turn(x: Tensor, cos: Tensor, y: Tensor, sin: Tensor, sign: int, out: Tensor) -> None:
    """out = x * cos + sign * y * sin; float32 is computed where it is wanted, the rest is cast once."""
    if out.dtype == torch.float32:
        torch.mul(x, cos, out=out)
        out.addcmul_(y, sin, value=sign)
    else:
        out.copy_((x * cos).addcmul_(y, sin, value=sign))


def _place_values(values: Tensor, scales: Tensor | None, out: Tensor) -> None:
    if scales is None:
        out.copy_(values)
        return
    for layer in range(values.shape[0]):
        out[layer].copy_(values[layer].float().mul_(scales[layer]))


def _channel_scales(scales: Tensor | None, half: int) -> tuple[Tensor | float, Tensor | float, Tensor | float]:
    if scales is None:
        return 1.0, 1.0, 1.0
    wide = scales.float()
    return wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
