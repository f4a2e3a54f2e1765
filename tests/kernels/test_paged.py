"""paged_q_sparse_attention against assemble-then-attend on dense caches that were built beside the pages."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionrag_kernels import ArgumentError
from fusionrag_kernels.paged_q_sparse_attention.pages import is_stale
from fusionrag_kernels.testing import relative_rms
from fusionrag_kernels.testing_pages import Batch, make_batch

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
IMPLEMENTATIONS = ["reference", "cpu", "triton"]
pytestmark = pytest.mark.usefixtures("poisoned_memory")

specs = st.fixed_dictionaries(
    {
        "num_sequences": st.sampled_from([1, 2, 3, 5]),
        "num_chunks": st.sampled_from([1, 4]),
        "page_size": st.sampled_from([32, 64]),
        "num_kv_heads": st.sampled_from([1, 2]),
        "group": st.sampled_from([1, 3]),
        "head_dim": st.sampled_from([16, 64, 80, 96]),
        "value_dim": st.sampled_from([None, 48]),
        "ratio": st.sampled_from([0, 0.05, 0.3, 1]),
        "num_asking": st.sampled_from([1, 3, 40]),
        "window": st.sampled_from([None, None, 1, 20, 90]),
        "softcap": st.sampled_from([None, 2.0]),
        "seed": st.integers(0, 1000),
    }
)


@pytest.fixture(params=IMPLEMENTATIONS)
def impl(request: pytest.FixtureRequest) -> str:
    if request.param == "triton":
        request.getfixturevalue("triton")
    return str(request.param)


def check(batch: Batch, impl: str) -> None:
    got, expected = batch.attend(impl), batch.assemble_then_attend()
    assert got.dtype == batch.q.dtype
    assert relative_rms(got, expected) < TOLERANCE[batch.q.dtype]


@settings(max_examples=25, derandomize=True, deadline=None, database=None)
@given(spec=specs, dtype=st.sampled_from(list(TOLERANCE)))
@pytest.mark.parametrize("fast", ["reference", "cpu"])
def test_equals_assemble_then_attend(fast: str, spec: dict[str, Any], dtype: torch.dtype) -> None:
    check(make_batch(dtype=dtype, **spec), fast)


@pytest.mark.usefixtures("triton")
@settings(max_examples=15, derandomize=True, deadline=None, database=None)
@given(spec=specs, dtype=st.sampled_from(list(TOLERANCE)))
def test_triton_equals_assemble_then_attend(spec: dict[str, Any], dtype: torch.dtype) -> None:
    check(make_batch(dtype=dtype, **spec), "triton")


@pytest.mark.parametrize("rotary_dim", [16, 32])
def test_partial_rotary(impl: str, rotary_dim: int) -> None:
    check(make_batch(rotary_dim=rotary_dim, head_dim=64), impl)


@pytest.mark.parametrize("splits", [1, 3, 9])
def test_split_keys(triton: None, monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
    from fusionrag_kernels.paged_q_sparse_attention import kernel

    monkeypatch.setattr(kernel, "num_splits", lambda *_: splits)
    check(make_batch(num_chunks=6, num_asking=1, ratio=0, head_dim=32), "triton")
    check(make_batch(num_chunks=3, window=40, head_dim=32), "triton")


def test_all_sequences_empty(impl: str) -> None:
    batch = make_batch(num_sequences=3, head_dim=16)
    nothing = torch.zeros(4, dtype=torch.int64)
    none = batch.changed(q=batch.q[:0], q_positions=batch.q_positions[:0], row_starts=nothing)
    assert none.attend(impl).shape == (0, 6, 16)


def test_rows_without_keys_are_zero(impl: str) -> None:
    batch = make_batch(num_sequences=3, head_dim=16)
    empty = batch.changed(table=replace(batch.table, num_entries=torch.zeros(3, dtype=torch.int32)))
    assert not empty.attend(impl).any()


def test_control_overrides_turns_and_tables_matter(impl: str) -> None:
    batch = make_batch(head_dim=32, num_chunks=4)
    got = batch.attend(impl)
    table = batch.table
    assert table.stale is not None
    for changed in (
        replace(table, stale=None),
        replace(table, turn=table.turn + (table.turn != 0).int()),
        replace(table, first=(table.first + 1).minimum(table.beyond)),
        replace(table, num_entries=(table.num_entries - 1).clamp(min=0)),
    ):
        assert relative_rms(batch.changed(table=changed).attend(impl), got) > 1e-3
    unturned = batch.changed(rules={**batch.rules, "inv_freq": None})
    assert relative_rms(unturned.attend(impl), got) > 1e-3


def test_pages_are_only_read(impl: str) -> None:
    batch = make_batch(head_dim=16)
    before = batch.k_pages.clone(), batch.v_pages.clone()
    batch.attend(impl)
    assert torch.equal(before[0].nan_to_num(7), batch.k_pages.nan_to_num(7))
    assert torch.equal(before[1].nan_to_num(7), batch.v_pages.nan_to_num(7))


def test_a_sequence_does_not_depend_on_its_company(impl: str) -> None:
    batch = make_batch(num_sequences=4, head_dim=32)
    table, last = batch.table, slice(int(batch.row_starts[3]), int(batch.row_starts[4]))
    assert table.stale is not None
    own = {name: getattr(table, name)[3:] for name in ("page", "start", "first", "beyond", "turn", "num_entries")}
    alone = batch.changed(
        q=batch.q[last],
        q_positions=batch.q_positions[last],
        row_starts=batch.row_starts[3:] - batch.row_starts[3],
        table=replace(table, **own, stale=table.stale[3:]),
    )
    assert relative_rms(alone.attend(impl), batch.attend(impl)[last]) < 1e-5


def test_stale_bits_are_the_recomputed_rows() -> None:
    batch = make_batch(num_sequences=1, page_size=64, ratio=0.4)
    table = batch.table
    marked = [
        int(table.start[0, entry]) + int(row)
        for entry in range(int(table.num_entries[0]))
        for row in is_stale(table, 0, entry, 64).nonzero()
        if int(table.first[0, entry]) <= int(row) < int(table.beyond[0, entry])
    ]
    assert table.row_positions is not None
    shared = int(batch.q_positions[-1]) + 1 - 3
    assert sorted(marked) == [position for position in batch.q_positions.tolist() if position < shared]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.randn(3, 5, 64)}, "Hkv divides Hq"),
        ({"q": torch.randn(3, 6, 64).double()}, "dtype"),
        ({"row_starts": torch.zeros(2, dtype=torch.int64)}, "row_starts"),
        ({"k_pages": torch.randn(9, 24, 2, 64), "v_pages": torch.randn(9, 24, 2, 64)}, "page_size is one of"),
        ({"rules": {"scale": 1.0, "window": 0}}, "window"),
        ({"rules": {"scale": 1.0, "inv_freq": torch.ones(33)}}, "inv_freq"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make_batch().changed(**change).attend()


def test_a_bad_table_is_named() -> None:
    batch = make_batch()
    with pytest.raises(ArgumentError, match=r"table\.turn is int32"):
        batch.changed(table=replace(batch.table, turn=batch.table.turn.long())).attend()
