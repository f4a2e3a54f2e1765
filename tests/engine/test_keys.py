"""Law 4: a cache is used only where everything it was computed with is the same, token ids included."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fusionrag_engine import Chunk, Engine, Request
from fusionrag_engine.catalog import ChunkRow
from fusionrag_engine.keys import CacheKeys, digest
from fusionrag_engine.store import Entry
from tests.engine.support import assert_same, cache_files, documents, full, ring, settle, tiny_engine
from tests.tiny_models import ARCHITECTURES, CHAT_TEMPLATE, SIZES, build_model, build_tokenizer

MakeEngine = Callable[..., Engine]
COUNT = 3


def _one_weight_changed() -> Any:
    model = build_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3
    return model


def _configured(**settings: Any) -> Any:
    """The same weights under another configuration."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, **settings}))
    model.load_state_dict(build_model("llama").state_dict())
    return model.eval()


def _other_tokenizer() -> Any:
    """Gives the same ids for ordinary text; one more token exists."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["qqqq"])
    return tokenizer


CHANGES: dict[str, Callable[[], dict[str, Any]]] = {
    "one element of one weight": lambda: {"model": _one_weight_changed()},
    "rope_theta": lambda: {"model": _configured(rope_parameters={"rope_type": "default", "rope_theta": 20000.0})},
    "rope scaling": lambda: {
        "model": _configured(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0})
    },
    "a setting without weights": lambda: {"model": _configured(rms_norm_eps=1e-4)},
    "the activation": lambda: {"model": _configured(hidden_act="gelu")},
    "dtype": lambda: {"model": build_model("llama").bfloat16()},
    "tokenizer": lambda: {"tokenizer": _other_tokenizer()},
    "system_prompt": lambda: {"system_prompt": "Be brief!"},
    "chat template": lambda: {
        "tokenizer": build_tokenizer(chat_template=CHAT_TEMPLATE.replace("<|start|>", "<|start|> "))
    },
    "a BOS": lambda: {"tokenizer": build_tokenizer(adds_bos=True)},
    "template keywords": lambda: {
        "tokenizer": build_tokenizer(chat_template="{{ mode }}" + CHAT_TEMPLATE),
        "chat_template_kwargs": {"mode": "x"},
    },
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("store")
    with tiny_engine(cache_dir=directory) as engine:
        engine.precompute(documents(COUNT), neighbours=ring(COUNT))
    return directory


def _request(method: str = "fusionrag", ratio: float | None = 0.25) -> Request:
    return Request("Who signs?", documents(COUNT), method=method, recompute_ratio=ratio)


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_computed_under_other_settings_is_used(store: Path, make_engine: MakeEngine, change: str) -> None:
    engine = make_engine(cache_dir=store, **CHANGES[change]())
    assert [engine.has(chunk).kind for chunk in documents(COUNT)] == ["none"] * COUNT
    ours = engine.prefill(_request())
    assert ours.stats.chunk_status == ["miss"] * COUNT
    settle(engine)
    engine.delete(documents(COUNT))


def test_the_same_settings_in_a_new_engine_hit(store: Path, make_engine: MakeEngine) -> None:
    """The control: the store does hit where nothing has changed, and settings that change no row are not in the key."""
    same = {
        "recompute_ratio": 0.5,
        "selector": "random",
        "prefill_tokens": 7,
        "chunk_separator": "\n",
        "question_template": "\n\nNow: {question}",
        "max_new_tokens": 3,
        "host_bytes": 0,
    }
    engine = make_engine(cache_dir=store, model=build_model("llama"), tokenizer=build_tokenizer(), **same)
    assert engine.prefill(_request()).stats.chunk_status == ["prefix", "enriched", "enriched"]


def test_top_n_decides_which_enriched_cache_is_used(store: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(cache_dir=store, top_n=1)
    stats = engine.prefill(_request()).stats
    assert stats.chunk_status == ["prefix", "plain", "plain"]
    assert [engine.has(chunk).kind for chunk in documents(COUNT)] == ["plain"] * COUNT


def test_other_neighbours_make_another_enriched_cache(tmp_path: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(cache_dir=tmp_path)
    first = engine.precompute(documents(COUNT), neighbours=ring(COUNT, 1)).records
    again = engine.precompute(documents(COUNT), neighbours=ring(COUNT, 1))
    assert again.num_computed == 0
    assert again.records == first
    swapped = engine.precompute(documents(COUNT), neighbours=[[2], [0], [1]])
    assert swapped.num_enriched_computed == COUNT
    assert {record.enriched_key for record in swapped.records}.isdisjoint(record.enriched_key for record in first)
    reference = make_engine()
    reference.precompute(documents(COUNT), neighbours=[[2], [0], [1]])
    assert_same(engine.prefill(_request()).logits, reference.prefill(_request()).logits)
    assert len(cache_files(tmp_path)) == 2 * COUNT  # the ones replaced are gone


def test_the_order_of_neighbours_is_in_the_key(make_engine: MakeEngine) -> None:
    engine = make_engine()
    keys = [
        engine.precompute(documents(COUNT), neighbours=[names, [], []]).records[0].enriched_key
        for names in ([1, 2], [2, 1], [1], [2])
    ]
    assert len(set(keys)) == 4


def test_another_scope_does_not_hit(store: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(cache_dir=store)
    elsewhere = documents(COUNT, scope="other")
    assert engine.prefill(Request("Who?", elsewhere)).stats.chunk_status == ["miss"] * COUNT
    settle(engine)
    engine.delete(elsewhere)


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_other_tokens_under_the_same_key_are_a_miss(
    tmp_path: Path, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """A hash collision, crafted: the file of one chunk's key holds whole and sound rows of another chunk."""
    engine = make_engine(cache_dir=tmp_path)
    one, other = documents(2)
    record = engine.precompute([other]).records[0]
    tokens = engine.layout.tokenize(one.text)
    wrong = engine.library.store.get(record.key or "", engine.layout.tokenize(other.text))
    assert wrong is not None
    collision = Entry(engine.library.keys.plain(tokens, ""), wrong.token_ids, wrong.start, wrong.keys, wrong.values)
    if where == "memory":
        engine.library.store.host.put(collision)
        engine.library.catalog.add(ChunkRow(collision.key, "", "", tuple(tokens)), None)
    else:
        assert engine.library.store.disk is not None
        engine.library.store.disk.write(collision)
    with caplog.at_level(logging.WARNING, "fusionrag"):
        for method in ("reuse", "fusionrag"):
            request = Request("Who?", [one, other], method=method, recompute_ratio=0.0)
            ours = engine.prefill(request)
            settle(engine)
            assert ours.stats.chunk_status == ["miss", "plain"]
    assert any("tokens" in record.getMessage() for record in caplog.records)
    request = Request("Who?", [one], method="reuse")
    assert_same(engine.prefill(request).logits, full(engine, request).logits)


