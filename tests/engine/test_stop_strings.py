"""Text that grows token by token: cut exactly at stop strings, whole characters only, joined exactly to the answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionrag_engine import Engine, Request
from fusionrag_engine.decode import TextStream
from tests.engine.support import documents, tiny_engine, tiny_tokenizer
from tests.tiny_models import VOCAB

PROPERTIES = settings(derandomize=True, deadline=None, database=None, max_examples=200)


def _stream(token_ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    """Pieces of text as they come out, and whether a stop string ended them."""
    text, pieces = TextStream(tiny_tokenizer(), stop), []
    for token in token_ids:
        pieces.append(text.push(token))
        if text.is_stopped:
            break
    return [*pieces, text.finish()], text.is_stopped


def _cut(text: str, stop: tuple[str, ...]) -> str:
    places = [place for place in (text.find(each) for each in stop) if place >= 0]
    return text[: min(places)] if places else text


def _decode(token_ids: list[int]) -> str:
    text: str = tiny_tokenizer().decode(token_ids, skip_special_tokens=True)
    return text


def _encode(text: str) -> list[int]:
    ids: list[int] = tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]
    return ids


@settings(PROPERTIES)
@given(st.lists(st.integers(0, VOCAB - 1), max_size=25))
def test_pieces_of_any_tokens_join_to_their_text(token_ids: list[int]) -> None:
    assert "".join(_stream(token_ids)[0]) == _decode(token_ids)


@settings(PROPERTIES)
@given(
    st.text(alphabet="abc \u00e9\U0001f642", max_size=25),
    st.lists(st.text(alphabet="abc \u00e9", min_size=1, max_size=4), max_size=3),
)
def test_text_is_cut_at_the_first_stop_string_wherever_it_falls(text: str, stop: list[str]) -> None:
    pieces, is_stopped = _stream(_encode(text), tuple(stop))
    assert "".join(pieces) == _cut(text, tuple(stop))
    assert is_stopped == any(each in text for each in stop)


@pytest.mark.parametrize(
    "text",
    ["caf\u00e9", "\U0001f642", "\u6f22\u5b57", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "a\U0001f642b\u00e9"],
)
def test_a_character_of_several_tokens_comes_whole(text: str) -> None:
    token_ids = _encode(text)
    assert len(token_ids) > len(text)
    pieces, _ = _stream(token_ids)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_character_cut_off_by_the_length_limit_is_what_the_tokenizer_says() -> None:
    token_ids = _encode("ab\U0001f642")[:-1]
    assert "".join(_stream(token_ids)[0]) == _decode(token_ids) == "ab\ufffd"


def test_a_stop_string_across_tokens_is_held_back_until_it_is_certain() -> None:
    text = TextStream(tiny_tokenizer(), ("XYZ",))
    pieces = [text.push(token) for token in _encode("aXY")]
    assert "".join(pieces) == "a"
    assert text.push(_encode("b")[0]) == "XYb"
    for token in _encode("XYZ"):
        last = text.push(token)
    assert (last, text.is_stopped, text.finish()) == ("", True, "")


def test_what_was_held_back_comes_out_at_the_end() -> None:
    assert "".join(_stream(_encode("aXY"), ("XYZ",))[0]) == "aXY"


def test_the_earliest_of_several_stop_strings_wins() -> None:
    assert "".join(_stream(_encode("one two three"), ("three", "two", "wo"))[0]) == "one "


def test_text_behind_a_stop_string_in_the_same_token_is_dropped() -> None:
    token_ids = _encode("The harbour")
    assert any(len(_decode([token])) > 2 for token in token_ids)
    assert "".join(_stream(token_ids, ("rb",))[0]) == "The ha"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = tiny_engine()
    yield engine
    engine.close()


def _request(**settings_: object) -> Request:
    return Request("Who?", documents(2), **{"method": "full", "max_new_tokens": 40, **settings_})  # type: ignore[arg-type]


def test_every_stop_string_of_an_answer_cuts_it_exactly(engine: Engine) -> None:
    text = engine.generate(_request()).text
    for start in range(0, len(text) - 3, 7):
        for size in (1, 2, 3):
            stop = text[start : start + size]
            if "\ufffd" in stop:
                continue
            answer = engine.generate(_request(stop=[stop]))
            assert answer.text == text[: text.index(stop)]
            assert answer.finish_reason == "stop"
            deltas = list(engine.stream(_request(stop=stop)))
            assert "".join(delta.text for delta in deltas) == answer.text
            assert deltas[-1].finish_reason == "stop"
    assert engine.generate(_request(stop=["\u2603 never"])).text == text


def test_generation_ends_with_the_token_that_completes_the_stop_string(engine: Engine) -> None:
    whole = engine.generate(_request())
    stop = whole.text[4:6]
    answer = engine.generate(_request(stop=[stop]))
    assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
    assert stop in engine.tokenizer.decode(answer.token_ids)
    assert stop not in engine.tokenizer.decode(answer.token_ids[:-1])
    assert answer.stats.num_generated_tokens == len(answer.token_ids)


def test_a_stop_string_in_the_prompt_does_not_count(engine: Engine) -> None:
    text = engine.generate(_request()).text
    assert "Question" not in text
    assert engine.generate(_request(stop=["Question", documents(1)[0].text[:5]])).text == text


def test_empty_stop_strings_are_ignored(engine: Engine) -> None:
    assert engine.generate(_request(stop=["", ""])).text == engine.generate(_request()).text
    assert engine.generate(_request(stop="")).text == engine.generate(_request()).text


def test_half_a_character_behind_a_stop_string_does_not_hide_it() -> None:
    half = _encode("\U0001f642")[0]
    pieces, is_stopped = _stream([*_encode("ab"), half], ("b",))
    assert is_stopped
    assert "".join(pieces) == "a"
