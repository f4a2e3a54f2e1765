"""`fusionrag cache`: works from a cache directory alone, prints tables and JSON, and a dry run changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fusionrag_engine import Chunk, Engine, EngineConfig
from fusionrag_integrations.chroma import CacheRecord, ChromaCacheIndex
from fusionrag_integrations.cli.main import app
from tests.tiny_models import ARCHITECTURES, build_model, build_tokenizer

TEXTS = [
    "The shift lead signs the report.",
    "Pumps are tested for two hours.",
    "A valve is replaced.",
    "Closed at noon.",
]
RING = [[1, 2], [2, 3], [3, 0], [0, 1]]


def _engine(directory: Path, **settings: Any) -> Engine:
    config = EngineConfig(system_prompt="Be brief.", cache_dir=directory, **{"top_n": 2, **settings})
    return Engine(build_model("llama"), build_tokenizer(), config)


def _chunks(scope: str = "") -> list[Chunk]:
    return [Chunk(text, id=f"node-{place}", scope=scope) for place, text in enumerate(TEXTS)]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with _engine(tmp_path / "caches") as engine:
        engine.precompute(_chunks(), neighbours=RING)
        engine.precompute(_chunks("tenant")[:2], neighbours=[[1], [0]])
    return tmp_path / "caches"


def _run(*arguments: object, status: int = 0) -> str:
    done = CliRunner().invoke(app, ["cache", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == status, done.output
    return done.output if status else done.stdout


def _json(*arguments: object, status: int = 0) -> Any:
    done = CliRunner().invoke(app, ["cache", *map(str, arguments), "--json"], catch_exceptions=False)
    assert done.exit_code == status, done.output
    return json.loads(done.stdout)


def _files(store: Path) -> list[Path]:
    return sorted(store.rglob("*.safetensors"))


def test_ls_names_every_namespace_and_what_it_was_made_with(store: Path) -> None:
    _engine(store, codec="int8").close()
    found = {row["codec"]: row for row in _json("ls", store)}
    assert found.keys() == {"none", "int8"}
    assert (found["none"]["num_chunks"], found["none"]["num_enriched_chunks"]) == (6, 6)
    assert found["none"]["tiers"]["disk"]["num_bytes"] == sum(path.stat().st_size for path in _files(store))
    assert found["none"]["model"] == "LlamaForCausalLM"
    assert found["none"]["dtype"] == "float32"
    table = _run("ls", store)
    assert "LlamaForCausalLM" in table
    assert "int8" in table


def test_ls_lists_chunks_of_a_scope(store: Path) -> None:
    rows = _json("ls", store, "--chunks", "--scope", "tenant")
    assert sorted(row["ids"] for row in rows) == [["node-0"], ["node-1"]]
    assert {row["kind"] for row in rows} == {"enriched"}
    assert "'tenant'" in _run("ls", store, "--chunks")


def test_show_tells_everything_of_a_chunk(store: Path) -> None:
    (found,) = _json("show", store, "node-2")
    assert found["ids"] == ["node-2"]
    assert len(found["neighbours"]) == 2
    assert [file["kind"] for file in found["files"]] in (["plain", "enriched"], ["enriched", "plain"])
    assert _json("show", store, found["key"][:10]) == [found]
    assert found["key"] in _run("show", store, "node-2").replace("\n", "").replace("│", "").replace(" ", "")
    assert "no chunk" in _run("show", store, "nobody", status=1)


def test_stats_count_by_tier_and_scope(store: Path) -> None:
    (found,) = _json("stats", store)
    assert found["scopes"] == {"": 4, "tenant": 2}
    assert found["tiers"]["disk"]["num_entries"] == len(_files(store)) == 12
    assert "'tenant'" in _run("stats", store)


def test_verify_reports_and_repairs(store: Path) -> None:
    assert _json("verify", store) == []
    victim = _files(store)[0]
    victim.write_bytes(b"nonsense")
    (problem,) = _json("verify", store, "--repair", status=1)
    assert problem["key"] == victim.stem
    assert _json("verify", store) == []
    assert "0 problems" in _run("verify", store)


def test_gc_removes_leftovers_and_only_says_so_in_a_dry_run(store: Path) -> None:
    stray = _files(store)[0].parent.parent / "00" / ("00" * 32 + ".safetensors")
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(_files(store)[0].read_bytes())
    (found,) = _json("gc", store, "--dry-run")
    assert found["files"] == [stray.stem]
    assert stray.exists()
    assert "Would be removed" in _run("gc", store, "--dry-run")
    assert _json("gc", store)[0]["files"] == [stray.stem]
    assert not stray.exists()


def test_gc_sweeps_against_chroma(store: Path, tmp_path: Path) -> None:
    index = ChromaCacheIndex.open(tmp_path / "chroma")
    with _engine(store) as engine:
        records = {chunk.id or "": CacheRecord.from_chunk(engine.has(chunk)) for chunk in _chunks()[:3]}
        index.put({name: record for name, record in records.items() if record is not None})
        assert index.keys() == {engine.has(chunk).key for chunk in _chunks()[:3]}
        assert index.gc(engine) == 0, "within the grace period"
    where = ("--chroma", tmp_path / "chroma", "--grace-s", 0)
    (found,) = _json("gc", store, *where, "--dry-run")
    assert len(found["chunks"]) == 3
    assert len(_json("ls", store, "--chunks")) == 6
    _run("gc", store, *where)
    assert sorted(row["ids"] for row in _json("ls", store, "--chunks")) == [["node-0"], ["node-1"], ["node-2"]]
    assert "no collection" in _run("gc", store, *where, "--collection", "other", status=1)


def test_rm_removes_chunks_and_only_says_so_in_a_dry_run(store: Path) -> None:
    before = _files(store)
    (found,) = _json("rm", store, "node-3", "--dry-run")
    assert len(found["fall_back_to_plain"]) == 2
    assert _files(store) == before
    _run("rm", store, "node-3")
    assert len(_files(store)) == len(before) - 4
    kinds = {row["ids"][0]: row["kind"] for row in _json("ls", store, "--chunks", "--scope", "")}
    assert kinds == {"node-0": "enriched", "node-1": "plain", "node-2": "plain"}
    assert len(_json("rm", store, "--all", "--scope", "tenant")) == 2
    assert _json("stats", store)[0]["scopes"] == {"": 3}
    assert "no chunk" in _run("rm", store, "nobody", status=1)
    _run("rm", store, status=1)


def test_refresh_enriches_again_with_the_settings_of_the_store(store: Path, tmp_path: Path) -> None:
    build_model("llama").save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    _run("rm", store, "node-3")
    found = _json("refresh", store, "--model", tmp_path / "model", "--dry-run")
    assert (found["num_refreshed"], len(found["stale"])) == (0, 2)
    assert _json("refresh", store, "--model", tmp_path / "model", "--budget", 1)["num_left"] == 1
    assert "1 enriched again" in _run("refresh", store, "--model", tmp_path / "model").replace("\n", " ")
    build_model("llama", seed=1).save_pretrained(tmp_path / "other")
    build_tokenizer().save_pretrained(tmp_path / "other")
    assert "is not the model" in _run("refresh", store, "--model", tmp_path / "other", status=1)
    assert len(_json("ls", store)) == 1


def test_a_directory_without_caches_is_an_error(tmp_path: Path) -> None:
    assert "no caches" in _run("ls", tmp_path, status=1)
    assert list(tmp_path.iterdir()) == []


def test_plan_predicts_what_ingestion_writes(store: Path, tmp_path: Path) -> None:
    build_model("llama").save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    with _engine(tmp_path / "again") as engine:
        engine.precompute(_chunks(), neighbours=RING)
        written = engine.stats()["disk_bytes"]
        num_tokens = sum(engine.count_tokens(text) for text in TEXTS)
    settings = ("--model", tmp_path / "model", "--dtype", "float32", "--chunk-tokens", num_tokens // 4 + 1)
    plans = {row["codec"]: row for row in _json("plan", "--tokens", num_tokens, *settings)}
    assert abs(plans["none"]["disk_bytes"] - written) < 0.05 * written
    assert plans["int4"]["disk_bytes"] < plans["int8"]["disk_bytes"] < plans["none"]["disk_bytes"]
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(TEXTS))
    assert _json("plan", corpus, *settings)[0]["num_tokens"] > 0
    assert "int8" in _run("plan", corpus, *settings)
    _run("plan", "--model", tmp_path / "model", status=1)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_shape_of_a_cache_is_known_from_the_configuration(architecture: str) -> None:
    from fusionrag_engine.plan import kv_shape
    from fusionrag_engine.runner import ModelRunner

    model = build_model(architecture)
    assert kv_shape(model.config) == ModelRunner(model).shape


def test_every_command_tells_what_it_does() -> None:
    for name in ("ls", "show", "stats", "verify", "gc", "rm", "refresh", "plan"):
        assert "--json" in _run(name, "--help")