def test_a_collision_of_enriched_keys_is_a_miss(make_engine: MakeEngine) -> None:
    engine = make_engine()
    record = engine.precompute(documents(COUNT), neighbours=ring(COUNT)).records[1]
    enriched = engine.library.store.host.get(record.enriched_key or "")
    assert enriched is not None
    others = tuple(token + 1 for token in enriched.token_ids)
    engine.library.store.host.put(Entry(enriched.key, others, enriched.start, enriched.keys, enriched.values))
    assert engine.prefill(_request()).stats.chunk_status == ["prefix", "plain", "enriched"]


def test_keys_cannot_be_confused_by_where_one_field_ends() -> None:
    keys = CacheKeys(model="m", tokenizer="t", dtype="d", codec="none", prefix_ids=[1, 2])
    assert keys.plain([1, 23], "") != keys.plain([12, 3], "")
    assert keys.plain([1], "2") != keys.plain([1, 2], "")
    assert keys.plain([], "") != keys.enriched("", [], 0)
    assert keys.enriched("a", ["b", "c"], 1) != keys.enriched("a", ["bc"], 1)
    assert keys.enriched("a", ["b"], 1) != keys.enriched("a", ["b"], 11)
    assert digest(a="b", c="") != digest(a="", c="b")
    assert len(keys.plain([1], "")) == 64


@pytest.mark.parametrize("name", ["model", "tokenizer", "dtype", "codec", "prefix_ids"])
def test_every_field_is_in_the_namespace(name: str) -> None:
    fields: dict[str, Any] = {"model": "m", "tokenizer": "t", "dtype": "d", "codec": "none", "prefix_ids": [1, 2]}
    changed = {**fields, name: [1, 3] if name == "prefix_ids" else "other"}
    assert CacheKeys(**fields).namespace != CacheKeys(**changed).namespace


def test_every_parameter_and_buffer_is_in_the_fingerprint() -> None:
    from fusionrag_engine.keys import model_fingerprint

    model = build_model("qwen2")
    seen = {model_fingerprint(model)}
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for _name, tensor in tensors:
        with torch.no_grad():
            tensor.view(-1)[-1] += 1
        seen.add(model_fingerprint(model))
    assert len(seen) == len(tensors) + 1


def test_fingerprints_are_the_same_for_the_same_model_built_again() -> None:
    from fusionrag_engine.keys import model_fingerprint, tokenizer_fingerprint

    for architecture in ARCHITECTURES:
        assert model_fingerprint(build_model(architecture)) == model_fingerprint(build_model(architecture))
    assert tokenizer_fingerprint(build_tokenizer()) == tokenizer_fingerprint(build_tokenizer())


def test_fingerprints_do_not_change_when_an_engine_uses_them(make_engine: MakeEngine) -> None:
    """A tokenizer whose padding or truncation state was set by a call, and a model that was loaded before."""
    from fusionrag_engine.keys import model_fingerprint, tokenizer_fingerprint

    model, tokenizer = build_model("llama"), build_tokenizer()
    before = model_fingerprint(model), tokenizer_fingerprint(tokenizer)
    engine = make_engine(model=model, tokenizer=tokenizer)
    engine.generate(Request("Who?", documents(2)))
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2)
    tokenizer(["one", "longer text"], padding=True, truncation=True, max_length=4)
    assert (model_fingerprint(model), tokenizer_fingerprint(tokenizer)) == before


def test_a_fingerprint_is_of_the_tokens_alone(make_engine: MakeEngine) -> None:
    """Model, scope and settings are in the key; two engines agree on the fingerprint."""
    one, two = make_engine(), make_engine("qwen3", system_prompt="Other.")
    records = [
        engine.precompute([Chunk("Some text.", scope=scope)]).records[0] for engine in (one, two) for scope in ("", "s")
    ]
    assert len({record.key for record in records}) == 4
    assert {record.fingerprint for record in records} == {one.fingerprint("Some text.")}
    assert one.fingerprint("Some text!") != one.fingerprint("Some text.")
    assert one.content_key(Chunk("Some text.", scope="s")) == records[1].key
    assert one.namespace != two.namespace


def test_text_that_differs_but_tokenizes_alike_shares_its_cache(make_engine: MakeEngine) -> None:
    """Keys are over token ids: what the model sees decides."""
    engine = make_engine()
    engine.precompute([Chunk("One.", id="a")])
    assert engine.has(Chunk("One.", id="b")).kind == "plain"
    assert engine.has(Chunk("One. ", id="b")).kind == "none"
