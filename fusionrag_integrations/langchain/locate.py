"""Where the documents' texts stand in a rendered prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Span = tuple[int, int]

_MIN_IN_WORD = 20
"""Shorter texts are found as whole words only: "no" is not taken from "know". Longer ones may touch letters, as they do
in languages without spaces."""


def locate(texts: Sequence[str], prompt: str) -> list[Span | None]:
    """The place of each text in the prompt, without overlap; None for one that is not there as it is.

    Texts may stand in any order, repeat each other, and be part of each other: the longest take their places first.
    Of several places a text takes one between its neighbours, nearest first. A text that only stands there without its
    surrounding whitespace, which chat templates strip, is found so.
    """
    spans: list[Span | None] = [None] * len(texts)
    for index in sorted(range(len(texts)), key=lambda index: -len(texts[index])):
        before = max((span[1] for span in spans[:index] if span), default=None)
        after = min((span[0] for span in spans[index + 1 :] if span), default=None)
        taken = [span for span in spans if span]
        for text in dict.fromkeys((texts[index], texts[index].strip())):
            free = (span for span in _occurrences(text, prompt) if not _overlaps(span, taken))
            spans[index] = min(free, key=lambda span: _cost(span, before, after), default=None)
            if spans[index] is not None:
                break
    return spans


def _occurrences(text: str, prompt: str) -> Iterator[Span]:
    start = prompt.find(text) if text else -1
    while start >= 0:
        if len(text) >= _MIN_IN_WORD or not (_joins_word(prompt, start) or _joins_word(prompt, start + len(text))):
            yield start, start + len(text)
        start = prompt.find(text, start + 1)


def _overlaps(span: Span, taken: Sequence[Span]) -> bool:
    return any(span[0] < stop and start < span[1] for start, stop in taken)


def _cost(span: Span, before: int | None, after: int | None) -> tuple[bool, int]:
    """Lower is better. `before` is where the texts before this one end, `after` where those behind it begin."""
    is_out_of_order = (before is not None and span[0] < before) or (after is not None and span[1] > after)
    if before is not None:
        return is_out_of_order, abs(span[0] - before)
    return is_out_of_order, span[0] if after is None else abs(after - span[1])


def _joins_word(prompt: str, place: int) -> bool:
    """Whether a word goes on across this place."""
    return 0 < place < len(prompt) and prompt[place - 1].isalnum() and prompt[place].isalnum()
