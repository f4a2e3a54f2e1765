"""Choosing the critical tokens of one assembled prompt, and the attention of its question that selectors look at.

FusionRAG, arXiv 2601.12904, section 3.2.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from fusionrag_kernels import critical_scores

from .canvas import Canvas
from .errors import SelectorError
from .layout import Prompt, Segment
from .runner import ModelRunner, Rows
from .selectors import SelectionContext, Selector


class Scorer:
    """Scoring: the question runs over the assembled prompt and its attention is summed for each prompt token.

    The rows it writes (question, text between chunks) are scratch: the sparse prefill computes every one of them again.
    Chunks without a cache are not there yet and are left out of sight.
    """

    def __init__(
        self, runner: ModelRunner, prompt: Prompt, canvas: Canvas, fresh: Sequence[Segment], prefill_tokens: int
    ) -> None:
        self.runner = runner
        self.prompt = prompt
        self.canvas = canvas
        self.fresh = fresh
        self.prefill_tokens = prefill_tokens

    def question_scores(self, layers: Collection[int]) -> Tensor:
        """float32 `[num_prompt_tokens]` on the CPU; see `SelectionContext`."""
        prompt, runner = self.prompt, self.runner
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

        for rows in runner.pieces(prompt.token_ids, positions, self.canvas, self.prefill_tokens, kv_valid):
            is_asking = int(rows.positions[-1]) >= question.start
            runner.forward([rows], probe=probe if is_asking else None)
        return scores.cpu()


def critical_tokens(selector: Selector, reusable: Sequence[Segment], ratio: float, scorer: Scorer) -> Tensor:
    """Positions of the critical tokens among the reusable segments, int64, ascending.

    Raises:
        SelectorError: the selector did not choose as many distinct candidates as it was told to.
    """
    spans = [torch.arange(segment.start, segment.stop) for segment in reusable]
    candidates = torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)
    budget = round(ratio * len(candidates))
    if budget == 0 or budget == len(candidates):
        return candidates[:budget]
    context = SelectionContext(candidates, budget, scorer.runner.shape.num_layers, scorer.question_scores)
    chosen = selector.select(context).cpu()
    num_allowed = int(torch.isin(torch.unique(chosen), candidates).sum())
    if not num_allowed == len(chosen) == budget:
        raise SelectorError(
            f"selector {selector} chose {len(chosen)} tokens, {num_allowed} of them distinct candidates; it must "
            f"choose {budget} of context.candidates"
        )
    return chosen.sort().values
