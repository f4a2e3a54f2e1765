"""Online phase: assemble, select, recompute. Ends with the logits of the first output token.

FusionRAG, arXiv 2601.12904, sections 3.2 and 4.3.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .assemble import Assembler
from .canvas import Canvas
from .layout import Prompt, Segment
from .precompute import Precomputer
from .runner import ModelRunner, Rows
from .scoring import Scorer, critical_tokens
from .selectors import Selector
from .types import Request, Stats


@dataclass
class Prefilled:
    """A prompt whose rows are all in the canvas.

    Attributes:
        logits: float32 `[vocab]` of the first output token.
        canvas: keys and values of the prompt, with room for the answer.
    """

    prompt: Prompt
    logits: Tensor
    canvas: Canvas
    stats: Stats


class Prefiller:
    """Prefills requests, from caches or in full: both are one pass over the rows that have to be computed."""

    def __init__(
        self, runner: ModelRunner, assembler: Assembler, precomputer: Precomputer, *, prefill_tokens: int
    ) -> None:
        self.runner = runner
        self.assembler = assembler
        self.precomputer = precomputer
        self.prefill_tokens = prefill_tokens

    def prefill(
        self, request: Request, prompt: Prompt, *, ratio: float, selector: Selector, capacity: int, arrival: float
    ) -> Prefilled:
        """Fill a canvas of `capacity` rows with the prompt. `arrival` is the request's `time.perf_counter()`."""
        canvas = self.runner.canvas(capacity)
        assembly = self.assembler.assemble(request, prompt, self.precomputer.prefix, canvas)
        cached = [Segment(0, assembly.num_prefix_tokens), *assembly.reusable]
        fresh = _complement(cached, len(prompt.token_ids))

        begin = time.perf_counter()
        num_head = 0
        if assembly.reusable and fresh and fresh[0].start < prompt.chunks[0].start:
            # A request's own prefix (template, history) stands before every chunk: its rows are exact once computed.
            head = fresh.pop(0)
            head, rest = Segment(head.start, prompt.chunks[0].start), Segment(prompt.chunks[0].start, head.stop)
            fresh = [rest, *fresh] if len(rest) else fresh
            self._compute(prompt, canvas, torch.arange(head.start, head.stop), needs_logits=False)
            num_head = len(head)
        head_s = time.perf_counter() - begin

        begin = time.perf_counter()
        scorer = Scorer(self.runner, prompt, canvas, fresh, self.prefill_tokens)
        critical = critical_tokens(selector, assembly.reusable, ratio, scorer)
        select_s = time.perf_counter() - begin

        begin = time.perf_counter()
        wanted = torch.zeros(len(prompt.token_ids), dtype=torch.bool)
        for segment in fresh:
            wanted[segment.start : segment.stop] = True
        wanted[critical] = True
        wanted[-1] = True  # a prompt that is cached to its end still needs the logits behind its last token
        positions = wanted.nonzero().flatten()
        logits = self._compute(prompt, canvas, positions)
        assert logits is not None
        self.assembler.offer(prompt, canvas, assembly)
        prefill_s = head_s + time.perf_counter() - begin

        num_prompt, num_computed = len(prompt.token_ids), num_head + len(positions)
        stats = Stats(
            num_prompt_tokens=num_prompt,
            num_reused_tokens=num_prompt - num_computed,
            num_recomputed_tokens=len(critical),
            num_computed_tokens=num_computed,
            ttft_s=time.perf_counter() - arrival,
            load_s=assembly.load_s,
            assemble_s=assembly.assemble_s,
            select_s=select_s,
            prefill_s=prefill_s,
            chunk_status=assembly.status,
            miss_reason=assembly.miss_reason,
            chunk_tokens=[len(segment) for segment in prompt.chunks],
            chunk_recomputed=_count_in(prompt.chunks, critical),
        )
        return Prefilled(prompt, logits, canvas, stats)

    def _compute(
        self, prompt: Prompt, canvas: Canvas, positions: Tensor, *, needs_logits: bool = True
    ) -> Tensor | None:
        """Sparse prefill of the rows at ascending `positions`, in pieces; the logits behind the last one."""
        pieces = list(self.runner.pieces(prompt.token_ids, positions, canvas, self.prefill_tokens))
        for rows in pieces[: -1 if needs_logits else None]:
            self.runner.forward([rows])
        return self.runner.forward_logits(pieces[-1:])[0] if needs_logits else None


def _count_in(segments: Sequence[Segment], positions: Tensor) -> list[int]:
    """How many of the positions lie in each segment."""
    return [int(((positions >= segment.start) & (positions < segment.stop)).sum()) for segment in segments]


def score_answer(runner: ModelRunner, done: Prefilled, token_ids: Sequence[int]) -> Tensor:
    """Log-probabilities of answer tokens behind a prefilled prompt, float32 `[num_answer_tokens]` on the CPU, in nats.

    The canvas must have room for all of them but the last; their rows are written behind the prompt.
    """
    logits = done.logits[None]
    if len(token_ids) > 1:
        start = len(done.prompt.token_ids)
        positions = torch.arange(start, start + len(token_ids) - 1, device=runner.device)
        rows = Rows(runner.tensor(token_ids[:-1]), positions, done.canvas)
        logits = torch.cat([logits, runner.forward_every_logits(rows)])
    return logits.log_softmax(-1).gather(-1, runner.tensor(token_ids)[:, None])[:, 0].cpu()


def _complement(segments: Sequence[Segment], length: int) -> list[Segment]:
    """What is left of `0 .. length - 1` outside the segments."""
    left, position = [], 0
    for segment in sorted(segments, key=lambda item: (item.start, item.stop)):
        if segment.start > position:
            left.append(Segment(position, segment.start))
        position = max(position, segment.stop)
    if position < length:
        left.append(Segment(position, length))
    return left
