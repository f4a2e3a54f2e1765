"""`fusionrag bench`: quality of every method, selector and ratio on one's own model and data."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, help="Measure methods, selectors and ratios on a model and a dataset.")


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


@app.command()
def quality(
    data: Annotated[
        list[str],
        typer.Option(
            help="A .json or .jsonl file of questions, or a generated set such as "
            "needle:length=2000,depth=0.5,keys=4, variables:hops=3 or two_hop. May be given several times."
        ),
    ],
    model: Annotated[str, typer.Option(help="Directory or Hub name of the model.")],
    methods: Annotated[str, typer.Option(help="full, reuse, fusionrag; separated by commas.")] = "full,reuse,fusionrag",
    selectors: Annotated[str, typer.Option(help="Registered selectors; `default` is the engine's.")] = "default",
    ratios: Annotated[str, typer.Option(help="Shares of the chunk tokens to recompute.")] = "0,0.05,0.10,0.15,0.20,1",
    limit: Annotated[int | None, typer.Option(min=1, help="Questions of each dataset at most.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file of the results.")] = None,
    top_n: Annotated[int, typer.Option(min=0, help="Neighbours a chunk is enriched with.")] = 10,
    embedder: Annotated[str, typer.Option(help="Embeddings that find neighbours: auto, minilm, words, none.")] = "auto",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length limit of an answer.")] = 32,
    cache_dir: Annotated[Path | None, typer.Option(help="Where caches are kept; default: a temporary one.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto or a torch device.")] = "auto",
) -> None:
    """Answer questions by every method and compare with full attention.

    An interrupted run goes on where it stopped: what is done is kept beside --out, in a file with .jsonl behind its
    name.
    """
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in locals().items()}
    from fusionrag_engine import FusionRAGError

    with tempfile.TemporaryDirectory(prefix="fusionrag-bench-") as temporary:
        try:
            result = _measure({**settings, "cache_dir": settings["cache_dir"] or temporary}, out)
        except FusionRAGError as error:
            raise _fail(str(error)) from error
    result["settings"] = settings
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
        typer.echo(f"written: {out}")
    _print(result["rows"])


def _measure(settings: dict[str, Any], out: Path | None) -> dict[str, Any]:
    from tqdm.auto import tqdm

    from fusionrag_engine import ConfigError, Engine, EngineConfig
    from fusionrag_engine import evaluation as ev

    try:
        ratios = tuple(float(ratio) for ratio in _split(settings["ratios"]))
    except ValueError as error:
        raise ConfigError(f"--ratios {settings['ratios']!r}: {error}; give numbers from 0 to 1") from error
    plan = ev.Plan(_split(settings["methods"]), _split(settings["selectors"]), ratios, settings["max_new_tokens"])
    names = ("top_n", "dtype", "device", "cache_dir")
    config = EngineConfig(embed=ev.embedder(settings["embedder"]), **{name: settings[name] for name in names})
    rows = []
    with Engine.from_pretrained(settings["model"], config=config) as engine:
        for data in settings["data"]:
            examples = ev.load_examples(data, settings["limit"], engine.count_tokens)
            typer.echo(f"{data}: {len(examples)} questions; {ev.precompute(engine, examples, show_progress=True)}")
            journal = None if out is None else out.with_name(out.name + ".jsonl")
            with tqdm(total=len(examples), desc=data, unit="question") as bar:
                rows += ev.run(engine, examples, plan, dataset=data, journal=journal, on_question=bar.update)
        default = engine.config.selector
    return {"rows": rows, "settings": {}, "default_selector": default, "machine": ev.machine()}


@app.command()
def report(
    results: Annotated[Path, typer.Argument(help="File written by `fusionrag bench quality --out`.")],
    plots: Annotated[Path | None, typer.Option(help="Directory of the plots; beside the results if not given.")] = None,
) -> None:
    """Print the table of a results file and draw quality against ratio and against time to first token."""
    from fusionrag_engine import FusionRAGError
    from fusionrag_engine.evaluation.report import plot

    try:
        rows = json.loads(results.read_text())["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _fail(f"{results} is not a results file ({type(error).__name__}: {error})") from error
    _print(rows)
    try:
        for path in plot(rows, plots or results.with_suffix("")):
            typer.echo(f"written: {path}")
    except FusionRAGError as error:
        raise _fail(str(error)) from error


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console

    from fusionrag_engine.evaluation.report import table

    console = Console()
    Console(width=max(console.width, 190)).print(table(rows))


def _fail(message: str) -> typer.Exit:
    typer.echo(f"error: {message}", err=True)
    return typer.Exit(1)
