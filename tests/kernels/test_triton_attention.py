"""q_sparse_attention in Triton, interpreted: against the float32 reference; what may not be read is NaN."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionrag_kernels import tuning
from fusionrag_kernels.testing import make_case, relative_rms

pytestmark = pytest.mark.usefixtures("triton", "poisoned_memory")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}

specs = st.fixed_dictionaries(
    {
        "num_keys": st.sampled_from([1, 2, 33, 64, 129, 300]),
        "num_kv_heads": st.sampled_from([1, 2]),
        "group": st.sampled_from([1, 3, 7]),
        "head_dim": st.sampled_from([16, 64, 80, 96, 256]),
        "value_dim": st.sampled_from([None, 48]),
        "rows": st.sampled_from(["scattered", "last", "first", "any"]),
        "keys": st.sampled_from(["canvas", "canvas", "canvas_with_holes", "gapped", "any"]),
        "layout": st.sampled_from(["by_head", "by_row", "interleaved"]),
        "window": st.sampled_from([None, None, 1, 2, 17, 100]),
        "softcap": st.sampled_from([None, None, 1.5, 30.0]),
        "seed": st.integers(0, 1000),
    }
)


@settings(max_examples=40, derandomize=True, deadline=None, database=None)
@given(spec=specs, num_rows=st.sampled_from([0, 1, 2, 31, 65]), dtype=st.sampled_from(list(TOLERANCE)))
def test_equals_reference(spec: dict[str, Any], num_rows: int, dtype: torch.dtype) -> None:
    if spec["rows"] != "any":
        num_rows = min(num_rows, spec["num_keys"])
    case = make_case(num_rows=num_rows, dtype=dtype, **spec)
    got = case.attend("triton")
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert relative_rms(got, case.in_float32().attend("reference")) < TOLERANCE[dtype]


@pytest.mark.parametrize("splits", [1, 2, 9])
@pytest.mark.parametrize("rules", [{}, {"window": 70}, {"window": 300, "softcap": 2.0}, {"keys": "any"}])
def test_split_keys(monkeypatch: pytest.MonkeyPatch, splits: int, rules: dict[str, Any]) -> None:
    from fusionrag_kernels.q_sparse_attention import kernel

    monkeypatch.setattr(kernel, "num_splits", lambda *_: splits)
    for num_rows in (1, 40):
        case = make_case(num_rows=num_rows, num_keys=601, num_kv_heads=1, head_dim=32, **rules)
        assert relative_rms(case.attend("triton"), case.attend("reference")) < 1e-5


def test_few_rows_over_many_keys_are_split() -> None:
    assert tuning.num_splits(num_programs=8, num_tiles=512, num_processors=132) == 32
    assert tuning.num_splits(num_programs=8, num_tiles=7, num_processors=132) == 1
    assert tuning.num_splits(num_programs=200, num_tiles=512, num_processors=132) == 1


@pytest.mark.parametrize("position", [-1, 0, 1, 36, 37, 50])
@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_one_row(position: int, window: int | None) -> None:
    case = make_case(num_rows=1, num_keys=37, window=window, rows="last").changed(q_positions=torch.tensor([position]))
    case = case.changed(k=torch.randn(37, 3, 64), v=torch.randn(37, 3, 64))
    assert relative_rms(case.attend("triton"), case.attend("reference")) < 1e-5


@pytest.mark.parametrize("window", [None, 50])
def test_all_rows(window: int | None) -> None:
    case = make_case(num_rows=301, num_keys=301, num_kv_heads=1, head_dim=32, rows="first", window=window)
    assert relative_rms(case.attend("triton"), case.attend("reference")) < 1e-5


@pytest.mark.parametrize("window", [None, 64])
def test_key_tiles_nobody_sees_are_not_visited(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """Rows in two far groups, one group a tile: the key tiles that a tile's rows see are counted."""
    from fusionrag_kernels.q_sparse_attention import kernel

    visited = []
    attend_tile = kernel._attend_tile
    monkeypatch.setattr(kernel, "_attend_tile", lambda *args: (visited.append(1), attend_tile(*args))[1])
    monkeypatch.setattr(kernel, "num_splits", lambda *_: 1)
    case = make_case(num_rows=64, num_keys=2048, num_kv_heads=1, group=1, head_dim=16, rows="first", window=window)
    case.attend("triton")
    assert len(visited) == 2  # 64 rows at positions 0-63, keys in tiles of 32


@pytest.mark.parametrize("change", [{"window": None}, {"softcap": None}, {"kv_valid": None}, {"kv_positions": None}])
def test_control_every_argument_changes_the_result(change: dict[str, Any]) -> None:
    case = make_case(num_rows=20, num_keys=200, keys="any", window=40, softcap=2.0)
    finite = case.changed(k=torch.randn(200, 3, 64), v=torch.randn(200, 3, 64))
    assert relative_rms(finite.changed(**change).attend("triton"), finite.attend("triton")) > 0.01
