"""Assembly as its definition: dequantize, rotate, cast, each on the whole tensor in float32."""

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
    """The contract of `fusionrag_kernels.assemble`, written to be obviously right."""
    plain_keys, plain_values = keys.float(), values.float()
    if key_scales is not None:
        plain_keys = plain_keys * key_scales.float()
    if value_scales is not None:
        plain_values = plain_values * value_scales.float()
    out_keys.copy_(rotate(plain_keys, inv_freq.double() * offset))
    out_values.copy_(plain_values)


def rotate(keys: Tensor, angle: Tensor) -> Tensor:
    """keys float32 [L, Hkv, N, D] turned by angle [L, H]; dimensions from 2 * H on stay."""
    half = angle.shape[1]
    cos, sin = angle.cos().float()[:, None, None, :], angle.sin().float()[:, None, None, :]
    first, second, rest = keys[..., :half], keys[..., half : 2 * half], keys[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)
