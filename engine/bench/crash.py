"""Two processes ingest one corpus into one store, and are killed (SIGKILL) at a random moment; again and again.

    python engine/bench/crash.py [--kills 200] [--chunks 24] [--seed 0] [--out results.json]

After every kill, on the store as it was left: it opens, `verify` finds nothing, and answers at ratio 1 equal those of a
fresh engine without caches. Every tenth store is then ingested to the end: its answers equal those of a fresh store.
A tiny random model; POSIX only.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import machine, write_json
from tqdm.auto import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

LONGEST_S = 120.0
"""A process that takes longer hangs: it shows where, and counts as failed."""
SAME = 1e-4
"""Relative RMS of logits in float32."""


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # its thread may hold a lock while this process forks
    import_everything()
    longest = min(duration_of(args.chunks) for _ in range(2))
    draw, killed_with_files, failures = random.Random(args.seed), [], 0
    for number in tqdm(range(args.kills), desc="kills"):
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            writers = [fork(lambda directory=directory: ingest(directory, args.chunks)) for _ in range(2)]
            time.sleep(draw.uniform(0, longest))
            for pid in writers:
                os.kill(pid, signal.SIGKILL)
            for pid in writers:
                os.waitpid(pid, 0)
            killed_with_files.append(len(list(directory.rglob("*.safetensors"))))
            is_tenth = number % 10 == 9
            status = wait(fork(lambda directory=directory, tenth=is_tenth: check(directory, args.chunks, tenth)))
            if status:
                failures += 1
                kept = Path(tempfile.gettempdir()) / f"fusionrag-crash-{args.seed}-{number}"
                shutil.copytree(directory, kept, dirs_exist_ok=True)
                print(f"kill {number}: failed, the store is kept in {kept}")
    complete = 2 * args.chunks
    middle = sum(0 < count < complete for count in killed_with_files)
    print(f"{args.kills} kills within {longest:.2f} s, {middle} of them in the middle of writing: {failures} failed")
    result = {"benchmark": "crash", "machine": machine(), "kills": args.kills, "in_the_middle": middle}
    write_json(args.out, {**result, "longest_s": longest, "files": killed_with_files, "failures": failures})
    sys.exit(bool(failures))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--chunks", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def import_everything() -> None:
    """So that a forked process is at its work at once; no tensor is touched before."""
    import tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from fusionrag_engine import Engine

    assert all((tokenizers, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Engine))


def fork(work: Callable[[], Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        faulthandler.dump_traceback_later(LONGEST_S, exit=True)
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def open_engine(directory: Path | None) -> Any:
    from fusionrag_engine import Engine, EngineConfig
    from tests.tiny_models import build_model, build_tokenizer

    config = EngineConfig(system_prompt="Be brief.", cache_dir=directory, top_n=2, max_new_tokens=1)
    return Engine(build_model("llama"), build_tokenizer(), config)


def corpus(num_chunks: int) -> tuple[list[str], list[list[int]]]:
    texts = [f"Report {number}: the shift lead signs what pump {number} did." for number in range(num_chunks)]
    return texts, [[(number + 1) % num_chunks, (number + 2) % num_chunks] for number in range(num_chunks)]


def ingest(directory: Path, num_chunks: int) -> None:
    texts, neighbours = corpus(num_chunks)
    with open_engine(directory) as engine:
        for start in range(0, num_chunks, 6):  # ids that are named, renamed and deleted on the way
            stop = min(start + 6, num_chunks)
            lists = [[other - start for other in list_ if start <= other < stop] for list_ in neighbours[start:stop]]
            engine.precompute(texts[start:stop], neighbours=lists)
        engine.precompute(texts, neighbours=neighbours)


def duration_of(num_chunks: int) -> float:
    """Seconds that two whole ingestions take side by side."""
    with tempfile.TemporaryDirectory() as name:
        begin = time.perf_counter()
        writers = [fork(lambda: ingest(Path(name), num_chunks)) for _ in range(2)]
        assert [wait(pid) for pid in writers] == [0, 0]
        return time.perf_counter() - begin


def check(directory: Path, num_chunks: int, is_completed: bool) -> None:
    from fusionrag_engine import Request

    texts, neighbours = corpus(num_chunks)
    chosen = [texts[number] for number in (3, 0, num_chunks - 1, 7)]
    exact, reuse = Request("Who signs?", chosen, recompute_ratio=1.0), Request("Who signs?", chosen)
    with open_engine(None) as fresh, open_engine(directory) as engine:
        assert engine.verify() == [], engine.verify()
        assert_same(engine.prefill(exact).logits, fresh.prefill(Request("Who signs?", chosen, method="full")).logits)
    if is_completed:
        # New engines: the first ones know exact rows of this prompt by now.
        with open_engine(None) as fresh, open_engine(directory) as engine:
            fresh.precompute(texts, neighbours=neighbours)
            engine.precompute(texts, neighbours=neighbours)
            assert_same(engine.prefill(reuse).logits, fresh.prefill(reuse).logits)
            engine.gc()
            assert len(list(directory.rglob("*.safetensors"))) == 2 * num_chunks
            assert not list(directory.rglob("*.tmp"))
            assert engine.verify() == []


def assert_same(ours: torch.Tensor, reference: torch.Tensor) -> None:
    difference = float((ours - reference).double().pow(2).mean().sqrt() / reference.double().pow(2).mean().sqrt())
    assert difference <= SAME, f"relative RMS {difference:.1e}"


if __name__ == "__main__":
    main()
