"""Keys of chunk caches: full digests over tagged fields, so that nothing computed under other settings is ever used."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from typing import Any

import torch
import xxhash
from torch import nn

FORMAT_VERSION = 2
"""Version of the stored rows. Raise it whenever what is stored, or how it is computed, changes."""

_VOLATILE = (
    "transformers_version",
    "_name_or_path",
    "name_or_path",
    "dtype",
    "torch_dtype",
    "architectures",
    "use_cache",
)


def digest(**fields: Any) -> str:
    """64 hex digits over the tagged fields; equal only for equal names and values."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def token_digest(token_ids: Sequence[int]) -> str:
    """Digest of token ids alone; many times quicker than to write them out."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=32).hexdigest()


def token_fingerprint(token_ids: Sequence[int]) -> str:
    """32 hex digits over token ids alone, whatever model, scope or settings they are cached with."""
    return token_digest(token_ids)[:32]


def model_fingerprint(model: Any) -> str:
    """Digest of everything that decides what a model computes: configuration, and every parameter and buffer."""
    config = {name: value for name, value in model.config.to_diff_dict().items() if name not in _VOLATILE}
    state = xxhash.xxh3_128()
    for name, tensor in _named_tensors(model):
        state.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}".encode())
        state.update(tensor_bytes(tensor))
    return digest(
        model_class=type(model).__name__,
        config=json.dumps(config, sort_keys=True, default=str),
        weights=state.hexdigest(),
    )


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Digest of the tokenizer's whole definition: vocabulary, merges, normalisation, special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        parts = json.loads(backend.to_str())
        # Both are set by the last call to the tokenizer, and decide nothing here.
        parts.pop("padding", None)
        parts.pop("truncation", None)
        definition = json.dumps(parts, sort_keys=True)
    else:
        definition = json.dumps(sorted(tokenizer.get_vocab().items()))
    special = json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)
    return digest(tokenizer_class=type(tokenizer).__name__, definition=definition, special=special)


def tensor_bytes(tensor: torch.Tensor) -> Any:
    """The raw bytes of a tensor, as a buffer."""
    return tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy()


def _named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return sorted([*model.named_parameters(), *model.named_buffers()], key=lambda item: item[0])


class CacheKeys:
    """Makes the keys of one engine's chunk caches. `namespace` covers what all of them share."""

    def __init__(self, *, model: str, tokenizer: str, dtype: str, codec: str, prefix_ids: Sequence[int]) -> None:
        self.namespace = digest(
            format=FORMAT_VERSION,
            model=model,
            tokenizer=tokenizer,
            dtype=dtype,
            codec=codec,
            prefix_ids=list(prefix_ids),
        )

    @classmethod
    def of(cls, namespace: str) -> CacheKeys:
        """Keys in a namespace that is known by its digest only."""
        keys = cls.__new__(cls)
        keys.namespace = namespace
        return keys

    def plain(self, token_ids: Sequence[int], scope: str) -> str:
        """Key of the cache of a chunk behind `P` alone; also the chunk's identity in its scope."""
        return digest(namespace=self.namespace, kind="plain", scope=scope, token_ids=token_digest(token_ids))

    def enriched(self, plain_key: str, neighbours: Sequence[str], top_n: int) -> str:
        """Key of the cache of a chunk behind `P` and its neighbours (plain keys, in order)."""
        return digest(
            namespace=self.namespace, kind="enriched", plain=plain_key, neighbours=list(neighbours), top_n=top_n
        )
