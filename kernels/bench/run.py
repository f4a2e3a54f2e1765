"""Times the CPU path of each op against full causal and masked SDPA, in rounds of one run, after checking the result.

python kernels/bench/run.py --out results.json
Ratios are medians over rounds of (other / ours in that round): above 1 ours is faster. Compare them, not milliseconds.
On a machine that others use, --one-thread times one thread's CPU time, which their load disturbs least.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fusionrag_kernels.testing import Case, RowPattern, make_case, relative_rms

TOLERANCE = {"float32": 3e-6, "float16": 5e-4, "bfloat16": 4e-3}
NUM_CHECKED_ROWS = 64
Contender = Callable[[], object]


def contenders(case: Case) -> dict[str, Contender]:
    """Ours, SDPA with a mask for these rows, and causal SDPA of every row of the prompt."""
    q, k, v = (x.transpose(0, 1)[None] for x in (case.q, case.k, case.v))
    num_keys = case.k.shape[0]
    all_q = torch.randn(1, q.shape[1], num_keys, q.shape[3]).to(q.dtype)

    def masked() -> Tensor:
        mask = torch.arange(num_keys) <= case.q_positions[:, None]
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=case.scale, enable_gqa=True)

    def full() -> Tensor:
        return scaled_dot_product_attention(all_q, k, v, is_causal=True, scale=case.scale, enable_gqa=True)

    return {"ours": case.attend, "masked_sdpa": masked, "full_causal_sdpa": full}


def prefill_contenders(case: Case, piece: int) -> dict[str, Contender]:
    """Every row in pieces of 1024, as the engine prefills, against causal SDPA of all."""
    starts = range(0, case.q.shape[0], piece)
    pieces = [
        case.changed(q=case.q[start : start + piece], q_positions=case.q_positions[start : start + piece])
        for start in starts
    ]
    full = contenders(case)["full_causal_sdpa"]
    return {"ours": lambda: [part.attend() for part in pieces], "full_causal_sdpa": full}


def score_contenders(case: Case) -> dict[str, Contender]:
    return {"ours": case.score, "reference": lambda: case.score("reference")}


def check(case: Case, op: str, tolerance: float) -> float:
    """Relative RMS of ours to the reference on some rows; exits when it is too far to be worth timing."""
    rows = torch.linspace(0, case.q.shape[0] - 1, min(NUM_CHECKED_ROWS, case.q.shape[0])).long()
    part = case.changed(q=case.q[rows], q_positions=case.q_positions[rows])
    if op == "score":
        error = relative_rms(part.score(), part.in_float32().score("reference"))
    else:
        error = relative_rms(case.attend()[rows], part.in_float32().attend("reference"))
    if not error <= tolerance:
        sys.exit(f"{op} differs from the reference by {error:.2e} (relative RMS, at most {tolerance:.0e}): not timed")
    return error


def measure(functions: dict[str, Contender], num_rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(num_rounds):
        for name, function in functions.items():
            function()  # whoever ran before leaves the caches to its own liking
            start = clock()
            function()
            times[name].append(1000 * (clock() - start))
    ours = times["ours"]
    others = {name: values for name, values in times.items() if name != "ours"}
    return {
        "median_ms": {name: round(statistics.median(values), 3) for name, values in times.items()},
        "min_ms": {name: round(min(values), 3) for name, values in times.items()},
        "ratio_to_ours": {
            name: round(statistics.median(other / own for other, own in zip(values, ours, strict=True)), 2)
            for name, values in others.items()
        },
    }


def regimes(num_keys: int) -> dict[str, tuple[str, int, RowPattern]]:
    """Name: op, number of rows, where they stand."""
    return {
        "a sparse 15%": ("attend", 15 * num_keys // 100, "scattered"),
        "a sparse 5%": ("attend", 5 * num_keys // 100, "scattered"),
        "b last 1024": ("attend", 1024, "last"),
        "b whole prompt": ("prefill", num_keys, "first"),
        "c decode": ("attend", 1, "last"),
        "c question of 5": ("attend", 5, "last"),
        "c question of 60": ("attend", 60, "last"),
        "critical_scores of 60": ("score", 60, "last"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results as JSON here too")
    parser.add_argument("--only", default="", help="only regimes whose name contains this")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--num-keys", type=int, default=6200)
    parser.add_argument("--dtype", choices=list(TOLERANCE), default="float32")
    parser.add_argument("--one-thread", action="store_true", help="one thread, its CPU time")
    args = parser.parse_args()
    clock = time.perf_counter
    if args.one_thread:
        torch.set_num_threads(1)
        clock = time.thread_time

    shape = {"num_keys": args.num_keys, "num_kv_heads": 3, "group": 3, "head_dim": 64}
    results: dict[str, Any] = {
        "machine": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "shape": shape,
        "dtype": args.dtype,
        "rounds": args.rounds,
        "clock": clock.__name__,
        "regimes": {},
    }
    print(json.dumps({name: value for name, value in results.items() if name != "regimes"}))
    for name, (op, num_rows, rows) in regimes(args.num_keys).items():
        if args.only not in name:
            continue
        case = make_case(num_rows=num_rows, rows=rows, dtype=getattr(torch, args.dtype), **shape)
        error = check(case, op, TOLERANCE[args.dtype])
        make = {"attend": contenders, "prefill": lambda case: prefill_contenders(case, 1024), "score": score_contenders}
        result = {"relative_rms": error, **measure(make[op](case), args.rounds, clock)}
        results["regimes"][name] = result
        print(f"{name:22}", "  ".join(f"{key} {value}" for key, value in result.items() if key != "min_ms"))
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
