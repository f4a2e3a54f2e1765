"""Results as a table for people, and as plots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from fusionrag_engine.errors import ConfigError

COLUMNS = ("em", "f1", "contains", "normalized_f1", "gold_logprob", "kl", "top1", "agreement_f1", "ttft_s")
PLOTS = ("agreement_f1", "kl", "f1", "gold_logprob")


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """One line a row; the budget in thousands of layer-tokens."""
    result = Table(title=f"{rows[0]['model']}" if rows else None)
    for name in ("dataset", "method", "selector", "ratio", "n", *COLUMNS, "k layer-tokens"):
        result.add_column(name, justify="left" if name in ("dataset", "method", "selector") else "right")
    for row in rows:
        figures = ["-" if row[name] is None else f"{row[name]:.3f}" for name in COLUMNS]
        budget = "-" if row["true_budget"] is None else f"{row['true_budget'] / 1000:.1f}"
        result.add_row(
            row["dataset"], row["method"], row["selector"], f"{row['ratio']:g}", str(row["n"]), *figures, budget
        )
    return result


def plot(rows: Sequence[dict[str, Any]], directory: Path) -> list[Path]:
    """Quality against ratio and against time to first token, a file for each dataset and metric.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"plots need matplotlib ({error}); pip install 'fusionrag-integrations[demo]'") from error
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        for metric in PLOTS:
            figure = Figure(figsize=(10, 4), layout="constrained")
            for axes, against in zip(figure.subplots(1, 2), ("ratio", "ttft_s"), strict=True):
                for label, line in _lines([row for row in rows if row["dataset"] == dataset], metric).items():
                    axes.plot([row[against] for row in line], [row[metric] for row in line], "o-", label=label)
                axes.set_xlabel(against)
                axes.set_ylabel(metric)
                axes.legend(fontsize="small")
            name = "".join(letter if letter.isalnum() else "_" for letter in dataset)
            written.append(directory / f"{name}-{metric}.png")
            figure.savefig(written[-1])
    return written


def _lines(rows: Sequence[dict[str, Any]], metric: str) -> dict[str, list[dict[str, Any]]]:
    """Rows that have the metric, by method and selector; a selector's line begins at its method's ratio 0."""
    lines: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row[metric] is not None:
            lines[f"{row['method']} {row['selector']}"].append(row)
    for label, line in lines.items():
        if not label.endswith(" -"):
            line += [row for row in lines.get(f"{line[0]['method']} -", []) if row["ratio"] == 0]
            line.sort(key=lambda row: row["ratio"])
    return dict(lines)
