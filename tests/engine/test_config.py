"""Settings and requests: frozen, checked when made, wrong ones named."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fusionrag_engine
from fusionrag_engine import (
    Chunk,
    ConfigError,
    Engine,
    EngineConfig,
    FusionRAGError,
    Request,
    UnknownSettingError,
)
from tests.engine.support import documents

MakeEngine = Callable[..., Engine]


def test_unknown_settings_are_named_and_the_known_ones_listed() -> None:
    with pytest.raises(UnknownSettingError, match=r"recompute_ration.*recompute_ratio") as caught:
        EngineConfig(recompute_ration=0.1)  # type: ignore[call-arg]
    assert isinstance(caught.value, ConfigError)
    with pytest.raises(TypeError):
        replace(EngineConfig(), nonsense=1)  # type: ignore[call-arg]


def test_a_config_is_frozen() -> None:
    config = EngineConfig()
    with pytest.raises(FrozenInstanceError):
        config.top_n = 3  # type: ignore[misc]
    assert replace(config, top_n=3).top_n == 3
    with pytest.raises(ConfigError):
        replace(config, top_n=-3)


def test_a_config_pickles() -> None:
    config = EngineConfig(system_prompt="Be brief.", top_n=3, cache_dir=Path("/tmp/x"), recompute_ratio=0.3)
    assert pickle.loads(pickle.dumps(config)) == config


def test_defaults_are_those_of_the_contract() -> None:
    config = EngineConfig()
    assert (config.recompute_ratio, config.top_n, config.selector) == (0.15, 10, "query_guided")
    assert (config.dtype, config.device, config.cache_dir, config.codec) == ("auto", "auto", None, "none")
    assert config.on_miss == "compute"


BAD_SETTINGS: list[dict[str, Any]] = [
    {"recompute_ratio": -0.1},
    {"recompute_ratio": 1.01},
    {"recompute_ratio": float("nan")},
    {"recompute_ratio": "0.1"},
    {"recompute_ratio": None},
    {"recompute_ratio": True},
    {"top_n": -1},
    {"top_n": 2.5},
    {"top_n": True},
    {"dtype": "int8"},
    {"dtype": None},
    {"codec": "zip"},
    {"on_miss": "ignore"},
    {"host_bytes": -1},
    {"host_bytes": "2GB"},
    {"disk_bytes": -1},
    {"max_new_tokens": 0},
    {"prefill_tokens": 0},
    {"question_template": "no place for it"},
    {"question_template": None},
    {"chat_template_kwargs": None},
    {"system_prompt": 5},
    {"chunk_separator": None},
    {"embed": 5},
]


@pytest.mark.parametrize("settings", BAD_SETTINGS, ids=str)
def test_a_bad_setting_is_named(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ConfigError, match=name):
        EngineConfig(**settings)


@pytest.mark.parametrize("settings", [{"selector": 5}, {"cache_dir": "nosuch://bucket/x"}, {"device": "gpu"}], ids=str)
def test_a_setting_that_only_an_engine_can_check_is_named(make_engine: MakeEngine, settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ConfigError, match=name):
        make_engine(**settings)


def test_the_cache_directory_may_be_a_path_text_or_file_url(tmp_path: Path, make_engine: MakeEngine) -> None:
    for cache_dir in (tmp_path, str(tmp_path), f"file://{tmp_path}"):
        report = make_engine(cache_dir=cache_dir).precompute(documents(1))
        assert report.num_plain_computed + report.num_plain_reused == 1
    assert report.num_plain_reused == 1
    deep = tmp_path / "not" / "there yet"
    make_engine(cache_dir=deep).precompute(documents(1))
    assert deep.is_dir()


BAD_REQUESTS: list[dict[str, Any]] = [
    {"question": None},
    {"question": 5},
    {"chunks": "one text"},
    {"chunks": Chunk("one")},
    {"chunks": None},
    {"chunks": [5]},
    {"chunks": [None]},
    {"method": "fast"},
    {"method": None},
    {"recompute_ratio": 1.5},
    {"recompute_ratio": "half"},
    {"max_new_tokens": 0},
    {"max_new_tokens": 2.0},
    {"temperature": -1.0},
    {"temperature": float("nan")},
    {"temperature": "hot"},
    {"top_p": 0.0},
    {"top_p": 1.1},
    {"top_p": "x"},
    {"stop": 5},
    {"stop": [5]},
    {"seed": "x"},
    {"seed": 1.5},
    {"text_around": ["too few"]},
    {"text_around": "ab"},
    {"text_around": [1, 2]},
]


@pytest.mark.parametrize("settings", BAD_REQUESTS, ids=str)
def test_a_bad_request_is_named_when_it_is_made(settings: dict[str, Any]) -> None:
    """And is no plain TypeError: LlamaIndex swallows those and answers "Empty Response"."""
    (name,) = settings
    with pytest.raises(ConfigError, match=name):
        Request(**{"question": "Who?", "chunks": ["One."], **settings})


@pytest.mark.parametrize("text", [None, 5, b"bytes"])
def test_a_chunk_that_is_no_text_is_named(make_engine: MakeEngine, text: Any) -> None:
    with pytest.raises(ConfigError, match="text"):
        make_engine().precompute([Chunk(text)])


def test_a_request_takes_texts_and_chunks_and_is_frozen() -> None:
    request = Request("Who?", ["One.", Chunk("Two.", id="2", scope="s")], stop="END")
    assert request.chunks == (Chunk("One."), Chunk("Two.", id="2", scope="s"))
    assert request.stop == ("END",)
    with pytest.raises(FrozenInstanceError):
        request.question = "Why?"  # type: ignore[misc]
    with pytest.raises(TypeError):
        Request("Who?", [], "full")  # type: ignore[misc]
    assert replace(request, method="full").chunks == request.chunks


def test_a_requests_chunks_may_be_any_iterable() -> None:
    assert Request("Who?", iter(["One.", "Two."])).chunks == (Chunk("One."), Chunk("Two."))  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers() -> None:
    """Ratios come out of sweeps written with numpy."""
    assert Request("Who?", [], recompute_ratio=np.float64(0.5)).recompute_ratio == 0.5


def test_every_error_is_a_runtime_error() -> None:
    """A plain ValueError or TypeError would be swallowed by LlamaIndex's response builders."""
    errors = [
        value
        for name in fusionrag_engine.__all__
        if isinstance(value := getattr(fusionrag_engine, name), type) and issubclass(value, Exception)
    ]
    assert len(errors) >= 6
    assert all(issubclass(error, FusionRAGError) and issubclass(error, RuntimeError) for error in errors)


def test_every_public_name_exists() -> None:
    for name in [
        "Engine",
        "EngineConfig",
        "Chunk",
        "Request",
        "Prefill",
        "Generation",
        "TokenDelta",
        "Stats",
        "PrecomputeReport",
        "ChunkRecord",
    ]:
        assert name in fusionrag_engine.__all__
        assert hasattr(fusionrag_engine, name)
