"""`Answering`: one prefilled request on its way to a whole answer, one token a step.

Its rows of a step can be packed into one forward with those of other requests, so that the weights are read once.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from .decode import Sampler, TextStream
from .online import Prefilled
from .runner import ModelRunner, Rows
from .types import Request, TokenDelta


class Answering:
    """State of one answer. `next_delta` after each step's logits; `rows` asks for the next step.

    Args:
        limit: output tokens at most.
        arrival: the request's `time.perf_counter()`.
    """

    def __init__(
        self,
        request: Request,
        done: Prefilled,
        tokenizer: Any,
        end_tokens: Collection[int],
        *,
        limit: int,
        arrival: float,
    ) -> None:
        self.done = done
        self.is_finished = False
        self._sampler = Sampler(request.temperature, request.top_p, request.seed)
        self._text = TextStream(tokenizer, request.stop)
        self._end_tokens = end_tokens
        self._limit = limit
        self._arrival = arrival
        self._token = self._num_generated = 0
        self._ttft_s = self._decode_s = self._begin = 0.0

    def next_delta(self, logits: Tensor) -> TokenDelta:
        """Sample from float32 logits `[vocab]`; the delta that ends the answer carries its stats."""
        self._token = self._sampler.sample(logits)
        now = time.perf_counter()
        if self._num_generated == 0:
            self._ttft_s = now - self._arrival
        else:
            self._decode_s += now - self._begin
        self._num_generated += 1
        is_end = self._token in self._end_tokens
        piece = "" if is_end else self._text.push(self._token)
        is_stopped = is_end or self._text.is_stopped
        if not is_stopped and self._num_generated < self._limit:
            return TokenDelta(piece, self._token)
        self.is_finished = True
        stats = replace(
            self.done.stats, num_generated_tokens=self._num_generated, ttft_s=self._ttft_s, decode_s=self._decode_s
        )
        return TokenDelta(piece + self._text.finish(), self._token, stats, "stop" if is_stopped else "length")

    def rows(self, runner: ModelRunner) -> Rows:
        """The last token, to be computed behind the prompt and the answer so far."""
        self._begin = time.perf_counter()
        position = len(self.done.prompt.token_ids) + self._num_generated - 1
        return Rows(runner.tensor([self._token]), runner.tensor([position]), self.done.canvas)


def decode_together(runner: ModelRunner, answers: Sequence[Answering]) -> Iterator[tuple[int, TokenDelta]]:
    """Decode several answers, one packed forward a step, until all are finished: index of the answer, its delta."""
    for index, answer in enumerate(answers):
        yield index, answer.next_delta(answer.done.logits)
    while running := [index for index, answer in enumerate(answers) if not answer.is_finished]:
        logits = runner.forward_logits([answers[index].rows(runner) for index in running])
        for row, index in enumerate(running):
            yield index, answers[index].next_delta(logits[row])
