"""What goes into the engine and what comes out: plain frozen records, no behaviour beyond validation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from .config import check_choice, check_int, check_number, check_ratio, check_text
from .errors import ConfigError

if TYPE_CHECKING:
    import torch

    from .selectors import Selector

METHODS = ("full", "reuse", "fusionrag")

ChunkStatus = Literal["prefix", "enriched", "plain", "miss"]
"""How one chunk of a request got its rows. "prefix": its plain cache behind `P`, exact. "enriched" / "plain": that
cache, moved to its place. "miss": computed in full. `method="full"` looks nothing up: every chunk is a "miss"."""

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Chunk:
    """One retrieved text.

    Attributes:
        text: exactly what stands in the prompt.
        id: the caller's name for it (a node ID). Identical texts share one cache whatever their ids.
        scope: isolation boundary; caches, neighbours and hits never cross it.
        can_store: whether a question that meets the chunk for the first time may store its cache. False for text that
            was made for one question, which nobody would delete later.
    """

    text: str
    id: str | None = None
    scope: str = ""
    can_store: bool = True

    def __post_init__(self) -> None:
        check_text("text", self.text)
        check_text("scope", self.scope)
        if self.id is not None:
            check_text("id", self.id)


def as_chunks(chunks: Iterable[Chunk | str]) -> list[Chunk]:
    """Chunks given as `Chunk` or as plain text."""
    if isinstance(chunks, (str, Chunk)) or not isinstance(chunks, Iterable):
        raise ConfigError(f"chunks={chunks!r} is not accepted; give a list of Chunk or str")
    result = [Chunk(chunk) if isinstance(chunk, str) else chunk for chunk in chunks]
    for chunk in result:
        if not isinstance(chunk, Chunk):
            raise ConfigError(f"chunks contain {chunk!r}, which is not accepted; give a list of Chunk or str")
    return result


@dataclass(frozen=True)
class Request:
    """One question over retrieved chunks.

    Attributes:
        question: the user's question; may be empty.
        chunks: in prompt order; plain strings are accepted. May be empty.
        method: "full" (ordinary prefill, no cache), "reuse" (plain caches) or "fusionrag" (enriched caches).
        recompute_ratio: share of reusable chunk tokens to recompute. None: 0 for "reuse", the config's for "fusionrag".
        selector: registered name, or a `Selector`. None: the config's.
        max_new_tokens: length limit of the answer in tokens. None: the config's.
        temperature: 0 is greedy.
        top_p: nucleus of the sampling distribution, in (0, 1].
        stop: strings that end the answer; they are not part of it.
        seed: makes sampling repeatable.
        text_around: the rendered prompt around the chunks, `len(chunks) + 1` strings: before the first chunk, between
            each two, after the last. None: the engine's own layout (`P`, `chunk_separator`, `question_template`).
    """

    question: str
    chunks: Sequence[Chunk | str]
    _: KW_ONLY
    method: str = "fusionrag"
    recompute_ratio: float | None = None
    selector: str | Selector | None = None
    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    stop: Sequence[str] = ()
    seed: int | None = None
    text_around: Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_text("question", self.question)
        chunks = tuple(as_chunks(self.chunks))
        object.__setattr__(self, "chunks", chunks)
        stop = _texts("stop", (self.stop,) if isinstance(self.stop, str) else self.stop or ())
        object.__setattr__(self, "stop", tuple(text for text in stop if text))
        check_choice("method", self.method, METHODS)
        if self.recompute_ratio is not None:
            check_ratio("recompute_ratio", self.recompute_ratio)
        if self.max_new_tokens is not None:
            check_int("max_new_tokens", self.max_new_tokens, 1)
        if self.seed is not None:
            check_int("seed", self.seed, 0)
        check_number("temperature", self.temperature, lambda value: value >= 0, "0 (greedy) or a positive number")
        check_number("top_p", self.top_p, lambda value: 0 < value <= 1, "a number above 0 and at most 1")
        if self.text_around is not None:
            object.__setattr__(self, "text_around", _texts("text_around", self.text_around))
            if len(self.text_around) != len(chunks) + 1:
                raise ConfigError(
                    f"text_around has {len(self.text_around)} strings for {len(chunks)} chunks; give one before the "
                    f"first chunk, one between each two and one after the last: {len(chunks) + 1}"
                )


def _texts(name: str, value: object) -> tuple[str, ...]:
    """A list of strings, which a single string is not."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConfigError(f"{name}={value!r} is not accepted; give a list of strings")
    texts = tuple(value)
    for text in texts:
        check_text(f"an item of {name}", text)
    return texts


