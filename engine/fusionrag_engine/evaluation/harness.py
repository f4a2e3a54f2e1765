"""The quality harness: every method, selector and ratio on the same questions and the same caches."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fusionrag_engine.config import check_choice, check_ratio
from fusionrag_engine.engine import Engine
from fusionrag_engine.errors import ConfigError
from fusionrag_engine.selectors import resolve_selector
from fusionrag_engine.types import METHODS, Request

from . import metrics
from .datasets import Example
from .trial import answer, compare

METRICS = ("em", "f1", "contains", "gold_logprob", "kl", "top1", "agreement_f1", "ttft_s", "true_budget")
"""Figures of a row that are means over questions; each has an interval `NAME_ci`."""
NO_SELECTOR = "-"
"""Selector of a row in which none is asked: `full`, and everything at ratio 0."""


@dataclass(frozen=True)
class Plan:
    """What is measured. `selectors` may name "default", the engine's own.

    Raises:
        ConfigError: an unknown method or selector, or a ratio outside 0 to 1.
    """

    methods: tuple[str, ...] = ("full", "reuse", "fusionrag")
    selectors: tuple[str, ...] = ("default",)
    ratios: tuple[float, ...] = (0.0, 0.05, 0.10, 0.15, 0.20, 1.0)
    max_new_tokens: int = 32

    def __post_init__(self) -> None:
        for method in self.methods:
            check_choice("methods", method, METHODS)
        for selector in self.selectors:
            if selector != "default":
                resolve_selector(selector)
        for ratio in self.ratios:
            check_ratio("ratios", ratio)
        if not (self.methods and self.selectors and self.ratios):
            raise ConfigError("methods, selectors and ratios must each name at least one")

    def configurations(self) -> Iterator[tuple[str, str, float]]:
        """(method, selector, ratio) of each row, in the order of the table."""
        for method in self.methods:
            if method == "full":
                yield method, NO_SELECTOR, 1.0
                continue
            for ratio in self.ratios:
                for selector in self.selectors if ratio else [NO_SELECTOR]:
                    yield method, selector, ratio


def precompute(engine: Engine, examples: Sequence[Example], show_progress: bool = False) -> str:
    """Caches of all chunks, made once and shared by all rows; returns the report's summary."""
    chunks = {chunk.text: chunk for example in examples for chunk in example.chunks}
    return engine.precompute(list(chunks.values()), show_progress=show_progress).summary()


def run(
    engine: Engine,
    examples: Sequence[Example],
    plan: Plan,
    *,
    dataset: str,
    journal: Path | None = None,
    on_question: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """Measure every configuration on every question; the rows of the table.

    Args:
        journal: a file that receives each question's figures as a line when it is done; a later run takes from
            it what has the same engine, question and plan. None keeps no journal.
    """
    done = {} if journal is None else _read_journal(journal)
    trials = []
    for example in examples:
        key = question_key(engine, example, plan, dataset)
        if key not in done:
            done[key] = measure(engine, example, plan)
            if journal is not None:
                _append(journal, {"question": key, "trials": done[key]})
        trials.append(done[key])
        on_question()
    return [summarize(engine, dataset, key, trials) for key in map(trial_key, plan.configurations())]


def measure(engine: Engine, example: Example, plan: Plan) -> dict[str, dict[str, Any]]:
    """All configurations on one question, by `trial_key`; `full`, and `reuse` at ratio 0, are always among them."""
    gold, keys = example.answers[0], {}
    full = answer(engine, _request(example, plan, "full", NO_SELECTOR, 1.0), gold)
    wanted = dict.fromkeys([("full", NO_SELECTOR, 1.0), ("reuse", NO_SELECTOR, 0.0), *plan.configurations()])
    for method, selector, ratio in wanted:
        ours = full if method == "full" else answer(engine, _request(example, plan, method, selector, ratio), gold)
        keys[trial_key((method, selector, ratio))] = compare(engine, example, full, ours, method).as_dict()
    return keys


def _request(example: Example, plan: Plan, method: str, selector: str, ratio: float) -> Request:
    return Request(
        example.question,
        example.chunks,
        method=method,
        recompute_ratio=None if method == "full" else ratio,
        selector=None if selector in ("default", NO_SELECTOR) else selector,
        max_new_tokens=plan.max_new_tokens,
    )


def trial_key(configuration: tuple[str, str, float]) -> str:
    return json.dumps(configuration)


def summarize(engine: Engine, dataset: str, key: str, trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row: means over questions with 95 % bootstrap intervals, and the same over the questions full answers."""
    method, selector, ratio = json.loads(key)
    ours = [trial[key] for trial in trials]
    full = [trial[trial_key(("full", NO_SELECTOR, 1.0))] for trial in trials]
    reuse = [trial[trial_key(("reuse", NO_SELECTOR, 0.0))] for trial in trials]
    f1 = [[trial["f1"] for trial in column] for column in (ours, reuse, full)]
    row: dict[str, Any] = {
        "dataset": dataset,
        "model": engine.model_name,
        "method": method,
        "selector": selector,
        "ratio": ratio,
        "n": len(ours),
        **means(ours),
        "normalized_f1": metrics.normalized(*f1) if ours else None,
        "normalized_f1_ci": metrics.bootstrap(metrics.normalized, *f1),
        "identical_answers": _mean([trial["agreement_tokens"] for trial in ours]),
        "num_missed_chunks": sum(trial["num_missed"] for trial in ours),
        "recomputed_share": _mean(
            [trial["num_recomputed_tokens"] / max(trial["num_chunk_tokens"], 1) for trial in ours]
        ),
        "kv_deviation": _columns(np.mean, [trial["kv_deviation"] for trial in ours]),
        "chosen_in_chunk": _columns(np.sum, [trial["in_chunk"] for trial in ours]),
        "chosen_in_prompt": _columns(np.sum, [trial["in_prompt"] for trial in ours]),
    }
    answered = [trial for trial, reference in zip(ours, full, strict=True) if reference["contains"]]
    row["full_answers"] = {"n": len(answered), **means(answered)}
    return row


def means(trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name in METRICS:
        values = [trial[name] for trial in trials if trial[name] is not None and math.isfinite(trial[name])]
        result[name] = _mean(values)
        result[f"{name}_ci"] = metrics.bootstrap(np.mean, values)
    return result


def _share(trial: dict[str, Any]) -> float:
    return float(trial["num_recomputed_tokens"] / max(trial["num_chunk_tokens"], 1))


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _columns(reduce: Callable[..., Any], lists: Sequence[list[float] | None]) -> list[float] | None:
    """Lists of one length reduced entry by entry; None where there is none."""
    present = [values for values in lists if values]
    return [float(value) for value in reduce(np.array(present), axis=0)] if present else None


def question_key(engine: Engine, example: Example, plan: Plan, dataset: str) -> str:
    """Digest of what the figures of one question depend on, the machine apart."""
    config = {name: str(value) for name, value in vars(engine.config).items() if name not in ("cache_dir", "embed")}
    config["can_embed"] = str(engine.config.embed is not None)
    parts = [dataset, engine.namespace, config, asdict(plan), asdict(example)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _read_journal(path: Path) -> dict[str, dict[str, Any]]:
    """Figures of the questions that earlier runs finished; a line cut off by a crash is left out."""
    found = {}
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        found[entry["question"]] = entry["trials"]
    return found


def _append(path: Path, entry: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("\n" + json.dumps(entry) + "\n")
        file.flush()


def machine() -> dict[str, Any]:
    """Facts that a figure needs beside it."""
    import transformers

    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
