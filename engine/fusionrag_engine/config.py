"""`EngineConfig`: every setting of the engine, with its default, in one frozen object."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import ConfigError, UnknownSettingError

DEFAULT_SYSTEM_PROMPT = "Answer the question using only the documents below. Be brief."

DTYPES = ("auto", "float32", "bfloat16", "float16")
CODECS = ("none",)
ON_MISS = ("compute", "error")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of an `Engine`. Frozen; a name that does not exist raises `UnknownSettingError`.

    Attributes:
        system_prompt: text of the cache prefix `P`, behind which every chunk is computed. Part of every cache key.
        recompute_ratio: share of the reusable chunk tokens that `method="fusionrag"` recomputes (FusionRAG 3.2).
        top_n: number of neighbours a chunk is enriched with (FusionRAG 3.1). Part of the key of enriched caches.
        selector: registered name of the rule that chooses the critical tokens.
        dtype: "auto", "float32", "bfloat16" or "float16". "auto" is float32 on a CPU that has no bfloat16 arithmetic.
        device: "auto" or a torch device.
        cache_dir: directory (or `file://` URL) of the chunk caches; None keeps them in memory only.
        codec: how stored caches are encoded: "none" is the model's dtype.
        host_bytes: memory budget of the chunk caches kept ready in host memory.
        disk_bytes: budget of `cache_dir`; the least recently used caches are dropped above it. None is unlimited.
        on_miss: "compute" a chunk that has no cache, or raise `CacheMissError`.
        embed: texts -> array [num_texts, dim], used for neighbours when `precompute` is given neither embeddings nor
            neighbours.
        max_new_tokens: default length limit of an answer, in tokens.
        chunk_separator: text between two chunks of the engine's own prompt layout.
        question_template: text after the last chunk; `{question}` is replaced.
        chat_template_kwargs: passed to the tokenizer's chat template, for instance `{"enable_thinking": False}`.
        prefill_tokens: rows computed by one forward pass at most; bounds the memory of a prefill.
    """

    system_prompt: str = DEFAULT_SYSTEM_PROMPT
    recompute_ratio: float = 0.15
    top_n: int = 10
    selector: str = "query_guided"
    dtype: str = "auto"
    device: str = "auto"
    cache_dir: str | Path | None = None
    codec: str = "none"
    host_bytes: int = 2 << 30
    disk_bytes: int | None = None
    on_miss: str = "compute"
    embed: Callable[[Sequence[str]], Any] | None = None
    max_new_tokens: int = 256
    chunk_separator: str = "\n\n"
    question_template: str = "\n\nQuestion: {question}"
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    prefill_tokens: int = 1024

    def __new__(cls, **settings: Any) -> EngineConfig:
        names = [item.name for item in dataclasses.fields(cls)]
        unknown = sorted(set(settings) - set(names))
        if unknown:
            raise UnknownSettingError(f"EngineConfig has no setting {unknown}; accepted: {', '.join(names)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_ratio("recompute_ratio", self.recompute_ratio)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("codec", self.codec, CODECS)
        check_choice("on_miss", self.on_miss, ON_MISS)
        for name, least in (("top_n", 0), ("host_bytes", 0), ("max_new_tokens", 1), ("prefill_tokens", 1)):
            check_int(name, getattr(self, name), least)
        if self.disk_bytes is not None:
            check_int("disk_bytes", self.disk_bytes, 0)
        for name in ("system_prompt", "chunk_separator", "question_template", "selector", "device"):
            check_text(name, getattr(self, name))
        if not isinstance(self.chat_template_kwargs, Mapping):
            raise ConfigError(f"chat_template_kwargs={self.chat_template_kwargs!r} is not accepted; give a dict")
        if self.embed is not None and not callable(self.embed):
            raise ConfigError(
                f"embed={self.embed!r} is not accepted; give a function from texts to embeddings, or None"
            )
        if "{question}" not in self.question_template:
            raise ConfigError(f"question_template={self.question_template!r} must contain '{{question}}'")


def check_choice(name: str, value: object, accepted: Sequence[str]) -> None:
    if value not in accepted:
        raise ConfigError(f"{name}={value!r} is not accepted; choose one of {', '.join(map(repr, accepted))}")


def check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise ConfigError(f"{name}={value!r} is not accepted; give a string")


def check_int(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={value!r} is not accepted; give an integer of at least {least}")


def check_number(name: str, value: object, is_accepted: Callable[[float], bool], accepted: str) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not is_accepted(value):
        raise ConfigError(f"{name}={value!r} is not accepted; give {accepted}")


def check_ratio(name: str, value: object) -> None:
    check_number(name, value, lambda ratio: 0 <= ratio <= 1, "a number from 0 to 1")
