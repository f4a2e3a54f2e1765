"""One question by one method: everything that is measured comes from one prefill and its canvas."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fusionrag_engine.engine import Engine
from fusionrag_engine.layout import Segment
from fusionrag_engine.online import Prefilled, score_answer
from fusionrag_engine.runner import Rows
from fusionrag_engine.selectors import SelectionContext, Selector, resolve_selector
from fusionrag_engine.types import Request

from . import metrics
from .datasets import Example

NUM_BINS = 10


class Watched:
    """A selector that notes what it chose; everything else is that of the selector it watches."""

    def __init__(self, rule: Selector) -> None:
        self.rule = rule
        self.chosen: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rule, name)

    def select(self, context: SelectionContext) -> Tensor:
        self.chosen = self.rule.select(context).cpu()
        return self.chosen


@dataclass(frozen=True)
class Answered:
    """A prefilled question and what it gave."""

    done: Prefilled
    text: str
    token_ids: list[int]
    gold_logprob: float
    chosen: Tensor | None


@dataclass(frozen=True)
class Trial:
    """Figures of one question by one method; see `harness.summarize` for the names.

    `in_chunk` and `in_prompt` count the critical tokens in tenths of their chunk and of the prompt's chunk tokens
    (FusionRAG, arXiv 2601.12904, figure 8); None where no selector was asked (ratio 0 or 1).
    """

    text: str
    em: float
    f1: float
    contains: float
    gold_logprob: float
    kl: float
    top1: float
    agreement_f1: float
    agreement_tokens: float
    ttft_s: float
    true_budget: float
    num_recomputed_tokens: int
    num_chunk_tokens: int
    num_missed: int
    kv_deviation: list[float] = field(default_factory=list)
    in_chunk: list[int] | None = None
    in_prompt: list[int] | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.inference_mode()
def answer(engine: Engine, request: Request, gold: str) -> Answered:
    """Prefill once, answer greedily, and score the gold answer on the same canvas."""
    watched = None
    if request.method != "full":
        watched = Watched(resolve_selector(request.selector or engine.config.selector))
        request = replace(request, selector=watched)
    arrival = time.perf_counter()
    prompt = engine._admit(request)
    gold_ids = engine.layout.tokenize(gold)[: engine.max_context - len(prompt.token_ids)]
    limit = min(request.max_new_tokens or engine.config.max_new_tokens, engine.max_context - len(prompt.token_ids) + 1)
    done = engine._prefill(request, prompt, num_new=max(limit, len(gold_ids), 1), arrival=arrival)
    token_ids = _greedy(engine, done, limit)
    text = engine.tokenizer.decode(token_ids, skip_special_tokens=True)
    logprob = float(score_answer(engine.runner, done, gold_ids).mean()) if gold_ids else float("nan")
    return Answered(done, text, token_ids, logprob, None if watched is None else watched.chosen)


def _greedy(engine: Engine, done: Prefilled, limit: int) -> list[int]:
    token_ids = [int(done.logits.argmax())]
    while token_ids[-1] not in engine._end_tokens and len(token_ids) < limit:
        position = len(done.prompt.token_ids) + len(token_ids) - 1
        rows = Rows(engine.runner.tensor(token_ids[-1:]), engine.runner.tensor([position]), done.canvas)
        token_ids.append(int(engine.runner.forward_logits([rows])[0].argmax()))
    return token_ids


def compare(engine: Engine, example: Example, full: Answered, ours: Answered, method: str) -> Trial:
    """The figures of one answer beside full's on the same question."""
    stats, chunks = ours.done.stats, ours.done.prompt.chunks
    num_chunk_tokens = sum(map(len, chunks))
    num_recomputed = num_chunk_tokens if method == "full" else stats.num_recomputed_tokens
    in_chunk, in_prompt = (None, None) if ours.chosen is None else histograms(chunks, ours.chosen)
    return Trial(
        text=ours.text,
        em=metrics.exact_match(ours.text, example.answers),
        f1=metrics.f1(ours.text, example.answers),
        contains=metrics.contains(ours.text, example.answers),
        gold_logprob=ours.gold_logprob,
        kl=metrics.kl_divergence(full.done.logits, ours.done.logits),
        top1=float(full.token_ids[0] == ours.token_ids[0]),
        agreement_f1=metrics.token_f1(ours.text, full.text),
        agreement_tokens=float(full.token_ids == ours.token_ids),
        ttft_s=stats.ttft_s,
        true_budget=float(num_recomputed * engine.runner.shape.num_layers),
        num_recomputed_tokens=num_recomputed,
        num_chunk_tokens=num_chunk_tokens,
        num_missed=0 if method == "full" else stats.chunk_status.count("miss"),
        kv_deviation=kv_deviation(full.done, ours.done),
        in_chunk=in_chunk,
        in_prompt=in_prompt,
    )


def kv_deviation(full: Prefilled, ours: Prefilled) -> list[float]:
    """Per layer, over the chunk tokens: relative RMS distance from full's keys and from its values, averaged."""
    places = _positions(full.prompt.chunks)
    if not len(places):
        return []
    ratios = []
    for theirs, mine in ((full.canvas.keys, ours.canvas.keys), (full.canvas.values, ours.canvas.values)):
        reference = theirs[:, :, places].float()
        difference = (mine[:, :, places].float() - reference).square().mean((1, 2, 3))
        ratios.append((difference / reference.square().mean((1, 2, 3)).clamp_min(1e-30)).sqrt())
    return [float(value) for value in (ratios[0] + ratios[1]) / 2]


def histograms(chunks: Sequence[Segment], chosen: Tensor) -> tuple[list[int], list[int]]:
    """Chosen positions in tenths of their own chunk, and in tenths of all chunk tokens in prompt order."""
    in_chunk, in_prompt = [0] * NUM_BINS, [0] * NUM_BINS
    total, before = sum(map(len, chunks)), 0
    for segment in chunks:
        inside = chosen[(chosen >= segment.start) & (chosen < segment.stop)] - segment.start
        for offset in inside.tolist():
            in_chunk[offset * NUM_BINS // len(segment)] += 1
            in_prompt[(before + offset) * NUM_BINS // total] += 1
        before += len(segment)
    return in_chunk, in_prompt


def _positions(segments: Sequence[Segment]) -> Tensor:
    spans = [torch.arange(segment.start, segment.stop) for segment in segments]
    return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)
