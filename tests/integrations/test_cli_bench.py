"""`fusionrag bench`, end to end on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fusionrag_engine.selectors import SELECTORS
from fusionrag_integrations.cli.main import app
from tests.tiny_models import build_model, build_tokenizer

MEANS = {"em", "f1", "contains", "gold_logprob", "kl", "top1", "agreement_f1", "ttft_s", "true_budget"}
FIELDS = {
    *("dataset", "model", "method", "selector", "ratio", "n", "normalized_f1", "normalized_f1_ci"),
    *("identical_answers", "num_missed_chunks", "recomputed_share", "kv_deviation"),
    *("chosen_in_chunk", "chosen_in_prompt", "full_answers"),
    *MEANS,
    *(f"{name}_ci" for name in MEANS),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build_model("llama").save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return path


def quality(model: Path, *arguments: str, code: int = 0) -> str:
    common = ["bench", "quality", "--model", str(model), "--embedder", "words", "--max-new-tokens", "4"]
    result = CliRunner().invoke(app, [*common, *arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def test_every_registered_selector_on_a_file_and_a_generated_set(model_dir: Path, tmp_path: Path) -> None:
    ctxs = [{"title": "", "text": f"Note {i}: the pump in hall {i} is tested on Monday."} for i in range(4)]
    data, out = tmp_path / "set.json", tmp_path / "out" / "results.json"
    data.write_text(json.dumps([{"question": "When is it tested?", "answers": ["Monday"], "ctxs": ctxs}] * 2))
    names = [*(name for name in SELECTORS if name != "cacheclip"), "default"]
    chosen = ["--selectors", ",".join(names), "--ratios", "0,0.3,1", "--limit", "1", "--out", str(out)]
    sets = ["--data", str(data), "--data", "needle:length=120,keys=1"]
    output = quality(model_dir, *sets, *chosen)
    assert "agreement" in output
    result = json.loads(out.read_text())
    assert set(result) == {"rows", "settings", "default_selector", "machine"}
    assert len(result["rows"]) == 2 * (1 + 2 * (1 + 2 * len(names)))
    for row in result["rows"]:
        assert set(row) == FIELDS
        assert row["n"] == 1
        assert set(row["full_answers"]) == {"n", *MEANS, *(f"{name}_ci" for name in MEANS)}
        if row["ratio"] == 1:
            assert row["kl"] == pytest.approx(0, abs=1e-6)
            assert row["agreement_f1"] == 1
    assert {row["dataset"] for row in result["rows"]} == {str(data), "needle:length=120,keys=1"}
    assert result["settings"]["ratios"] == "0,0.3,1"

    shown = CliRunner().invoke(app, ["bench", "report", str(out)])
    assert shown.exit_code == 0, shown.output
    assert len(list((out.parent / "results").glob("*.png"))) == 2 * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere.json"], "nowhere.json"),
        (["--data", "needle", "--ratios", "0,x"], "could not convert"),
        (["--data", "needle", "--methods", "fast"], "fast"),
        (["--data", "needle", "--selectors", "best"], "best"),
        (["--data", "needle", "--embedder", "large"], "large"),
    ],
)
def test_what_is_not_accepted_is_named(model_dir: Path, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "quality", "--model", str(model_dir), *arguments])
    assert result.exit_code == 1
    assert message in result.output


def test_a_file_of_something_else_is_no_report(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    result = CliRunner().invoke(app, ["bench", "report", str(tmp_path / "x.json")])
    assert result.exit_code == 1
    assert "not a results file" in result.output
