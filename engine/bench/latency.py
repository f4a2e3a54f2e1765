"""Time to first token, and of each further one: methods x ratios x context lengths, beside other engines, in one run.

    python engine/bench/latency.py --model DIR [--data FILE | --contexts 1000 3000 6000] [--against hf llama_cpp]

Every row of one prompt is measured in turn, `--repeats` times; ratios are between medians of the same run. Caches are
read from disk ("disk": no host memory tier) and from host memory ("host"). A run refuses to speak when a method at
ratio 1 differs from full attention.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from against import NAMES, contenders
from common import Example, PeakMemory, embedder, load_examples, machine, synthetic_example, write_json

from fusionrag_engine import Engine, EngineConfig, Request
from fusionrag_engine.loading import load_pretrained
from fusionrag_engine.selfcheck import relative_rms


def main() -> None:
    args = parse_args()
    model, tokenizer = load_pretrained(args.model, None, EngineConfig(dtype=args.dtype, device=args.device))
    with tempfile.TemporaryDirectory() as directory:
        settings: dict[str, Any] = {"cache_dir": directory, "top_n": args.top_n, "selector": args.selector}
        settings["embed"] = embedder()
        engines = {
            "disk": Engine(model, tokenizer, EngineConfig(**settings, host_bytes=0)),
            "host": Engine(model, tokenizer, EngineConfig(**settings)),
        }
        result = run(args, engines)
    print_table(result["summary"])
    write_json(args.out, result)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory or Hub name")
    parser.add_argument("--data", type=Path, help="questions over chunks, as JSON; default: synthetic text")
    parser.add_argument("--limit", type=int, default=2, help="questions of --data to use")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1000, 3000, 6000], help="synthetic lengths")
    parser.add_argument("--methods", nargs="+", default=["full", "reuse", "fusionrag"])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.0, 0.15])
    parser.add_argument("--tiers", nargs="+", default=["disk", "host"], choices=["disk", "host"])
    parser.add_argument("--top-n", type=int, default=3, help="neighbours a chunk is enriched with")
    parser.add_argument("--selector", default="query_guided")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--against", nargs="*", default=["hf"], choices=NAMES, help="other engines to run beside")
    parser.add_argument("--gguf", type=Path, help="the model for llama_cpp")
    parser.add_argument("--decode", type=int, default=16, help="tokens to time after the first; 0: none")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def run(args: argparse.Namespace, engines: dict[str, Engine]) -> dict[str, Any]:
    engine = engines["disk"]
    if args.data is not None:
        examples = load_examples(args.data, args.limit)
    else:
        examples = [synthetic_example(engine.count_tokens, length) for length in args.contexts]
    rows: list[dict[str, Any]] = []
    for number, example in enumerate(examples):
        report = engine.precompute(example.chunks, show_progress=True)
        print(f"[{number + 1}/{len(examples)}] {report.summary()}", flush=True)
        check_exact(engine, example)
        for repeat in range(args.repeats):
            for row in measure(args, engines, example):
                rows.append({"example": number, "repeat": repeat, **row})
    return {
        "benchmark": "latency",
        "model": str(args.model),
        "dtype": str(engine.runner.dtype),
        "machine": machine(),
        "settings": {key: str(value) for key, value in vars(args).items()},
        "kv_bytes_per_token": engine.runner.bytes_per_token(),
        "rows": rows,
        "summary": summarize(rows),
    }


def check_exact(engine: Engine, example: Example) -> None:
    """Refuse to time what is wrong: at ratio 1 every method is Full Attention."""
    full = engine.prefill(Request(example.question, example.chunks, method="full"))
    whole = engine.prefill(Request(example.question, example.chunks, recompute_ratio=1.0))
    difference = relative_rms(whole.logits, full.logits)
    limit = 1e-4 if engine.runner.dtype == torch.float32 else 5e-2
    if not difference <= limit:
        raise SystemExit(f"ratio 1 differs from full by {difference:.2e} (limit {limit}); nothing is measured")


def measure(args: argparse.Namespace, engines: dict[str, Engine], example: Example) -> list[dict[str, Any]]:
    """One round over all methods: one row each."""
    rows = []
    cached = [method for method in args.methods if method != "full"]
    plan = [("full", None, "host")] if "full" in args.methods else []
    plan += [(method, ratio, tier) for tier in args.tiers for ratio in args.ratios for method in cached]
    for method, ratio, tier in plan:
        request = Request(example.question, example.chunks, method=method, recompute_ratio=ratio)
        engine = engines[tier]
        if tier == "host" and method != "full":
            engine.prefill(request)  # from here on its caches are in host memory
        begin = time.perf_counter()
        with PeakMemory() as memory:
            prefill = engine.prefill(request)
        rows.append(
            {
                "method": method,
                "ratio": ratio,
                "tier": "-" if method == "full" else tier,
                "ttft_s": time.perf_counter() - begin,
                "peak_bytes": memory.num_bytes,
                "stats": prefill.stats.as_dict(),
            }
        )
    for row in rows:
        if row["method"] == "full" and args.decode:
            row["token_s"] = measure_decode(engines["host"], Request(example.question, example.chunks), args.decode)
    for name, contender in contenders(args.against, engines["host"], args.gguf).items():
        timing = contender(prefill.token_ids, args.decode)
        stats = {"num_prompt_tokens": len(prefill.token_ids)}
        rows.append({"method": name, "ratio": None, "tier": "-", "stats": stats, **asdict(timing)})
    return rows


def measure_decode(engine: Engine, request: Request, num_new: int) -> float:
    """Seconds of each token after the first, over `num_new` of them."""
    generation = engine.generate(replace(request, max_new_tokens=num_new + 1))
    return generation.stats.decode_s / max(generation.stats.num_generated_tokens - 1, 1)


def summarize(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per method: median TTFT, and the median over examples of its ratio to `full` on the same example."""
    times: dict[tuple[Any, ...], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    sizes: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        name = (row["method"], row["ratio"], row["tier"])
        times[name][row["example"]].append(row["ttft_s"])
        sizes[name].append(row)
    medians = {name: {key: statistics.median(values) for key, values in item.items()} for name, item in times.items()}
    full = next((item for name, item in medians.items() if name[0] == "full"), None)
    summary = []
    for name, item in medians.items():
        stats = [row["stats"] for row in sizes[name]]
        summary.append(
            {
                "method": name[0],
                "ratio": name[1],
                "tier": name[2],
                "prompt_tokens": statistics.median(stat["num_prompt_tokens"] for stat in stats),
                "ttft_s": statistics.median(item.values()),
                "speedup": None if full is None else statistics.median(full[key] / item[key] for key in item),
                "speedup_by_example": None if full is None else [full[key] / item[key] for key in item],
                "peak_bytes": statistics.median(row["peak_bytes"] for row in sizes[name]),
                "token_s": statistics.median(row.get("token_s", 0.0) for row in sizes[name]),
                "parts": {
                    part: statistics.median(stat.get(part, 0.0) for stat in stats)
                    for part in ("load_s", "assemble_s", "select_s", "prefill_s")
                },
            }
        )
    return summary


def print_table(summary: list[dict[str, Any]]) -> None:
    parts_header = f"{'load':>8}{'place':>8}{'select':>8}{'prefill':>9}"
    print(
        f"{'method':22}{'ratio':>6} {'from':6}{'TTFT s':>9}{'full/it':>9}{parts_header}{'peak MB':>9}{'tokens/s':>10}"
    )
    for row in summary:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:g}"
        speedup = "" if row["speedup"] is None else f"{row['speedup']:.2f}x"
        parts = row["parts"]
        tokens_per_s = f"{1 / row['token_s']:.1f}" if row["token_s"] else ""
        print(
            f"{row['method']:22}{ratio:>6} {row['tier']:6}{row['ttft_s']:9.3f}{speedup:>9}{parts['load_s']:8.3f}"
            f"{parts['assemble_s']:8.3f}{parts['select_s']:8.3f}{parts['prefill_s']:9.3f}{row['peak_bytes'] / 1e6:9.0f}"
            f"{tokens_per_s:>10}"
        )


if __name__ == "__main__":
    main()
