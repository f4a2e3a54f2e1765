"""critical_scores: the fast path against the reference, the reference against a loop, controls that must differ."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusionrag_kernels import ArgumentError, ImplementationError, blocks, critical_scores
from fusionrag_kernels.critical_scores import NORMS
from fusionrag_kernels.testing import Case, make_case, relative_rms

TOLERANCE = 3e-6


def loop(case: Case, norm: str = "sum") -> Tensor:
    """The definition, one row and head at a time in Python floats."""
    group = case.q.shape[1] // case.k.shape[1]
    visible = case.visible().tolist()
    total = torch.zeros(case.k.shape[0], dtype=torch.float64)
    for i, h in ((i, h) for i in range(case.q.shape[0]) for h in range(case.q.shape[1])):
        scores = {
            j: case.scale * float(case.q[i, h].double() @ case.k[j, h // group].double())
            for j in range(case.k.shape[0])
            if visible[i][j]
        }
        if case.softcap is not None:
            scores = {j: case.softcap * math.tanh(score / case.softcap) for j, score in scores.items()}
        normaliser = sum(math.exp(score) for score in scores.values())
        for j, score in scores.items():
            weight = math.exp(score) / (1 if norm == "unnormalised" else normaliser)
            total[j] += weight**2 if norm == "l2" else weight
    return total.sqrt() if norm == "l2" else total.log() if norm == "unnormalised" else total


def assert_close(got: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    seen = expected.isfinite()
    assert torch.equal(got[~seen], expected[~seen].to(got.dtype))
    assert relative_rms(got[seen], expected[seen]) < tolerance


@pytest.mark.parametrize("keys", ["canvas", "canvas_with_holes", "gapped", "any"])
@pytest.mark.parametrize("rules", [{}, {"window": 3}, {"window": 4, "softcap": 2.0}])
@pytest.mark.parametrize("norm", NORMS)
def test_reference_is_the_definition(keys: Any, rules: dict[str, Any], norm: str) -> None:
    case = make_case(num_rows=6, num_keys=11, num_kv_heads=2, group=2, head_dim=8, rows="any", keys=keys, **rules)
    assert_close(case.score("reference", norm), loop(case, norm), 1e-6)


@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(
    num_rows=st.sampled_from([0, 1, 2, 5, 31, 65, 130]),
    num_keys=st.sampled_from([1, 2, 7, 33, 64, 129, 300]),
    num_kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 3, 7]),
    head_dim=st.sampled_from([16, 64, 80, 96, 256]),
    rows=st.sampled_from(["scattered", "last", "first", "any"]),
    keys=st.sampled_from(["canvas", "canvas_with_holes", "gapped", "any"]),
    layout=st.sampled_from(["by_head", "by_row", "interleaved"]),
    window=st.sampled_from([None, None, 1, 2, 17, 100]),
    softcap=st.sampled_from([None, None, 1.5, 30.0]),
    seed=st.integers(0, 1000),
)
def test_fast_path_equals_reference(num_rows: int, num_keys: int, rows: Any, **spec: Any) -> None:
    num_rows = num_rows if rows == "any" else min(num_rows, num_keys)
    case = make_case(num_rows=num_rows, num_keys=num_keys, rows=rows, **spec)
    got = case.score()
    assert got.shape == (num_keys,)
    assert got.dtype == torch.float32
    assert relative_rms(got, case.score("reference")) < TOLERANCE
    visible = case.visible()
    assert not got[~visible.any(0)].any()
    assert float(got.sum()) == pytest.approx(case.q.shape[1] * int(visible.any(1).sum()), rel=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 3e-6), (torch.bfloat16, 3e-6)])
def test_half_precision_is_scored_in_float32(dtype: torch.dtype, tolerance: float) -> None:
    case = make_case(num_rows=20, num_keys=613, rows="last", dtype=dtype)
    assert relative_rms(case.score(), case.in_float32().score("reference")) < tolerance


def test_memory_is_bounded_by_a_block_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(num_rows=600, num_keys=1000, num_kv_heads=2, group=2, head_dim=16, rows="last")
    sizes: list[int] = []
    empty = torch.empty

    def recording_empty(*size: int, **more: Any) -> Tensor:
        sizes.append(math.prod(size))
        return empty(*size, **more)

    monkeypatch.setattr(torch, "empty", recording_empty)
    monkeypatch.setattr(blocks, "MAX_SCORES", 50_000)
    got = case.score()
    assert 0 < max(sizes) <= 50_000
    assert relative_rms(got, case.score("reference")) < TOLERANCE


@pytest.mark.parametrize("change", [{"window": None}, {"softcap": None}, {"kv_valid": None}, {"kv_positions": None}])
def test_control_every_argument_changes_the_result(change: dict[str, Any]) -> None:
    case = make_case(num_rows=60, num_keys=200, keys="any", window=40, softcap=2.0).changed(k=torch.randn(200, 3, 64))
    assert relative_rms(case.changed(**change).score(), case.score()) > 0.01


def test_scores_of_rows_add_up() -> None:
    case = make_case(num_rows=130, num_keys=300, rows="last")
    halves = [
        case.changed(q=case.q[part], q_positions=case.q_positions[part]) for part in (slice(0, 61), slice(61, 130))
    ]
    assert relative_rms(halves[0].score() + halves[1].score(), case.score()) < TOLERANCE


def test_errors_are_those_of_the_package() -> None:
    case = make_case(num_rows=4, num_keys=20)
    with pytest.raises(ArgumentError, match="Hq=8 and Hkv=3"):
        case.changed(q=torch.randn(4, 8, 64)).score()
    with pytest.raises(ArgumentError, match="q_positions"):
        critical_scores(case.q, case.k, case.q_positions[:3], scale=1.0)
    with pytest.raises(ArgumentError, match="norm is one of sum, l2, unnormalised, got 'l1'"):
        case.score(norm="l1")
    with pytest.raises(ImplementationError, match="not known"):
        case.score("cuda")


specs = st.fixed_dictionaries(
    {
        "num_keys": st.sampled_from([1, 2, 33, 64, 129, 300]),
        "num_kv_heads": st.sampled_from([1, 2]),
        "group": st.sampled_from([1, 3]),
        "head_dim": st.sampled_from([16, 80, 96]),
        "rows": st.sampled_from(["scattered", "last", "first", "any"]),
        "keys": st.sampled_from(["canvas", "canvas_with_holes", "gapped", "any"]),
        "layout": st.sampled_from(["by_head", "by_row", "interleaved"]),
        "window": st.sampled_from([None, None, 1, 17, 100]),
        "softcap": st.sampled_from([None, 1.5, 30.0]),
        "seed": st.integers(0, 1000),
    }
)


def check_norm(impl: str, norm: str, num_rows: int, spec: dict[str, Any]) -> None:
    num_rows = num_rows if spec["rows"] == "any" else min(num_rows, spec["num_keys"])
    case = make_case(num_rows=num_rows, **spec)
    assert_close(case.score(impl, norm), case.score("reference", norm), 1e-5)


@settings(max_examples=40, derandomize=True, deadline=None, database=None)
@given(norm=st.sampled_from(["l2", "unnormalised"]), num_rows=st.sampled_from([0, 1, 5, 65, 130]), spec=specs)
def test_other_norms(norm: str, num_rows: int, spec: dict[str, Any]) -> None:
    check_norm("cpu", norm, num_rows, spec)


@pytest.mark.usefixtures("triton")
@settings(max_examples=25, derandomize=True, deadline=None, database=None)
@given(norm=st.sampled_from(NORMS), num_rows=st.sampled_from([0, 1, 5, 40]), spec=specs)
def test_triton_equals_reference(norm: str, num_rows: int, spec: dict[str, Any]) -> None:
    check_norm("triton", norm, num_rows, spec)


@pytest.mark.usefixtures("triton")
def test_triton_gives_the_same_bits_again() -> None:
    case = make_case(num_rows=50, num_keys=300, rows="last")
    assert torch.equal(case.score("triton"), case.score("triton"))


@pytest.mark.parametrize("norm", NORMS)
def test_control_norms_differ(norm: str) -> None:
    case = make_case(num_rows=20, num_keys=100, rows="last")
    others = [case.score(norm=other) for other in NORMS if other != norm]
    assert all(relative_rms(other, case.score(norm=norm)) > 0.01 for other in others)
