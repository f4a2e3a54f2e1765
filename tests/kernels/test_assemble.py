"""assemble: every implementation against the float32 reference; rows around the place stay as they were."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusionrag_kernels import ArgumentError, assemble
from fusionrag_kernels.testing import relative_rms

TOLERANCE = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
GUARD = 3


def make_entry(
    *,
    layers: int,
    heads: int,
    rows: int,
    dim: int,
    value_dim: int,
    rotary_dim: int,
    stored: Any,
    scales: Any,
    seed: int,
) -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed)
    entry: dict[str, Any] = {
        "keys": torch.randn(layers, heads, rows, dim, generator=random),
        "values": torch.randn(layers, heads, rows, value_dim, generator=random),
        "inv_freq": torch.rand(layers, rotary_dim // 2, generator=random),
    }
    if stored == torch.int8:
        entry["keys"], entry["values"] = entry["keys"] * 40, entry["values"] * 40
        entry["key_scales"] = torch.rand(layers, heads, 1, dim, generator=random).to(scales)
        entry["value_scales"] = torch.rand(layers, heads, rows, 1, generator=random).to(scales)
    entry["keys"], entry["values"] = entry["keys"].to(stored), entry["values"].to(stored)
    return entry


def run(entry: dict[str, Any], offset: int, dtype: torch.dtype, impl: str) -> tuple[Tensor, Tensor]:
    """Into the middle of a NaN-filled cache, of which nothing else may change."""
    layers, heads, rows, dim = entry["keys"].shape
    placed = []
    for width in (dim, entry["values"].shape[3]):
        placed.append(torch.full((layers, heads, rows + 2 * GUARD, width), torch.nan, dtype=dtype))
    inside = [cache[:, :, GUARD : GUARD + rows] for cache in placed]
    stored = entry["keys"].clone()
    assemble(**{**entry, "out_keys": inside[0], "out_values": inside[1]}, offset=offset, impl=impl)
    for cache in placed:
        assert cache[:, :, :GUARD].isnan().all()
        assert cache[:, :, GUARD + rows :].isnan().all()
    assert torch.equal(stored, entry["keys"])
    return inside[0], inside[1]


shapes = st.fixed_dictionaries(
    {
        "layers": st.sampled_from([1, 3]),
        "heads": st.sampled_from([1, 2]),
        "rows": st.sampled_from([0, 1, 17, 65]),
        "dim": st.sampled_from([64, 80, 96]),
        "value_dim": st.sampled_from([64, 48]),
        "rotary_dim": st.sampled_from([32, 64]),
        "stored": st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
        "scales": st.sampled_from([torch.float32, torch.float16]),
        "seed": st.integers(0, 1000),
    }
)
offsets = st.sampled_from([0, 1, -57, 20_000])


def check(impl: str, shape: dict[str, Any], offset: int, dtype: torch.dtype) -> None:
    entry = make_entry(**shape)
    got, expected = run(entry, offset, dtype, impl), run(entry, offset, torch.float32, "reference")
    assert relative_rms(got[0], expected[0]) < TOLERANCE[dtype]
    assert relative_rms(got[1], expected[1]) < TOLERANCE[dtype]


@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(shape=shapes, offset=offsets, dtype=st.sampled_from(list(TOLERANCE)))
def test_cpu_equals_reference(shape: dict[str, Any], offset: int, dtype: torch.dtype) -> None:
    check("cpu", shape, offset, dtype)


@pytest.mark.usefixtures("triton")
@settings(max_examples=40, derandomize=True, deadline=None, database=None)
@given(shape=shapes, offset=offsets, dtype=st.sampled_from(list(TOLERANCE)))
def test_triton_equals_reference(shape: dict[str, Any], offset: int, dtype: torch.dtype) -> None:
    check("triton", shape, offset, dtype)


SHAPE = {"layers": 2, "heads": 2, "rows": 5, "dim": 64, "value_dim": 64, "rotary_dim": 64, "scales": torch.float32}


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_reference_turns_pairs_by_complex_numbers(impl: str) -> None:
    entry = make_entry(**SHAPE, stored=torch.float32, seed=1)
    keys, angle = entry["keys"].double(), entry["inv_freq"].double() * 1234
    turned = torch.complex(keys[..., :32], keys[..., 32:]) * torch.polar(torch.ones_like(angle), angle)[:, None, None]
    expected = torch.cat([turned.real, turned.imag], -1)
    assert relative_rms(run(entry, 1234, torch.float32, impl)[0], expected) < 1e-6


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_moving_twice_is_moving_once(impl: str) -> None:
    entry = make_entry(**SHAPE, stored=torch.float32, seed=2)
    there = run(entry, 700, torch.float32, impl)[0].clone()
    back = run({**entry, "keys": there}, -700, torch.float32, impl)[0]
    assert relative_rms(back, entry["keys"]) < 1e-6
    assert relative_rms(there, entry["keys"]) > 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_scales": None}, "take scales if and only if"),
        ({"value_scales": torch.ones(2, 2, 5, 64)}, "scales of values are"),
        ({"inv_freq": torch.ones(2, 33)}, "inv_freq"),
        ({"values": torch.zeros(2, 2, 4, 64, dtype=torch.int8), "value_scales": torch.ones(2, 2, 4, 1)}, "values and"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    entry = {**make_entry(**SHAPE, stored=torch.int8, seed=3), **change}
    with pytest.raises(ArgumentError, match=message):
        assemble(**entry, out_keys=torch.zeros(2, 2, 5, 64), out_values=torch.zeros(2, 2, 5, 64), offset=1)
