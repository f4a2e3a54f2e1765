"""Files and generated sets of questions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fusionrag_engine import ConfigError
from fusionrag_engine.evaluation import load_examples
from fusionrag_engine.evaluation.datasets import CHUNK_TOKENS, cut


def count(text: str) -> int:
    return len(text.split())


def test_questions_over_ctxs(tmp_path: Path) -> None:
    item = {"question": "Who?", "answers": ["Ann"], "ctxs": [{"title": "T", "text": "x"}, {"title": "", "text": "y"}]}
    for name, text in (("a.json", json.dumps([item, item])), ("a.jsonl", f"{json.dumps(item)}\n\n{json.dumps(item)}")):
        (tmp_path / name).write_text(text)
        examples = load_examples(tmp_path / name)
        assert len(examples) == 2
        assert [chunk.text for chunk in examples[0].chunks] == ["T\nx", "y"]
        assert len(load_examples(tmp_path / name, 1)) == 1


def test_longbench_contexts_are_cut_without_losing_a_word(tmp_path: Path) -> None:
    context = "\n".join(" ".join(f"w{line}-{i}" for i in range(40 + 200 * line)) for line in range(5))
    path = tmp_path / "hotpot.jsonl"
    path.write_text(json.dumps({"input": "Q?", "context": context, "answers": ["A", "B"], "length": 9}))
    (example,) = load_examples(path, None, count)
    assert (example.question, example.answers) == ("Q?", ["A", "B"])
    texts = [chunk.text for chunk in example.chunks]
    assert " ".join(texts).split() == context.split()
    assert all(count(text) <= CHUNK_TOKENS for text in texts)
    assert len(texts) < 12
    assert cut("\n \n", count) == []


@pytest.mark.parametrize("text", ["{}", "[{}]", "not json", '[{"question": "q", "answers": [], "ctxs": []}]'])
def test_a_file_of_another_shape_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.json"):
        load_examples(tmp_path / "bad.json")


@pytest.mark.parametrize("keys", [1, 4])
@pytest.mark.parametrize(("depth", "place"), [(0.0, 0), (0.5, 4), (1.0, 9)])
def test_needles_stand_where_they_should(keys: int, depth: float, place: int) -> None:
    (example,) = load_examples(f"needle:length=2000,depth={depth},keys={keys}", 1, count)
    (answer,) = example.answers
    assert [answer in chunk.text for chunk in example.chunks].index(True) == place
    assert sum("The code of the" in chunk.text for chunk in example.chunks) == keys
    assert sum(chunk.text.count("The code of the") for chunk in example.chunks) == keys
    assert 1900 <= sum(count(chunk.text) for chunk in example.chunks) <= 2300


def test_a_variables_value_can_be_followed() -> None:
    for example in load_examples("variables:length=1500,hops=4", 5, count):
        text = " ".join(chunk.text for chunk in example.chunks)
        name = example.question.split()[-1].rstrip("?")
        for _ in range(4):
            name = text.split(f"The variable {name} is equal to ")[1].split(".")[0]
        assert f"The variable {name} is {example.answers[0]}." in text


def test_two_hop_facts_stand_in_two_chunks() -> None:
    for example in load_examples("two_hop:length=1000,depth=0.3", 8, count):
        thing = example.question.split("owner of the ")[1].split()[0]
        holds = [[thing in chunk.text, example.answers[0] in chunk.text] for chunk in example.chunks]
        assert [True, True] not in holds
        assert [sum(column) for column in zip(*holds, strict=True)] == [1, 1]


def test_generated_sets_follow_from_their_seed() -> None:
    one, same, other = (load_examples(f"needle:length=300,seed={seed}", 3, count) for seed in (1, 1, 2))
    assert one == same
    assert one != other
    assert len({example.answers[0] for example in one}) == 3


@pytest.mark.parametrize(
    "spec", ["needle:size=3", "needle:length=x", "needle:depth=1.5", "needle:keys=0", "needle:keys=99", "haystack"]
)
def test_what_cannot_be_generated_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"accepted|neither"):
        load_examples(spec, 1, count)
