"""The root of the `fusionrag` command: each group of subcommands is added here."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from . import bench, cache
from .ask import ask
from .ingest import ingest

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
app.add_typer(bench.app, name="bench")
app.add_typer(cache.app, name="cache")


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"fusionrag-integrations {version('fusionrag-integrations')}")
        raise typer.Exit


@app.callback()
def fusionrag(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Enriched chunk caches for retrieval-augmented generation."""


app.command()(ingest)
app.command()(ask)
