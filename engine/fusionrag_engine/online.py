"""Online phase: assemble, select, recompute. Ends with the logits of the first output token.

FusionRAG, arXiv 2601.12904, sections 3.2 and 4.3.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusionrag_kernels import critical_scores

from .assemble import Assembler, Assembly
from .canvas import Canvas
from .errors import SelectorError
from .layout import Prompt, Segment
from .precompute import Precomputer
from .runner import ModelRunner, Rows
from .selectors import SelectionContext, Selector
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
        cached = [Segment(0, assembly.num_prefix_tokens), *assembly.exact, *assembly.reusable]
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
        critical = self._critical(prompt, canvas, assembly, fresh, ratio, selector)
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
        )
        return Prefilled(prompt, logits, canvas, stats)

    def _compute(
        self, prompt: Prompt, canvas: Canvas, positions: Tensor, *, needs_logits: bool = True
    ) -> Tensor | None:
        """Sparse prefill of the rows at ascending `positions`, in pieces; the logits behind the last one."""
        pieces = list(self.pieces(prompt, canvas, positions))
        for rows in pieces[: -1 if needs_logits else None]:
            self.runner.forward([rows])
        return self.runner.forward_logits(pieces[-1:])[0] if needs_logits else None

    def pieces(
        self, prompt: Prompt, canvas: Canvas, positions: Tensor, kv_valid: Tensor | None = None
    ) -> Iterator[Rows]:
        """The rows at ascending `positions`, at most `prefill_tokens` at a time."""
        ids, device = torch.tensor(prompt.token_ids), self.runner.device
        for piece in torch.split(positions, self.prefill_tokens):
            yield Rows(ids[piece].to(device), piece.to(device), canvas, kv_valid)

    def _critical(
        self,
        prompt: Prompt,
        canvas: Canvas,
        assembly: Assembly,
        fresh: Sequence[Segment],
        ratio: float,
        selector: Selector,
    ) -> Tensor:
        """Positions of the critical tokens, ascending."""
        spans = [torch.arange(segment.start, segment.stop) for segment in assembly.reusable]
        candidates = torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)
        budget = round(ratio * len(candidates))
        if budget == 0 or budget == len(candidates):
            return candidates[:budget]
        scorer = _Scorer(self, prompt, canvas, fresh)
        context = SelectionContext(candidates, budget, self.runner.shape.num_layers, scorer.question_scores)
        chosen = selector.select(context).cpu()
        num_allowed = int(torch.isin(torch.unique(chosen), candidates).sum())
        if not num_allowed == len(chosen) == budget:
            raise SelectorError(
                f"selector {selector} chose {len(chosen)} tokens, {num_allowed} of them distinct candidates; it must "
                f"choose {budget} of context.candidates"
            )
        return chosen.sort().values


class _Scorer:
    """Scoring: the question runs over the assembled prompt and its attention is summed for each prompt token.

    The rows it writes (question, text between chunks) are scratch: the sparse prefill computes every one of them again.
    Chunks without a cache are not there yet and are left out of sight.
    """

    def __init__(self, prefiller: Prefiller, prompt: Prompt, canvas: Canvas, fresh: Sequence[Segment]) -> None:
        self.prefiller = prefiller
        self.prompt = prompt
        self.canvas = canvas
        self.fresh = fresh

    def question_scores(self, layers: Collection[int]) -> Tensor:
        """float32 `[num_prompt_tokens]` on the CPU; see `SelectionContext`."""
        prompt, runner = self.prompt, self.prefiller.runner
        length, question = len(prompt.token_ids), prompt.segments[-1]
        is_text = torch.zeros(length, dtype=torch.bool)
        for segment in prompt.texts:
            is_text[segment.start : segment.stop] = True
        is_fresh = torch.zeros(length, dtype=torch.bool)
        for segment in self.fresh:
            is_fresh[segment.start : segment.stop] = True
        if len(question) == 0:  # nothing is asked: the last token of the prompt looks for it
            is_text[-1] = is_fresh[-1] = True
            question = Segment(length - 1, length)
        positions = (is_text & is_fresh).nonzero().flatten()
        is_missing = is_fresh & ~is_text
        kv_valid = (~is_missing).to(runner.device) if bool(is_missing.any()) else None

        scores = torch.zeros(length, device=runner.device)
        voting = set(layers)

        def probe(layer: int, query: Tensor, rows: Rows, keywords: dict[str, Any]) -> None:
            if layer not in voting:
                return
            asking = rows.positions >= question.start
            scores.add_(
                critical_scores(
                    query[asking],
                    rows.canvas.keys[layer, :, :length].transpose(0, 1),
                    rows.positions[asking],
                    kv_valid=rows.kv_valid,
                    **keywords,
                )
            )

        for rows in self.prefiller.pieces(prompt, self.canvas, positions, kv_valid):
            is_asking = int(rows.positions[-1]) >= question.start
            runner.forward([rows], probe=probe if is_asking else None)
        return scores.cpu()


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
