"""From logits to text: sampling, the end of an answer, and text that grows token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Sampler:
    """Chooses output tokens; greedy at temperature 0. Every call of one sampler continues one random sequence."""

    def __init__(self, temperature: float, top_p: float, seed: int | None) -> None:
        self.temperature = temperature
        self.top_p = top_p
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    def sample(self, logits: Tensor) -> int:
        """Token from float32 logits `[vocab]`."""
        if self.temperature == 0:
            return int(logits.argmax())
        logits = logits.double().cpu()
        probabilities = ((logits - logits.max()) / self.temperature).softmax(0)  # a tiny temperature is greedy, not NaN
        if self.top_p < 1:
            ordered, order = probabilities.sort(descending=True)
            outside = ordered.cumsum(0) - ordered >= self.top_p  # the most likely token is always inside
            probabilities[order[outside]] = 0
        return int(torch.multinomial(probabilities, 1, generator=self._generator))


class TextStream:
    """Turns output tokens into text pieces that join to exactly the answer, cut at the first stop string.

    Text is held back while it could still be the beginning of a stop string, or an unfinished character.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.is_stopped = False
        self._ids: list[int] = []
        self._context = 0  # first token that is decoded again, so that spacing between tokens comes out right
        self._done = 0  # tokens whose text is out of the decoder
        self._held = ""

    def push(self, token_id: int) -> str:
        """The text that is now certain."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._context : self._done])
        after = self._decode(self._ids[self._context :])
        if after.endswith("\ufffd"):  # a character of several tokens, not complete yet
            return ""
        self._context, self._done = self._done, len(self._ids)
        return self._release(after[len(before) :])

    def finish(self) -> str:
        """The text held back, when no more tokens come."""
        before = self._decode(self._ids[self._context : self._done])
        rest = self._release(self._decode(self._ids[self._context :])[len(before) :])
        if self.is_stopped:
            return rest
        rest, self._held = rest + self._held, ""
        return rest

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _release(self, text: str) -> str:
        """Add text; give out what cannot be part of a stop string any more."""
        if self.is_stopped:
            return ""
        held = self._held + text
        found = [place for place in (held.find(stop) for stop in self.stop) if place >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return held[: min(found)]
        keep = max((_overlap(held, stop) for stop in self.stop), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every token that ends an answer: those of the generation config and the config, and the tokenizer's."""
    named = (getattr(model.generation_config, "eos_token_id", None), model.config.get_text_config().eos_token_id)
    ends: set[int] = set()
    for value in (*named, tokenizer.eos_token_id):
        ends.update([value] if isinstance(value, int) else value or [])
    return frozenset(ends)