@dataclass(frozen=True)
class Stats:
    """What one request cost and where its rows came from. Times in seconds, counts in tokens.

    Attributes:
        num_prompt_tokens: length of the whole prompt.
        num_reused_tokens: prompt tokens whose cached rows were used as they are.
        num_recomputed_tokens: critical tokens: cached, and computed again.
        num_computed_tokens: prompt tokens that went through the model, critical ones and misses included.
        num_generated_tokens: output tokens, an end-of-sequence token included.
        ttft_s: from the request's arrival to its first output token, loading included.
        load_s, assemble_s, select_s, prefill_s: its parts. decode_s: all output tokens after the first.
        chunk_status: one `ChunkStatus` a chunk; `miss_reason`: why, where it is a "miss", else None.
        chunk_tokens, chunk_recomputed: each chunk's length, and how many of its tokens were critical.
    """

    num_prompt_tokens: int = 0
    num_reused_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_computed_tokens: int = 0
    num_generated_tokens: int = 0
    ttft_s: float = 0.0
    load_s: float = 0.0
    assemble_s: float = 0.0
    select_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    chunk_status: list[ChunkStatus] = field(default_factory=list)
    miss_reason: list[str | None] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    chunk_recomputed: list[int] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Prefill:
    """Result of `Engine.prefill`.

    Attributes:
        logits: float32 [vocab] of the first output token.
        token_ids: the whole prompt.
        stats: `num_generated_tokens` and `decode_s` are 0.
    """

    logits: torch.Tensor
    token_ids: list[int]
    stats: Stats


@dataclass(frozen=True)
class TokenDelta:
    """One step of a streamed answer. `text` may be empty (a token that completes no character, a held-back stop
    string); the texts joined are the answer. The last delta, and only that, carries `stats` and `finish_reason`; its
    `token_id` is None where it only flushes text."""

    text: str
    token_id: int | None = None
    stats: Stats | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Generation:
    """A whole answer: `text` without the stop string, and the output `token_ids` as they were generated."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: Stats


@dataclass(frozen=True)
class ChunkRecord:
    """What the store holds for one chunk of a `precompute` call; what adapters write beside a node.

    Attributes:
        id: the chunk's id as given.
        key: content key of its plain cache (hex); None where nothing could be stored.
        enriched_key: key of its enriched cache, or None.
        num_tokens: length in tokens.
        neighbours: keys of the chunks it was enriched with, most similar first.
        reason: why nothing was stored, else None.
        fingerprint: of its tokens alone; see `Engine.fingerprint`.
    """

    id: str | None
    key: str | None
    enriched_key: str | None = None
    num_tokens: int = 0
    neighbours: tuple[str, ...] = ()
    scope: str = ""
    reason: str | None = None
    fingerprint: str = ""

    @property
    def kind(self) -> Literal["enriched", "plain", "none"]:
        return "none" if self.key is None else "plain" if self.enriched_key is None else "enriched"


@dataclass(frozen=True)
class PrecomputeReport:
    """What `Engine.precompute` did. `records` has one entry a chunk, in order.

    `num_duplicates` counts chunks whose tokens stood earlier in the same call. `can_enrich` is False where neither
    embeddings, neighbours nor `EngineConfig(embed=)` was given: then there are plain caches only.
    """

    records: list[ChunkRecord]
    num_chunks: int = 0
    num_duplicates: int = 0
    num_skipped: int = 0
    num_plain_computed: int = 0
    num_plain_reused: int = 0
    num_enriched_computed: int = 0
    num_enriched_reused: int = 0
    num_tokens_computed: int = 0
    bytes_written: int = 0
    can_enrich: bool = True
    duration_s: float = 0.0

    @property
    def num_computed(self) -> int:
        """Caches computed by this call; 0 says that everything was found."""
        return self.num_plain_computed + self.num_enriched_computed

    def summary(self) -> str:
        """One line for people."""
        text = (
            f"{self.num_chunks} chunks: {self.num_plain_computed} plain caches computed, {self.num_plain_reused} "
            f"reused; {self.num_enriched_computed} enriched computed, {self.num_enriched_reused} reused; "
            f"{self.bytes_written / 1e6:.1f} MB written in {self.duration_s:.1f} s"
        )
        if self.num_duplicates:
            text += f"; {self.num_duplicates} duplicates"
        if self.num_skipped:
            reason = next(record.reason for record in self.records if record.reason)
            text += f"; {self.num_skipped} skipped (first reason: {reason})"
        if not self.can_enrich:
            text += "; plain caches only: give embeddings, neighbours or EngineConfig(embed=...) to enrich them"
        return text
