"""What the `cache` commands share: a cache directory opened without a model, tables, JSON, sizes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from fusionrag_engine import EngineConfig
    from fusionrag_engine.catalog import ChunkRow
    from fusionrag_engine.library import ChunkLibrary


def size(num_bytes: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def show(is_json: bool, data: Any, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print `data` as JSON, or `rows` as a table."""
    if is_json:
        typer.echo(json.dumps(data, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for column in columns:
        table.add_column(column, justify="left" if column.islower() else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    typer.echo(title)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def fail(message: str) -> typer.Exit:
    """Say what is wrong; raise what is returned."""
    typer.echo(f"Error: {message}", err=True)
    return typer.Exit(1)


def config_of(cache_dir: str, catalog_dir: Path | None, remote_dir: str | None) -> EngineConfig:
    from fusionrag_engine import EngineConfig

    return EngineConfig(cache_dir=cache_dir, catalog_dir=catalog_dir, remote_dir=remote_dir, host_bytes=0)


def choose_namespaces(config: EngineConfig, wanted: str | None) -> list[str]:
    """Namespaces below a cache directory whose name begins as wanted (None: all).

    Raises:
        typer.Exit: there is none.
    """
    from fusionrag_engine.opening import catalog_directory, namespaces

    directory = catalog_directory(config)
    found = [] if directory is None else namespaces(directory)
    chosen = [name for name in found if name.startswith(wanted or "")]
    if not chosen:
        known = ", ".join(name[:12] for name in found) or "none"
        raise fail(f"no caches{f' of namespace {wanted!r}' if wanted else ''} in {directory}; namespaces: {known}")
    return chosen


def choose_one(config: EngineConfig, wanted: str | None) -> str:
    """The only namespace that fits; `typer.Exit` where several do."""
    chosen = choose_namespaces(config, wanted)
    if len(chosen) > 1:
        raise fail(f"several namespaces fit; give --namespace: {', '.join(name[:12] for name in chosen)}")
    return chosen[0]


@contextmanager
def opened(config: EngineConfig, namespace: str) -> Iterator[ChunkLibrary]:
    """The library of one namespace, without a model: everything but computing."""
    from fusionrag_engine.keys import CacheKeys
    from fusionrag_engine.opening import open_library

    library = open_library(CacheKeys.of(namespace), config)
    try:
        yield library
    finally:
        library.close()


def find_chunks(library: ChunkLibrary, name: str, scope: str | None) -> list[ChunkRow]:
    """Chunks that an id names, or whose key begins so."""
    keys = {key for _, key in library.catalog.keys_of(name, scope)}
    return [
        row
        for row in library.catalog.all(scope)
        if row.key in keys or (not keys and len(name) >= 6 and row.key.startswith(name))
    ]
