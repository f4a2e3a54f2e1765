"""Where documents' texts are found in a prompt."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionrag_integrations.langchain.locate import locate


def found(texts: list[str], prompt: str) -> list[str | None]:
    return [None if span is None else prompt[span[0] : span[1]] for span in locate(texts, prompt)]


def starts(texts: list[str], prompt: str) -> list[int | None]:
    return [None if span is None else span[0] for span in locate(texts, prompt)]


@given(
    texts=st.lists(st.text("ab \n", min_size=1, max_size=8).filter(str.strip), min_size=1, max_size=6),
    separator=st.sampled_from(["", "|", "\n\n", "|ab|", " "]),
    frame=st.sampled_from([("", ""), ("System: a b ab\n", "\nQuestion: b?"), ("|", "|")]),
    data=st.data(),
)
@settings(max_examples=300, deadline=None)
def test_what_is_found_is_the_text_and_overlaps_nothing(
    texts: list[str], separator: str, frame: tuple[str, str], data: st.DataObject
) -> None:
    shown = data.draw(st.permutations(texts))
    prompt = frame[0] + separator.join(shown) + frame[1]
    spans = [span for span in locate(texts, prompt) if span is not None]
    for text, piece in zip(texts, found(texts, prompt), strict=True):
        assert piece is None or piece in (text, text.strip())
    ends = sorted(spans)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(ends))


@given(
    texts=st.lists(st.text("abcdefgh ", min_size=4, max_size=12).filter(str.strip), min_size=1, max_size=6),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_with_separators_of_their_own_every_text_is_found_in_any_order(texts: list[str], data: st.DataObject) -> None:
    shown = data.draw(st.permutations(texts))
    assert found(texts, "\n--\n".join(["", *shown, ""])) == texts


def test_duplicates_take_a_place_each() -> None:
    assert starts(["same", "other text", "same"], "same\nother text\nsame") == [0, 5, 16]
    assert starts(["same", "same"], "only one same here") == [9, None]


def test_a_text_that_is_part_of_another_does_not_take_its_place() -> None:
    prompt = "The hall opens at eight. Closed on Sunday.\n\nThe hall opens at eight."
    assert starts(["The hall opens at eight.", "The hall opens at eight. Closed on Sunday."], prompt) == [44, 0]


def test_a_short_text_is_found_beside_its_neighbours_and_not_in_the_instructions() -> None:
    prompt = "Answer yes or no.\n\nA long document.\n\nyes\n\nAnother long one.\n\nIs it yes?"
    assert starts(["A long document.", "yes", "Another long one."], prompt)[1] == prompt.index("yes\n\nAnother")


def test_a_word_is_not_found_within_a_word() -> None:
    assert starts(["no"], "I know: no") == [8]
    assert starts(["no"], "I know") == [None]
    assert starts(["a text that is long enough"], "xa text that is long enoughx") == [1]


def test_order_counts_more_than_nearness() -> None:
    prompt = "yes\nA long document.\nAnd some text in between.\nyes\nAnother long document."
    assert starts(["A long document.", "yes", "Another long document."], prompt)[1] == prompt.rindex("yes")


def test_surrounding_whitespace_that_a_template_stripped() -> None:
    assert found([" padded \n"], "<|user|>padded<|end|>") == ["padded"]
    assert found([" padded \n"], "<|user|>: padded \n<|end|>") == [" padded \n"]


@pytest.mark.parametrize("text", ["", " \n", "absent"])
def test_what_is_not_there(text: str) -> None:
    assert locate([text], "a prompt") == [None]
