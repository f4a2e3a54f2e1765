"""How many bytes a corpus takes, before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .canvas import KVShape
from .config import CODECS, check_choice
from .store.codecs import chunk_bytes

HEADER_BYTES = 600
"""A file's header: names, shapes, key, checksum; about."""


@dataclass(frozen=True)
class StoragePlan:
    """Bytes of a corpus under one codec.

    Attributes:
        codec: its name.
        num_chunks, num_tokens: of distinct texts.
        plain_bytes, enriched_bytes: files of each kind.
        disk_bytes: both; what stays after ingestion, plain ones only with `keep_plain`.
        peak_bytes: at most during one ingestion, when both kinds are there.
        host_bytes: to keep one copy of every chunk ready in memory.
    """

    codec: str
    num_chunks: int
    num_tokens: int
    plain_bytes: int
    enriched_bytes: int
    disk_bytes: int
    peak_bytes: int
    host_bytes: int


def kv_shape(config: Any) -> KVShape:
    """The shape of a model's keys and values, from its Hugging Face configuration alone."""
    text = config.get_text_config()
    num_heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // num_heads
    num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
    return KVShape(text.num_hidden_layers, num_kv_heads, head_dim, head_dim)


def plan_storage(
    token_counts: Sequence[int], shape: KVShape, dtype: torch.dtype, *, codec: str = "none", keep_plain: bool = True
) -> StoragePlan:
    """The plan for chunks of these lengths, all of them enriched.

    Raises:
        ConfigError: the codec is not known.
    """
    check_choice("codec", codec, CODECS)
    heads = shape.num_layers * shape.num_kv_heads
    tensors = [
        chunk_bytes(
            codec,
            count,
            heads=heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            itemsize=dtype.itemsize,
        )
        for count in token_counts
    ]
    files = sum(tensors) + 4 * sum(token_counts) + HEADER_BYTES * len(tensors)
    kept = 2 * files if keep_plain else files
    return StoragePlan(codec, len(tensors), sum(token_counts), files, files, kept, 2 * files, sum(tensors))
