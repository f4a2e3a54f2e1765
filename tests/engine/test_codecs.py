"""Codecs: what they store, that rows come back near enough, and that no exact law depends on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusionrag_engine import Engine, Request
from fusionrag_engine.store import DiskTier, Entry
from fusionrag_engine.store.codecs import chunk_bytes, decode, encode
from tests.engine.support import assert_differs, assert_same, cache_file, documents, full, relative_rms, ring
from tests.tiny_models import ARCHITECTURES

MakeEngine = Callable[..., Engine]
COUNT = 4
ERROR = {"int8": 0.01, "int4": 0.12}
"""Relative RMS of decoded random rows."""


def _entry(num_tokens: int = 37, key_dim: int = 24, value_dim: int = 40, dtype: torch.dtype = torch.float32) -> Entry:
    generator = torch.Generator().manual_seed(num_tokens)
    keys = torch.randn(3, 2, num_tokens, key_dim, generator=generator)
    keys[..., 5] *= 30  # keys have channels that are much larger than others
    values = torch.randn(3, 2, num_tokens, value_dim, generator=generator)
    values[:, :, 3:4] *= 30  # values have such tokens
    return Entry("ab" * 32, tuple(range(num_tokens)), 11, keys.to(dtype), values.to(dtype))


@pytest.mark.parametrize("codec", ERROR)
@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 100])
def test_decoded_rows_are_near_and_a_large_channel_or_token_drowns_no_other(codec: str, num_tokens: int) -> None:
    entry = _entry(num_tokens)
    keys, values = decode(encode(entry, codec))
    assert keys.dtype == values.dtype == torch.float32
    small_keys = [dim for dim in range(24) if dim != 5]
    small_values = [token for token in range(num_tokens) if token != 3]
    assert relative_rms(keys[..., small_keys], entry.keys[..., small_keys]) < ERROR[codec]
    assert relative_rms(keys[..., 5], entry.keys[..., 5]) < ERROR[codec]
    if small_values:
        assert relative_rms(values[:, :, small_values], entry.values[:, :, small_values]) < ERROR[codec]


def test_the_layout_of_int8() -> None:
    entry = encode(_entry(), "int8")
    assert entry.keys.dtype == entry.values.dtype == torch.int8
    assert entry.key_scales is not None
    assert entry.value_scales is not None
    assert entry.key_scales.shape == (3, 2, 1, 24)
    assert entry.value_scales.shape == (3, 2, 37, 1)
    assert entry.key_scales.dtype == entry.value_scales.dtype == torch.float32
    assert int(entry.keys.min()) >= -127


@pytest.mark.parametrize("codec", ERROR)
def test_rows_of_zeros_stay_zeros(codec: str) -> None:
    entry = _entry()
    entry = replace(entry, keys=torch.zeros_like(entry.keys), values=torch.zeros_like(entry.values))
    for rows in decode(encode(entry, codec)):
        assert not rows.any()


@pytest.mark.parametrize("codec", ["none", *ERROR])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_gives_back_what_was_stored(tmp_path: Path, codec: str, dtype: torch.dtype) -> None:
    entry, tier = encode(_entry(dtype=dtype), codec), DiskTier(tmp_path)
    size = tier.write(entry)
    found = tier.read(entry.key)
    assert found is not None
    assert found.token_ids == entry.token_ids
    assert found.tensors().keys() == entry.tensors().keys()
    for name, tensor in entry.tensors().items():
        assert torch.equal(found.tensors()[name], tensor)
    shape = {"heads": 6, "key_dim": 24, "value_dim": 40, "itemsize": dtype.itemsize}
    assert chunk_bytes(codec, 37, **shape) == entry.num_bytes < size < entry.num_bytes + 2000


def test_int8_quarters_the_bytes_of_float32_and_int4_nearly_halves_them_again() -> None:
    sizes = {codec: encode(_entry(500, 64, 64), codec).num_bytes for codec in ("none", "int8", "int4")}
    assert sizes["int8"] < 0.27 * sizes["none"]
    assert sizes["int4"] < 0.6 * sizes["int8"]


def _request(ratio: float) -> Request:
    return Request("Who signs?", documents(COUNT), recompute_ratio=ratio)


@pytest.mark.parametrize("codec", ERROR)
@pytest.mark.parametrize("selector", ["query_guided", "random"])
def test_full_recomputation_is_full_attention_under_every_codec(
    make_engine: MakeEngine, codec: str, selector: str
) -> None:
    """The first chunk's rows went through the codec: it is no exact prefix, and ratio 1 computes it too."""
    engine = make_engine(codec=codec, selector=selector)
    engine.precompute(documents(COUNT), neighbours=ring(COUNT))
    ours = engine.prefill(_request(1.0))
    assert_same(ours.logits, full(engine, _request(1.0)).logits)
    assert ours.stats.chunk_status == ["plain", "enriched", "enriched", "enriched"]
    assert_differs(engine.prefill(_request(0.0)).logits, full(engine, _request(0.0)).logits, 1e-3)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_moved_keys_of_int8_are_near_those_of_none(make_engine: MakeEngine, architecture: str) -> None:
    logits = []
    for codec in ("none", "int8"):
        engine = make_engine(architecture, codec=codec)
        engine.precompute(documents(COUNT), neighbours=ring(COUNT))
        logits.append(engine.prefill(_request(0.0)).logits)
    difference = relative_rms(logits[1], logits[0])
    assert 1e-5 < difference < 0.2


def test_a_cache_under_another_codec_is_a_miss(tmp_path: Path, make_engine: MakeEngine) -> None:
    make_engine(cache_dir=tmp_path).precompute(documents(COUNT), neighbours=ring(COUNT))
    for codec in ERROR:
        engine = make_engine(cache_dir=tmp_path, codec=codec)
        assert [engine.has(chunk).kind for chunk in documents(COUNT)] == ["none"] * COUNT


@pytest.mark.parametrize("where", ["keys", "value_scales"])
def test_a_flipped_bit_in_rows_or_scales_is_a_miss(tmp_path: Path, make_engine: MakeEngine, where: str) -> None:
    engine = make_engine(cache_dir=tmp_path, codec="int8", host_bytes=0)
    record = engine.precompute(documents(COUNT), neighbours=ring(COUNT)).records[2]
    path = cache_file(engine, record.enriched_key)
    data = bytearray(path.read_bytes())
    header = int.from_bytes(data[:8], "little")
    place = __import__("json").loads(data[8 : 8 + header])[where]["data_offsets"][0]
    data[8 + header + place] ^= 4
    path.write_bytes(bytes(data))
    assert engine.prefill(_request(0.25)).stats.chunk_status[2] == "plain"
