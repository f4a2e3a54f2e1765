"""Codecs: how rows are kept between their computation and their use. The name of the codec is part of every key.

| codec | keys, values `[L, H, N, dim]` | key scales | value scales | bits an element |
|---|---|---|---|---|
| none | model dtype | | | 16 or 32 |
| int8 | int8 | float32 `[L, H, 1, dim]` | float32 `[L, H, N, 1]` | 8 |
| int4 | uint8 `[.., dim / 2]`, even dims low | bfloat16 `[L, H, N / 32, dim]` | bfloat16 `[L, H, N, dim / 32]` | 4.5 |

Both are symmetric. Keys have large channels, so a scale is shared along tokens; values do not, so it is shared along
channels. Rows are decoded to float32; the caller rotates them there and casts once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .entry import Entry

GROUP = 32
"""Elements that share a scale in int4: tokens of a key channel, channels of a value."""


@dataclass(frozen=True)
class Codec:
    """`encode_*` give rows and scales; `decode_*` give float32 rows back. Sizes count what one chunk takes."""

    encode_keys: Callable[[Tensor], tuple[Tensor, Tensor]]
    encode_values: Callable[[Tensor], tuple[Tensor, Tensor]]
    decode_keys: Callable[[Tensor, Tensor], Tensor]
    decode_values: Callable[[Tensor, Tensor], Tensor]
    key_bytes: Callable[[int, int], int]
    value_bytes: Callable[[int, int], int]


def _quantize(rows: Tensor, scales: Tensor, limit: int) -> Tensor:
    return (rows / scales).round_().clamp_(-limit, limit)


def _scales(rows: Tensor, dim: int, limit: int) -> Tensor:
    """Largest magnitude along `dim`, over `limit`; 1 where all is zero."""
    largest = rows.abs().amax(dim, keepdim=True)
    return torch.where(largest == 0, torch.ones_like(largest), largest / limit)


def _int8(dim: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def encode(rows: Tensor) -> tuple[Tensor, Tensor]:
        rows = rows.float()
        scales = _scales(rows, dim, 127)
        return _quantize(rows, scales, 127).to(torch.int8), scales

    return encode


def _grouped(rows: Tensor, dim: int) -> Tensor:
    """`rows` with `dim` cut into groups; zeros fill the last one, which changes no largest magnitude."""
    missing = -rows.shape[dim] % GROUP
    padding = [0, 0, 0, missing] if dim == -2 else [0, missing]
    padded = torch.nn.functional.pad(rows, padding)
    shape = list(padded.shape)
    at = rows.ndim + dim
    return padded.view(*shape[:at], -1, GROUP, *shape[at + 1 :])


def _int4(dim: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def encode(rows: Tensor) -> tuple[Tensor, Tensor]:
        rows = rows.float()
        scales = _scales(_grouped(rows, dim), dim, 7).squeeze(dim).bfloat16()
        levels = (_quantize(rows, _spread(scales, dim, rows.shape[dim]), 7) + 8).to(torch.uint8)
        return levels[..., 0::2] | levels[..., 1::2] << 4, scales

    return encode


def _spread(scales: Tensor, dim: int, length: int) -> Tensor:
    """Each group's scale for each of its elements, float32."""
    return scales.float().repeat_interleave(GROUP, dim).narrow(dim, 0, length)


def _decode_int4(dim: int) -> Callable[[Tensor, Tensor], Tensor]:
    def decode(packed: Tensor, scales: Tensor) -> Tensor:
        rows = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).float().sub_(8)
        return rows.mul_(_spread(scales, dim, rows.shape[dim]))

    return decode


def _groups(length: int) -> int:
    return -(-length // GROUP)


_SCALED: dict[str, Codec] = {
    "int8": Codec(
        encode_keys=_int8(-2),
        encode_values=_int8(-1),
        decode_keys=lambda rows, scales: rows * scales,
        decode_values=lambda rows, scales: rows * scales,
        key_bytes=lambda tokens, dim: tokens * dim + 4 * dim,
        value_bytes=lambda tokens, dim: tokens * dim + 4 * tokens,
    ),
    "int4": Codec(
        encode_keys=_int4(-2),
        encode_values=_int4(-1),
        decode_keys=_decode_int4(-2),
        decode_values=_decode_int4(-1),
        key_bytes=lambda tokens, dim: tokens * dim // 2 + 2 * _groups(tokens) * dim,
        value_bytes=lambda tokens, dim: tokens * dim // 2 + 2 * tokens * _groups(dim),
    ),
}
_BY_DTYPE = {torch.int8: _SCALED["int8"], torch.uint8: _SCALED["int4"]}


def encode(entry: Entry, codec: str) -> Entry:
    """The entry as `codec` keeps it; "none" leaves it as it is."""
    if codec == "none":
        return entry
    keys, key_scales = _SCALED[codec].encode_keys(entry.keys)
    values, value_scales = _SCALED[codec].encode_values(entry.values)
    return replace(entry, keys=keys, values=values, key_scales=key_scales, value_scales=value_scales)


def decode(entry: Entry) -> tuple[Tensor, Tensor]:
    """Keys and values `[L, H, N, dim]`: float32, or for codec "none" as they are."""
    if entry.key_scales is None or entry.value_scales is None:
        return entry.keys, entry.values
    codec = _BY_DTYPE[entry.keys.dtype]
    return codec.decode_keys(entry.keys, entry.key_scales), codec.decode_values(entry.values, entry.value_scales)


def chunk_bytes(codec: str, num_tokens: int, *, heads: int, key_dim: int, value_dim: int, itemsize: int) -> int:
    """Bytes of one chunk's keys and values; `heads` counts those of all layers, `itemsize` is the model dtype's."""
    if codec == "none":
        return heads * num_tokens * (key_dim + value_dim) * itemsize
    kind = _SCALED[codec]
    return heads * (kind.key_bytes(num_tokens, key_dim) + kind.value_bytes(num_tokens, value_dim))
