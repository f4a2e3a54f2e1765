"""Arguments and options that the `cache` commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

CacheDir = Annotated[str, typer.Argument(help="The engine's cache_dir: a directory or an fsspec URL.")]
CatalogDir = Annotated[Path | None, typer.Option(help="The engine's catalog_dir, where cache_dir is a URL.")]
RemoteDir = Annotated[str | None, typer.Option(help="The engine's remote_dir, where it has one.")]
Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="Only this namespace; a beginning will do.")]
Scope = Annotated[str | None, typer.Option(help="Only this scope.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed or computed.")]
