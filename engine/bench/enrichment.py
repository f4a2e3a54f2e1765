"""Cost of enrichment a chunk, against plain precompute, and how it grows with the number of neighbours.

    python engine/bench/enrichment.py --model DIR --data FILE [--chunks 24] [--top-n 0 1 3 5 10] [--out results.json]

Each count gets an engine of its own; plain caches are made first and timed alone, then enriched ones. `top_n` 0 is
plain precompute only. Times are the process's own CPU seconds a chunk, which other work on the machine hardly moves;
the JSON has wall-clock seconds too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import embed_bag_of_words, load_examples, machine, write_json

from fusionrag_engine import Chunk, Engine, EngineConfig, PrecomputeReport


def main() -> None:
    args = parse_args()
    examples = load_examples(args.data)
    texts = list(dict.fromkeys(chunk.text for example in examples for chunk in example.chunks))[: args.chunks]
    chunks = [Chunk(text) for text in texts]
    with Engine.from_pretrained(args.model) as warm:
        warm.precompute(chunks[:2], neighbours=[[1], [0]])
    rows = []
    print(f"{'top_n':>5}{'plain s':>10}{'enriched s':>12}{'ratio':>8}   CPU seconds a chunk", flush=True)
    for top_n in args.top_n:
        rows.append(row := measure(args.model, chunks, top_n))
        print(f"{top_n:5}{row['plain_s']:10.3f}{row['enriched_s']:12.3f}{row['enriched_to_plain']:8.2f}", flush=True)
    write_json(args.out, {"benchmark": "enrichment", "machine": machine(), "model": args.model, "rows": rows})


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory or Hub name")
    parser.add_argument("--data", type=Path, required=True, help="questions over chunks, as JSON")
    parser.add_argument("--chunks", type=int, default=24)
    parser.add_argument("--top-n", type=int, nargs="+", default=[0, 1, 3, 5, 10])
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def measure(model: str, chunks: list[Chunk], top_n: int) -> dict[str, Any]:
    """Seconds a chunk of both kinds of cache; the embeddings are made beforehand."""
    embeddings = embed_bag_of_words([chunk.text for chunk in chunks])
    with Engine.from_pretrained(model, config=EngineConfig(top_n=top_n)) as engine:
        plain, plain_cpu_s = timed(lambda: engine.precompute(chunks))
        enriched, enriched_cpu_s = plain, 0.0
        if top_n:
            enriched, enriched_cpu_s = timed(lambda: engine.precompute(chunks, embeddings=embeddings))
            if enriched.num_plain_computed or enriched.num_enriched_computed != len(chunks):
                raise SystemExit(f"top_n={top_n}: {enriched.summary()}; nothing comparable was measured")
    return {
        "top_n": top_n,
        "num_chunks": len(chunks),
        "mean_chunk_tokens": plain.num_tokens_computed / len(chunks),
        "plain_s": plain_cpu_s / len(chunks),
        "enriched_s": enriched_cpu_s / len(chunks),
        "enriched_to_plain": enriched_cpu_s / plain_cpu_s,
        "plain_wall_s": plain.duration_s / len(chunks),
        "enriched_wall_s": enriched.duration_s / len(chunks) if top_n else 0.0,
    }


def timed(action: Callable[[], PrecomputeReport]) -> tuple[PrecomputeReport, float]:
    begin = time.process_time()
    return action(), time.process_time() - begin


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
