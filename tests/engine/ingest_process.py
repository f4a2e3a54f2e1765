"""Run by tests as a process of its own: ingest a corpus into a directory, and die where it is told to.

    python ingest_process.py DIRECTORY JOB...

A job is `point:count` (die at that point, the `count`-th time), `killed:count` (two processes ingest at once, and both
get SIGKILL once so many files are there), or `together` (two processes ingest at once). Each job has its own
subdirectory. Jobs run in forked children, so that the heavy imports happen once; no tensor is touched before.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "engine"), str(REPOSITORY / "kernels")]

COUNT = 5
DIED = 77
"""Exit status of a process that died where it was told to."""


def ingest(directory: Path) -> None:
    import torch

    from tests.engine.support import documents, ring, tiny_engine

    torch.set_num_threads(1)
    with tiny_engine(cache_dir=directory) as engine:
        engine.precompute(documents(COUNT), neighbours=ring(COUNT))


def _dying(function: Callable[..., Any], count: int, *, after: bool) -> Callable[..., Any]:
    """The function, which ends the process at its `count`-th call: no handler runs, as when it is killed."""
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count and not after:
            os._exit(DIED)
        result = function(*args, **kwargs)
        if calls == count:
            os._exit(DIED)
        return result

    return call


def _arm(point: str, count: int) -> None:
    """`file-written`: flushed, not renamed. `file-renamed`: not in the catalog. The others: around a catalog change."""
    from fusionrag_engine.catalog import Catalog

    if point == "file-half-written":
        import safetensors.torch

        original = safetensors.torch.save
        calls = 0

        def save(*args: Any, **kwargs: Any) -> bytes:
            nonlocal calls
            calls += 1
            data = original(*args, **kwargs)
            if calls < count:
                return data
            os.fsync = _dying(os.fsync, 1, after=False)
            return data[: len(data) // 2]

        safetensors.torch.save = save
    elif point == "file-written":
        os.replace = _dying(os.replace, count, after=False)
    elif point == "file-renamed":
        os.replace = _dying(os.replace, count, after=True)
    else:
        name = {"plain-recorded": "add", "id-recorded": "set_id", "enriched-recorded": "set_enriched"}[point]
        setattr(Catalog, name, _dying(getattr(Catalog, name), count, after=True))


def _child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main(root: Path, jobs: list[str]) -> None:
    import tokenizers
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from fusionrag_engine import Engine

    assert all((tokenizers, torch, transformers, Engine, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM))
    assert PreTrainedTokenizerFast is not None
    for job in jobs:
        directory = root / job.replace(":", "-")
        if job.startswith("together"):
            children = [_child(lambda directory=directory: ingest(directory)) for _ in range(2)]
            expected = 0
        elif job.startswith("killed"):
            children = [_child(lambda directory=directory: ingest(directory)) for _ in range(2)]
            expected = -signal.SIGKILL
            while len(list(directory.rglob("*.safetensors"))) < int(job.split(":")[1]):
                time.sleep(0.001)
            for pid in children:
                os.kill(pid, signal.SIGKILL)
        else:
            point, count = job.split(":")

            def die(point: str = point, count: int = int(count), directory: Path = directory) -> None:
                _arm(point, count)
                ingest(directory)

            children, expected = [_child(die)], DIED
        for pid in children:
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert status == expected, f"{job}: exit status {status}, expected {expected}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
