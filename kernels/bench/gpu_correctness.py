"""Every op on the device against its float32 reference on the CPU; part of gpu_check.py."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusionrag_kernels import assemble
from fusionrag_kernels.critical_scores import NORMS
from fusionrag_kernels.runtime import why_no_triton
from fusionrag_kernels.testing import Case, make_case, relative_rms
from fusionrag_kernels.testing_pages import Batch, make_batch

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
Check = Callable[[], float]


def check_all(device: torch.device, *, is_dry_run: bool) -> dict[str, dict[str, Any]]:
    """Name: relative RMS and whether it is within tolerance. An op that raises is wrong and says why."""
    impl = "auto" if why_no_triton(device) else "triton"
    results: dict[str, dict[str, Any]] = {}
    for name, tolerance, check in _checks(device, impl, is_dry_run):
        try:
            error = check()
        except Exception as problem:  # the finding of this script; the other ops are still checked
            results[name] = {"impl": impl, "is_right": False, "raised": f"{type(problem).__name__}: {problem}"[:500]}
            continue
        results[name] = {"impl": impl, "is_right": error <= tolerance, "relative_rms": error}
    return results


def _checks(device: torch.device, impl: str, is_dry_run: bool) -> list[tuple[str, float, Check]]:
    checks: list[tuple[str, float, Check]] = []
    dtypes = [torch.float32] if is_dry_run else list(TOLERANCE)
    for dtype in dtypes:
        for name, spec in _attention_specs(is_dry_run).items():
            case = make_case(dtype=dtype, **spec)
            label = f"{name} {str(dtype)[6:]}"
            checks.append((f"q_sparse_attention {label}", TOLERANCE[dtype], _attends(case, device, impl)))
            for norm in NORMS:
                checks.append((f"critical_scores {norm} {label}", 1e-3, _scores(case, device, impl, norm)))
        for name, spec in _paged_specs(is_dry_run).items():
            batch = make_batch(dtype=dtype, **spec)
            checks.append((f"paged {name} {str(dtype)[6:]}", TOLERANCE[dtype], _pages(batch, device, impl)))
        for stored in _stored(device, dtype):
            label = f"assemble {str(stored)[6:]} to {str(dtype)[6:]}"
            checks.append((label, TOLERANCE[dtype], _places(stored, dtype, device, impl)))
    return checks


def _attention_specs(is_dry_run: bool) -> dict[str, dict[str, Any]]:
    long = 70 if is_dry_run else 3001
    specs: dict[str, dict[str, Any]] = {
        "sparse": {"num_rows": long // 7, "num_keys": long},
        "all rows": {"num_rows": long // 2, "num_keys": long // 2, "rows": "first"},
        "decode": {"num_rows": 1, "num_keys": long, "rows": "last"},
        "any": {"num_rows": 40, "num_keys": long, "rows": "any", "keys": "any", "window": long // 3, "softcap": 5.0},
    }
    for dim in () if is_dry_run else (80, 96, 128, 256):
        specs[f"window, heads of {dim}"] = {"num_rows": 300, "num_keys": 900, "head_dim": dim, "window": 200}
    return specs


def _paged_specs(is_dry_run: bool) -> dict[str, dict[str, Any]]:
    if is_dry_run:
        return {"overrides": {"num_sequences": 2, "num_chunks": 2, "head_dim": 16}}
    return {
        "overrides": {"num_sequences": 6, "num_chunks": 12, "page_size": 64, "head_dim": 128},
        "window, partial rotary": {"page_size": 64, "head_dim": 96, "rotary_dim": 48, "window": 50, "softcap": 5.0},
        "decode": {"num_sequences": 8, "num_chunks": 30, "page_size": 64, "ratio": 0, "num_asking": 1, "head_dim": 128},
    }


def _moved(case: Any, device: torch.device) -> Any:
    fields = {name: value.to(device) for name, value in vars(case).items() if isinstance(value, Tensor)}
    return case.changed(**fields)


def _attends(case: Case, device: torch.device, impl: str) -> Check:
    return lambda: relative_rms(_moved(case, device).attend(impl).cpu(), case.in_float32().attend("reference"))


def _scores(case: Case, device: torch.device, impl: str, norm: str) -> Check:
    def check() -> float:
        got, expected = _moved(case, device).score(impl, norm).cpu(), case.in_float32().score("reference", norm)
        seen = expected.isfinite()
        return relative_rms(got[seen], expected[seen]) if torch.equal(got[~seen], expected[~seen]) else torch.inf

    return check


def _pages(batch: Batch, device: torch.device, impl: str) -> Check:
    def check() -> float:
        on_device = _moved(batch, device)
        table = {name: value.to(device) for name, value in vars(batch.table).items() if value is not None}
        rules = {**batch.rules, "inv_freq": batch.rules["inv_freq"].to(device)}
        on_device = on_device.changed(table=type(batch.table)(**table), rules=rules)
        return relative_rms(on_device.attend(impl).cpu(), batch.assemble_then_attend())

    return check


def _stored(device: torch.device, dtype: torch.dtype) -> list[torch.dtype]:
    has_float8 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    return [dtype, torch.int8, *([torch.float8_e4m3fn] if has_float8 else [])]


def _places(stored: torch.dtype, dtype: torch.dtype, device: torch.device, impl: str) -> Check:
    def check() -> float:
        random = torch.Generator().manual_seed(1)
        keys, values = (torch.randn(3, 2, 77, 96, generator=random) * 20 for _ in range(2))
        scales: dict[str, Tensor] = {}
        if stored not in TOLERANCE:
            scales["key_scales"] = torch.rand(3, 2, 1, 96, generator=random)
            scales["value_scales"] = torch.rand(3, 2, 77, 1, generator=random)
        entry = {"keys": keys.to(stored), "values": values.to(stored), **scales}
        entry["inv_freq"] = torch.rand(3, 40, generator=random)
        out, expected = (
            (torch.empty(2, 3, 2, 77, 96, dtype=kind, device=where))
            for kind, where in ((dtype, device), (torch.float32, torch.device("cpu")))
        )
        assemble(**entry, out_keys=expected[0], out_values=expected[1], offset=-1234, impl="reference")
        moved = {name: tensor.to(device) for name, tensor in entry.items()}
        assemble(**moved, out_keys=out[0], out_values=out[1], offset=-1234, impl=impl)
        return relative_rms(out.float().cpu(), expected)

    return check
