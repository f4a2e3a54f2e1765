"""`fusionrag ingest` and `fusionrag ask`, as a user runs them, on a tiny model in a directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import chromadb
import pytest
from typer.testing import CliRunner, Result

from fusionrag_integrations.cli import workspace
from fusionrag_integrations.cli.main import app
from tests.integrations.support import QUESTION, TEXTS, LetterEmbedding, tiny_model, tiny_tokenizer


class User:
    """Documents, a workspace, and the command."""

    def __init__(self, root: Path) -> None:
        self.documents, self.store, self.model = root / "documents", root / "store", root / "model"
        tiny_model().save_pretrained(self.model)
        tiny_tokenizer().save_pretrained(self.model)
        (self.documents / "deep").mkdir(parents=True)
        for number, text in enumerate(TEXTS):
            (self.documents / ("deep" if number % 2 else ".") / f"{number}.md").write_text(text)

    def run(self, *arguments: Any) -> Result:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        chromadb.api.shared_system_client.SharedSystemClient.clear_system_cache()  # as a process that ends
        return result

    def ingest(self, *arguments: Any) -> str:
        """What a successful ingestion prints."""
        result = self.run("ingest", self.documents, "--store", self.store, *arguments)
        assert result.exit_code == 0, (result.output, result.exception)
        return result.stdout

    def ask(self, *arguments: Any) -> Result:
        return self.run("ask", QUESTION, "--store", self.store, "--max-tokens", 4, *arguments)


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> User:
    """With an embedding one can compute by hand."""

    def load(name: str) -> Any:
        assert name == "letters"
        return LetterEmbedding()

    monkeypatch.setattr(workspace, "load_embedding", load)
    monkeypatch.setattr("fusionrag_integrations.cli.ingest.load_embedding", load)
    monkeypatch.setattr("fusionrag_integrations.cli.ask.load_embedding", load)
    return User(tmp_path)


def first(user: User) -> str:
    return user.ingest("--model", user.model, "--embedding-model", "letters", "--top-n", 2)


def test_only_what_changed_is_computed(user: User) -> None:
    text = first(user)
    assert "5 documents (5 new, 0 changed, 0 deleted) in 5 chunks" in text
    assert "5 plain caches computed, 0 reused; 5 enriched computed" in text
    assert json.loads((user.store / "settings.json").read_text())["top_n"] == 2

    text = user.ingest()
    assert "5 documents (0 new, 0 changed, 0 deleted) in 5 chunks\nnothing changed, nothing computed" in text

    (user.documents / "0.md").write_text("The office is closed.")
    (user.documents / "deep" / "1.md").unlink()
    (user.documents / "new.txt").write_text("Boats are painted in May.")
    text = user.ingest()
    assert "5 documents (1 new, 1 changed, 1 deleted) in 5 chunks" in text
    assert "2 plain caches computed, 0 reused; 2 enriched computed" in text
    assert "of chunks that did not change: 5 chunks: 0 plain caches computed" in text, "enriched with what is gone"
    assert "nothing changed, nothing computed" in user.ingest()


def test_a_question_is_answered_from_the_caches(user: User) -> None:
    first(user)
    result = user.ask("--explain", "--top-k", 3)
    assert result.exit_code == 0, result.output
    answer, table = result.stdout.split("\n\n", 1)
    assert answer
    lines = table.splitlines()
    assert [line.split()[1] for line in lines[2:5]] == ["prefix", "enriched", "enriched"]
    assert all(line.split("#")[0] in {"0.md", "2.md", "4.md", "deep/1.md", "deep/3.md"} for line in lines[2:5])
    full = user.ask("--method", "full")
    assert full.exit_code == 0
    assert "chunk" not in full.stdout


def test_lost_caches_are_repaired(user: User) -> None:
    first(user)
    shutil.rmtree(user.store / "caches")
    assert "nothing changed" in user.ingest()
    assert "of chunks that did not change: 5 chunks: 5 plain caches computed" in user.ingest("--repair")


def test_another_model_gets_caches_of_its_own(user: User) -> None:
    first(user)
    other = user.model.with_name("other")
    shutil.copytree(user.model, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    text = user.ingest("--model", other)
    assert "(0 new, 0 changed, 0 deleted)" in text
    assert "5 plain caches computed" in text
    assert "nothing changed" in user.ingest()


def test_without_an_embedding_model_there_are_plain_caches(user: User) -> None:
    text = user.ingest("--model", user.model, "--embedding-model", "none")
    assert "5 plain caches computed, 0 reused; 0 enriched computed" in text
    assert "no embedding model: chunks have plain caches only" in text
    assert "nothing changed" in user.ingest()
    (user.documents / "0.md").write_text("The office is closed.")
    assert "1 plain caches computed" in user.ingest()
    result = user.ask()
    assert result.exit_code == 1
    assert "without an embedding model" in result.stderr


def test_everything_can_be_taken_away(user: User) -> None:
    first(user)
    shutil.rmtree(user.documents)
    user.documents.mkdir()
    assert "0 documents (0 new, 0 changed, 5 deleted) in 0 chunks" in user.ingest()
    assert not list(user.store.rglob("*.safetensors"))


def test_files_that_are_no_text_are_left_out(user: User) -> None:
    (user.documents / "image.png").write_bytes(b"\x89PNG")
    (user.documents / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    result = user.run(
        "ingest", user.documents, "--store", user.store, "--model", user.model, "--embedding-model", "letters"
    )
    assert "5 documents" in result.stdout
    assert "latin.txt is left out: not UTF-8" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs --model"),
        (["--model", "{model}", "--chunk-size", "70"], "was made with --chunk-size 300"),
        (["--embedding-model", "other"], "was made with --embedding-model letters"),
    ],
)
def test_wishes_that_do_not_fit_are_refused(user: User, arguments: list[str], message: str) -> None:
    if arguments:
        first(user)
    given = [argument.format(model=user.model) for argument in arguments]
    result = user.run("ingest", user.documents, "--store", user.store, *given)
    assert result.exit_code == 1
    assert message in result.stderr


def test_what_is_not_there_is_named(user: User) -> None:
    assert "is not a directory" in user.run("ingest", user.documents / "nowhere").stderr
    assert "holds nothing; run `fusionrag ingest" in user.ask().stderr
    first(user)
    assert "--method 'fast' is not accepted" in user.ask("--method", "fast").stderr


def test_an_embedding_model_that_does_not_exist(tmp_path: Path) -> None:
    """The real loader: the error says what is accepted."""
    result = CliRunner().invoke(app, ["ingest", "--help"])
    assert "minilm" in result.output
    with pytest.raises(Exception) as raised:  # noqa: PT011 # typer's exit has no message; it was printed
        workspace.load_embedding(str(tmp_path / "nothing"))
    assert type(raised.value).__name__ == "Exit"
