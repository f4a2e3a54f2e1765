"""How near each method comes to full attention: KL of the first answer token, on a dataset file.

    python engine/bench/fidelity.py --model DIR --data FILE [--limit 40] [--out results.json]

`--behind history` places every prompt behind a chat history instead of the engine's own prefix, with the same caches:
what a request under another template loses. The table gives the mean KL(full || method) in nats, its ratio to that of
`reuse` at ratio 0, and how often the first token is the same.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from common import Example, embedder, load_examples, machine, write_json
from tqdm.auto import tqdm

from fusionrag_engine import Engine, EngineConfig, Request
from fusionrag_engine.evaluation import kl_divergence
from fusionrag_engine.selectors import QueryGuided, register_selector

HISTORY = [
    {"role": "system", "content": "You are a careful assistant of a public library. Answer in full sentences."},
    {"role": "user", "content": "Hello! I am preparing a talk and will ask you a few questions about some texts."},
    {"role": "assistant", "content": "Gladly. Paste the texts with each question, and I will keep to what they say."},
    {"role": "user", "content": "Thank you. Please be brief, and tell me when a text does not answer the question."},
    {"role": "assistant", "content": "Understood: brief answers, and a clear note when something is missing."},
]


def main() -> None:
    args = parse_args()
    register_selector("query_guided_last", QueryGuided(layers="last"))
    register_selector("query_guided_all", QueryGuided(layers="all"))
    config = EngineConfig(dtype=args.dtype, device=args.device, top_n=args.top_n, codec=args.codec, embed=embedder())
    engine = Engine.from_pretrained(args.model, config=config)
    examples = load_examples(args.data, args.limit)
    chunks = {chunk.text: chunk for example in examples for chunk in example.chunks}
    if args.neighbours == "store":
        report = engine.precompute(list(chunks.values()), show_progress=True)
        print(report.summary(), flush=True)
    rows = []
    for number, example in enumerate(tqdm(examples, desc="questions")):
        if args.neighbours == "prompt":
            engine.precompute(example.chunks)
        rows += [{"example": number, **row} for row in measure(args, engine, example)]
    summary = summarize(rows)
    print_table(summary)
    result = {
        "benchmark": "fidelity",
        "model": str(args.model),
        "dtype": str(engine.runner.dtype),
        "machine": machine(),
        "settings": {key: str(value) for key, value in vars(args).items()},
        "rows": rows,
        "summary": summary,
    }
    write_json(args.out, result)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory or Hub name")
    parser.add_argument("--data", type=Path, required=True, help="questions over chunks, as JSON")
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.0, 0.05, 0.15])
    parser.add_argument("--selectors", nargs="+", default=["query_guided"])
    parser.add_argument("--top-n", type=int, default=10, help="neighbours a chunk is enriched with")
    parser.add_argument("--neighbours", choices=["store", "prompt"], default="store", help="where they come from")
    parser.add_argument("--behind", choices=["prefix", "history"], default="prefix")
    parser.add_argument("--codec", default="none", help="how the caches are kept: none, int8 or int4")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def measure(args: argparse.Namespace, engine: Engine, example: Example) -> list[dict[str, Any]]:
    """KL to full of each method on one question."""
    around = None
    if args.behind == "history":
        mark = "\u2402context\u2403"
        head, tail = engine.render_chat([*HISTORY, engine.default_messages(mark, example.question)[-1]]).split(mark)
        around = [head, *[engine.config.chunk_separator] * (len(example.chunks) - 1), tail]
    full = engine.prefill(Request(example.question, example.chunks, method="full", text_around=around))
    rows = []
    for method in ("reuse", "fusionrag"):
        for ratio in args.ratios:
            for selector in args.selectors if ratio else args.selectors[:1]:
                request = Request(
                    example.question,
                    example.chunks,
                    method=method,
                    recompute_ratio=ratio,
                    selector=selector,
                    text_around=around,
                )
                prefill = engine.prefill(request)
                rows.append(
                    {
                        "method": method,
                        "ratio": ratio,
                        "selector": selector if ratio else "-",
                        "kl": kl_divergence(full.logits, prefill.logits),
                        "is_same_top1": int(full.logits.argmax()) == int(prefill.logits.argmax()),
                        "num_recomputed_tokens": prefill.stats.num_recomputed_tokens,
                        "num_prompt_tokens": prefill.stats.num_prompt_tokens,
                        "chunk_status": prefill.stats.chunk_status,
                    }
                )
    return rows


def summarize(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, float, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["method"], row["ratio"], row["selector"]].append(row)
    reuse = statistics.mean(row["kl"] for row in rows if row["method"] == "reuse" and row["ratio"] == 0)
    return [
        {
            "method": method,
            "ratio": ratio,
            "selector": selector,
            "n": len(group),
            "kl": statistics.mean(row["kl"] for row in group),
            "kl_to_reuse": statistics.mean(row["kl"] for row in group) / reuse,
            "top1": statistics.mean(row["is_same_top1"] for row in group),
        }
        for (method, ratio, selector), group in groups.items()
    ]


def print_table(summary: list[dict[str, Any]]) -> None:
    print(f"{'method':12}{'ratio':>6} {'selector':20}{'n':>4}{'KL':>9}{'of reuse':>10}{'top-1':>8}")
    for row in summary:
        print(
            f"{row['method']:12}{row['ratio']:6g} {row['selector']:20}{row['n']:4}{row['kl']:9.4f}"
            f"{row['kl_to_reuse']:10.3f}{row['top1']:8.2f}"
        )


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
