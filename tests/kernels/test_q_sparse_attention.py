"""q_sparse_attention: the fast path against the reference, the reference against a loop, controls that must differ."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusionrag_kernels import ArgumentError, ImplementationError, KernelError, q_sparse_attention
from fusionrag_kernels.q_sparse_attention import cpu
from fusionrag_kernels.testing import Case, make_case, relative_rms

FIXED = settings(max_examples=150, derandomize=True, deadline=None, database=None)
TOLERANCE = {torch.float32: 3e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}

specs = st.fixed_dictionaries(
    {
        "num_keys": st.sampled_from([1, 2, 7, 33, 64, 129, 257, 300]),
        "num_kv_heads": st.sampled_from([1, 2, 3]),
        "group": st.sampled_from([1, 2, 3, 7]),
        "head_dim": st.sampled_from([16, 40, 64, 80, 96, 128, 256]),
        "rows": st.sampled_from(["scattered", "last", "first", "any"]),
        "keys": st.sampled_from(["canvas", "canvas_with_holes", "gapped", "any"]),
        "layout": st.sampled_from(["by_head", "by_row", "interleaved"]),
        "window": st.sampled_from([None, None, 1, 2, 17, 100]),
        "softcap": st.sampled_from([None, None, 1.5, 30.0]),
        "seed": st.integers(0, 1000),
    }
)


@pytest.fixture(params=[1, 2, 4])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def loop(case: Case) -> Tensor:
    """The definition, one row and head at a time in Python floats."""
    group = case.q.shape[1] // case.k.shape[1]
    out = torch.zeros(*case.q.shape[:2], case.v.shape[2], dtype=torch.float64)
    positions = range(case.k.shape[0]) if case.kv_positions is None else case.kv_positions.tolist()
    for i, q_position in enumerate(case.q_positions.tolist()):
        seen = [
            j
            for j, position in enumerate(positions)
            if position <= q_position
            and (case.window is None or q_position - position < case.window)
            and (case.kv_valid is None or bool(case.kv_valid[j]))
        ]
        for h in range(case.q.shape[1]):
            scores = [case.scale * float(case.q[i, h].double() @ case.k[j, h // group].double()) for j in seen]
            if case.softcap is not None:
                scores = [case.softcap * math.tanh(score / case.softcap) for score in scores]
            weights = [math.exp(score - max(scores)) for score in scores]
            for j, weight in zip(seen, weights, strict=True):
                out[i, h] += weight / sum(weights) * case.v[j, h // group].double()
    return out


@pytest.mark.parametrize("keys", ["canvas", "canvas_with_holes", "gapped", "any"])
@pytest.mark.parametrize("rules", [{}, {"window": 3}, {"softcap": 1.5}, {"window": 4, "softcap": 2.0}])
def test_reference_is_the_definition(keys: Any, rules: dict[str, Any]) -> None:
    case = make_case(
        num_rows=6, num_keys=11, num_kv_heads=2, group=2, head_dim=8, value_dim=5, rows="any", keys=keys, **rules
    )
    assert relative_rms(case.attend("reference"), loop(case)) < 1e-6


@FIXED
@given(spec=specs, num_rows=st.sampled_from([0, 1, 2, 5, 31, 65, 130]))
def test_fast_path_equals_reference(spec: dict[str, Any], num_rows: int) -> None:
    if spec["rows"] != "any":
        num_rows = min(num_rows, spec["num_keys"])
    case = make_case(num_rows=num_rows, **spec)
    got = case.attend()
    assert got.shape == case.q.shape
    assert got.is_contiguous()
    assert relative_rms(got, case.attend("reference")) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("rows", ["scattered", "last", "any"])
@pytest.mark.parametrize("rules", [{}, {"window": 20}, {"window": 150}, {"window": 900}, {"softcap": 2.0}])
def test_many_blocks_of_rows(rows: Any, rules: dict[str, Any]) -> None:
    case = make_case(num_rows=601, num_keys=1501, num_kv_heads=1, group=2, head_dim=16, rows=rows, **rules)
    assert relative_rms(case.attend(), case.attend("reference")) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(("num_rows", "num_keys"), [(9, 3001), (70, 6007)])
@pytest.mark.parametrize("window", [None, 900, 3000])
def test_rows_far_apart(num_rows: int, num_keys: int, window: int | None) -> None:
    case = make_case(num_rows=num_rows, num_keys=num_keys, num_kv_heads=1, group=2, head_dim=16, window=window)
    assert relative_rms(case.attend(), case.attend("reference")) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("rows", ["scattered", "last", "any"])
@pytest.mark.parametrize("num_rows", [1, 4, 70])
@pytest.mark.parametrize("rules", [{}, {"window": 100}, {"softcap": 2.0}])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype, num_rows: int, rows: Any, rules: dict[str, Any]) -> None:
    case = make_case(num_rows=num_rows, num_keys=613, rows=rows, dtype=dtype, **rules)
    got, expected = case.attend(), case.in_float32().attend("reference")
    assert got.dtype == dtype
    assert relative_rms(got, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("num_keys", [100, 2048, 2051])
def test_few_rows_split_the_keys(num_threads: int, num_rows: int, num_keys: int) -> None:
    case = make_case(num_rows=num_rows, num_keys=num_keys, rows="last")
    assert relative_rms(case.attend(), case.attend("reference")) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("position", [-1, 0, 1, 36, 37, 50])
@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_one_row(position: int, window: int | None) -> None:
    case = make_case(num_rows=1, num_keys=37, window=window, rows="last").changed(q_positions=torch.tensor([position]))
    case = case.changed(k=torch.randn(37, 3, 64), v=torch.randn(37, 3, 64))
    got = case.attend()
    assert relative_rms(got, case.attend("reference")) < TOLERANCE[torch.float32]
    sees_no_key = position < 0 or (window is not None and position - window >= 36)
    assert bool((got == 0).all()) == sees_no_key


def test_all_rows_is_causal_attention() -> None:
    case = make_case(num_rows=333, num_keys=333, rows="first")
    q, k, v = (x.transpose(0, 1)[None] for x in (case.q, case.k, case.v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert relative_rms(case.attend(), expected[0].transpose(0, 1)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_a_row_that_sees_no_key_is_zero(impl: str) -> None:
    case = make_case(num_rows=3, num_keys=20, keys="gapped", window=2)
    first = int(case.kv_positions.min())  # type: ignore[union-attr]
    case = case.changed(q_positions=torch.tensor([first - 1, first, 1000]))
    case = case.changed(k=torch.randn(20, 3, 64), v=torch.randn(20, 3, 64))
    assert (case.attend(impl).abs().amax((1, 2)) > 0).tolist() == [False, True, False]


@pytest.mark.parametrize("num_keys", [0, 9])
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_no_rows_or_no_keys(impl: str, num_keys: int) -> None:
    no_rows = torch.empty(0, 4, 16), torch.randn(num_keys, 2, 16), torch.randn(num_keys, 2, 24)
    out = q_sparse_attention(*no_rows, torch.empty(0, dtype=torch.int64), scale=1.0, impl=impl)
    assert out.shape == (0, 4, 24)
    no_keys = torch.randn(2, 4, 16), torch.empty(0, 2, 16), torch.empty(0, 2, 16)
    out = q_sparse_attention(*no_keys, torch.tensor([0, 5]), scale=1.0, impl=impl)
    assert torch.equal(out, torch.zeros(2, 4, 16))


def test_order_of_rows_and_keys_does_not_matter() -> None:
    case = make_case(num_rows=90, num_keys=210, keys="any", window=150)
    expected = case.attend()
    rows, keys = torch.randperm(90), torch.randperm(210)
    assert case.kv_positions is not None
    assert case.kv_valid is not None
    shuffled = case.changed(
        q=case.q[rows],
        q_positions=case.q_positions[rows],
        k=case.k[keys],
        v=case.v[keys],
        kv_positions=case.kv_positions[keys],
        kv_valid=case.kv_valid[keys],
    )
    assert relative_rms(shuffled.attend(), expected[rows]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    "change",
    [{"window": None}, {"window": 41}, {"softcap": None}, {"kv_valid": None}, {"scale": 0.1}, {"kv_positions": None}],
)
def test_control_every_argument_changes_the_result(change: dict[str, Any]) -> None:
    case = make_case(num_rows=60, num_keys=200, keys="any", window=40, softcap=2.0)
    finite = case.changed(k=torch.randn(200, 3, 64), v=torch.randn(200, 3, 64))
    assert relative_rms(finite.changed(**change).attend(), finite.attend()) > 0.01
    assert relative_rms(finite.attend(), finite.attend("reference")) < TOLERANCE[torch.float32]


def test_control_a_key_too_many_changes_the_result() -> None:
    case = make_case(num_rows=1, num_keys=50, rows="last").changed(k=torch.randn(50, 3, 64), v=torch.randn(50, 3, 64))
    earlier = case.changed(q_positions=case.q_positions - 1)
    assert relative_rms(earlier.attend(), case.attend()) > 1e-3


class LargestResult(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the size of the largest tensor that any operation allocates."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in inputs:
                self.num_elements = max(self.num_elements, x.numel())
        return result


@pytest.mark.parametrize("num_rows", [1, 12, 400])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_canvas_nor_full_mask_is_materialised(num_rows: int, dtype: torch.dtype) -> None:
    case = make_case(num_rows=num_rows, num_keys=4000, rows="last", dtype=dtype, head_dim=32)
    with LargestResult() as largest:
        case.attend()
    assert 0 < largest.num_elements < min(case.k.numel(), max(num_rows * 4000, case.q.numel() + 1))


def test_masks_stay_small_where_rows_are_far_apart() -> None:
    case = make_case(num_rows=64, num_keys=8000, num_kv_heads=1, group=2, head_dim=16)
    with LargestResult() as largest:
        case.attend()
    assert 0 < largest.num_elements <= 2 * 64 * 1200
    assert relative_rms(case.attend(), case.attend("reference")) < TOLERANCE[torch.float32]


def test_inputs_are_not_modified() -> None:
    case = make_case(num_rows=40, num_keys=90, keys="any", window=30)
    before = [x.clone() for x in (case.q, case.k, case.v)]
    case.attend()
    for was, now in zip(before, (case.q, case.k, case.v), strict=True):
        assert torch.equal(was.nan_to_num(), now.nan_to_num())


def test_inference_tensors_and_parameters_are_accepted() -> None:
    case = make_case(num_rows=70, num_keys=90)
    with torch.inference_mode():
        inside = case.changed(k=case.k.clone(), v=case.v.clone()).attend()
    outside = case.changed(q=case.q.clone().requires_grad_()).attend()
    assert torch.equal(inside, outside)
    assert not outside.requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.randn(4, 8, 64)}, "Hq=8 and Hkv=3"),
        ({"q": torch.randn(4, 9, 32)}, "head_dim"),
        ({name: torch.randn(size, 9, 64).double() for name, size in (("q", 4), ("k", 20), ("v", 20))}, "float64"),
        ({"q": torch.randn(4, 9 * 64)}, r"\[Nq, Hq, D\]"),
        ({"k": torch.randn(20, 3, 64).half()}, "dtype"),
        ({"v": torch.randn(19, 3, 64)}, "v is"),
        ({"v": torch.randn(20, 3, 64).bfloat16()}, "v shares"),
        ({"q_positions": torch.arange(5)}, "q_positions"),
        ({"q_positions": torch.arange(4, dtype=torch.int32)}, "q_positions"),
        ({"kv_positions": torch.arange(19)}, "kv_positions"),
        ({"kv_valid": torch.ones(20)}, "kv_valid"),
        ({"window": 0}, "window"),
        ({"softcap": 0.0}, "softcap"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    case = make_case(num_rows=4, num_keys=20)
    with pytest.raises(ArgumentError, match=message):
        case.changed(**change).attend()


def test_unknown_implementations_are_named() -> None:
    with pytest.raises(ImplementationError, match=r"not known.*'auto', 'triton', 'cpu', 'reference'") as caught:
        make_case(num_rows=1, num_keys=2).attend("cuda")
    assert isinstance(caught.value, KernelError)
    assert isinstance(caught.value, RuntimeError)


def test_without_the_flash_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "can_flash", lambda *_: False)
    case = make_case(num_rows=150, num_keys=400, window=90)
    assert relative_rms(case.attend(), case.attend("reference")) < TOLERANCE[torch.float32]
