"""One command for a machine with a GPU, under six minutes: every op against its reference, then times, then TTFT.

python kernels/bench/gpu_check.py [--out kernels/bench/results/gpu.json] [--only correctness|attention|ttft]
python kernels/bench/gpu_check.py --dry-run     small shapes on whatever is here: exercises the script, means nothing
"""

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpu_attention import time_attention, time_roofline
from gpu_correctness import check_all
from gpu_ttft import time_to_first_token

RESULTS = Path(__file__).resolve().parent / "results"


def machine(device: torch.device) -> dict[str, Any]:
    import transformers

    facts = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    try:
        import triton
    except ImportError:
        return {**facts, "triton": None}
    return {**facts, "triton": triton.__version__}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON; default results/gpu.json, none with --dry-run")
    parser.add_argument("--only", choices=["correctness", "attention", "ttft"])
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    if not args.dry_run and not torch.cuda.is_available():
        sys.exit("no CUDA device: run this on a machine with a GPU, or pass --dry-run to exercise the script")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    out = args.out or (None if args.dry_run else RESULTS / "gpu.json")
    begin = time.perf_counter()
    result: dict[str, Any] = {"machine": machine(device), "is_dry_run": args.dry_run}

    def report(name: str, value: Any) -> None:
        result[name], result["wall_s"] = value, round(time.perf_counter() - begin, 1)
        print(f"== {name} ({result['wall_s']} s)\n{json.dumps(value, indent=1)}", flush=True)
        if out is not None:  # after every part: what was measured survives whatever comes next
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(result, indent=1) + "\n")

    errors = check_all(device, is_dry_run=args.dry_run)
    report("correctness", errors)
    wrong = [name for name, row in errors.items() if not row["is_right"]]
    if wrong:
        print(f"not timed: wrong are {wrong}")
        return 1
    if args.only in (None, "attention"):
        roofline = time_roofline(device, is_dry_run=args.dry_run)
        report("roofline", roofline)
        report("attention", time_attention(device, roofline, is_dry_run=args.dry_run))
    if args.only in (None, "ttft"):
        report("ttft", time_to_first_token(device, is_dry_run=args.dry_run))
    return 0


if __name__ == "__main__":
    sys.exit(main())
