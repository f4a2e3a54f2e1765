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
CODECS = ("none", "int8", "int4")
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
        cache_dir: where chunk caches are stored: a directory, a `file://` URL, or an fsspec URL such as `s3://...`.
            None keeps them in memory only.
        remote_dir: fsspec URL or directory of a colder tier behind a local `cache_dir`; it takes what is above
            `disk_bytes`.
        catalog_dir: local directory of the catalog where `cache_dir` is not local; None: below `~/.cache/fusionrag`.
        codec: how stored caches are encoded: "none" is the model's dtype, "int8" a byte and "int4" about half a byte
            an element. Part of every cache key. A lossy codec has no exact first chunk: its rows may be recomputed.
        device_bytes: memory budget of the caches kept on the model's device, for a GPU. 0: none.
        host_bytes: memory budget of the caches kept ready in host memory; exact prefixes take a quarter at most.
        disk_bytes, remote_bytes: budgets of these tiers; above them the coldest caches move to the next tier, or are
            dropped. None is unlimited.
        keep_plain: keep a chunk's plain cache beside its enriched one. False halves the space; a plain cache is then
            computed again when it is needed, for the first chunk of a prompt or a neighbour's enrichment.
        scope_sharing: scope -> other scopes whose caches it may read where it has none itself.
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
    remote_dir: str | Path | None = None
    catalog_dir: str | Path | None = None
    codec: str = "none"
    device_bytes: int = 0
    host_bytes: int = 2 << 30
    disk_bytes: int | None = None
    remote_bytes: int | None = None
    keep_plain: bool = True
    scope_sharing: Mapping[str, Sequence[str]] = field(default_factory=dict)
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
        for name, least in (
            ("top_n", 0),
            ("host_bytes", 0),
            ("device_bytes", 0),
            ("max_new_tokens", 1),
            ("prefill_tokens", 1),
        ):
            check_int(name, getattr(self, name), least)
        for name in ("disk_bytes", "remote_bytes"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0)
        if not isinstance(self.keep_plain, bool):
            raise ConfigError(f"keep_plain={self.keep_plain!r} is not accepted; give True or False")
        check_sharing(self.scope_sharing)
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


def check_sharing(value: object) -> None:
    if not isinstance(value, Mapping) or any(
        not isinstance(scope, str) or isinstance(others, str) or any(not isinstance(other, str) for other in others)
        for scope, others in value.items()
    ):
        raise ConfigError(
            f"scope_sharing={value!r} is not accepted; give a dict from a scope to the list of scopes it may read"
        )


def check_int(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={value!r} is not accepted; give an integer of at least {least}")


def check_number(name: str, value: object, is_accepted: Callable[[float], bool], accepted: str) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not is_accepted(value):
        raise ConfigError(f"{name}={value!r} is not accepted; give {accepted}")


def check_ratio(name: str, value: object) -> None:
    check_number(name, value, lambda ratio: 0 <= ratio <= 1, "a number from 0 to 1")
