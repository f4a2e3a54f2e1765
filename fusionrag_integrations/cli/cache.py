"""`fusionrag cache`: looking at stored chunk caches. What changes them is in `upkeep`, predictions are in `plan`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import upkeep
from .options import CacheDir, CatalogDir, Json, Namespace, RemoteDir, Scope
from .plan import plan
from .stored import choose_namespaces, config_of, fail, find_chunks, opened, show, size

if TYPE_CHECKING:
    from fusionrag_engine.catalog import ChunkRow
    from fusionrag_engine.library import ChunkLibrary

app = typer.Typer(no_args_is_help=True, help="Look at stored chunk caches, verify, sweep, refresh and remove them.")
for command in (upkeep.verify, upkeep.gc, upkeep.rm, upkeep.refresh, plan):
    app.command()(command)


@app.command("ls")
def list_caches(
    cache_dir: CacheDir,
    namespace: Namespace = None,
    scope: Scope = None,
    chunks: Annotated[bool, typer.Option("--chunks", help="List the chunks instead of the namespaces.")] = False,
    catalog_dir: CatalogDir = None,
    remote_dir: RemoteDir = None,
    is_json: Json = False,
) -> None:
    """List the namespaces of a cache directory (one a model, dtype, codec and system prompt), or their chunks."""
    config = config_of(cache_dir, catalog_dir, remote_dir)
    data: list[dict[str, Any]] = []
    for name in choose_namespaces(config, namespace):
        with opened(config, name) as library:
            data += _chunks(library, scope) if chunks else [_summary(library, name, scope)]
    if chunks:
        columns: tuple[str, ...] = ("key", "scope", "ids", "Tokens", "kind", "Bytes")
        rows: list[tuple[object, ...]] = [
            (
                row["key"][:12],
                repr(row["scope"]),
                ", ".join(row["ids"]),
                row["num_tokens"],
                row["kind"],
                size(row["bytes"]),
            )
            for row in data
        ]
    else:
        columns = ("namespace", "model", "dtype", "codec", "Chunks", "Enriched", "Bytes")
        rows = [
            (
                *(row["namespace"][:12], row["model"], row["dtype"], row["codec"], row["num_chunks"]),
                *(row["num_enriched_chunks"], size(sum(tier["num_bytes"] for tier in row["tiers"].values()))),
            )
            for row in data
        ]
    show(is_json, data, f"{len(data)} {'chunks' if chunks else 'namespaces'} in {cache_dir}", columns, rows)


@app.command("show")
def show_chunk(
    cache_dir: CacheDir,
    chunk: Annotated[str, typer.Argument(help="A chunk's id, or the beginning of its key.")],
    namespace: Namespace = None,
    scope: Scope = None,
    catalog_dir: CatalogDir = None,
    remote_dir: RemoteDir = None,
    is_json: Json = False,
) -> None:
    """Show everything known of one chunk: its caches, where they are, its neighbours."""
    config = config_of(cache_dir, catalog_dir, remote_dir)
    data = []
    for name in choose_namespaces(config, namespace):
        with opened(config, name) as library:
            data += [{"namespace": name, **_details(library, row)} for row in find_chunks(library, chunk, scope)]
    if not data:
        raise fail(f"no chunk has the id {chunk!r} or a key that begins so; see `fusionrag cache ls --chunks`")
    rows = [(name, value) for found in data for name, value in found.items()]
    show(is_json, data, f"{len(data)} chunks", ("field", "value"), rows)


@app.command()
def stats(
    cache_dir: CacheDir,
    namespace: Namespace = None,
    scope: Scope = None,
    catalog_dir: CatalogDir = None,
    remote_dir: RemoteDir = None,
    is_json: Json = False,
) -> None:
    """Count chunks by scope, and entries and bytes by tier."""
    config = config_of(cache_dir, catalog_dir, remote_dir)
    data, rows = [], []
    for name in choose_namespaces(config, namespace):
        with opened(config, name) as library:
            data.append(_summary(library, name, scope))
        rows += [
            (name[:12], "tier", tier, v["num_entries"], size(v["num_bytes"])) for tier, v in data[-1]["tiers"].items()
        ]
        rows += [(name[:12], "scope", repr(scope), count, "") for scope, count in data[-1]["scopes"].items()]
    show(is_json, data, f"Caches in {cache_dir}", ("namespace", "kind", "name", "Count", "Bytes"), rows)


def _summary(library: ChunkLibrary, namespace: str, scope: str | None) -> dict[str, Any]:
    catalog = library.catalog
    num_chunks, num_enriched = catalog.counts(scope)
    facts = {"model": "?", "dtype": "?", "codec": "?", **catalog.facts()}
    tiers = dict.fromkeys(tier.name for tier in library.store.durable)
    return {
        "namespace": namespace,
        **facts,
        "num_chunks": num_chunks,
        "num_enriched_chunks": num_enriched,
        "tiers": {name: dict(zip(("num_entries", "num_bytes"), catalog.totals(name), strict=True)) for name in tiers},
        "scopes": {name: catalog.counts(name)[0] for name in ([scope] if scope is not None else catalog.scopes())},
    }


def _chunks(library: ChunkLibrary, scope: str | None) -> list[dict[str, Any]]:
    sizes: dict[str, int] = {}
    for key, _, num_bytes in library.catalog.stored():
        sizes[key] = sizes.get(key, 0) + num_bytes
    return [
        {
            "key": row.key,
            "scope": row.scope,
            "ids": library.catalog.ids_of(row.key),
            "num_tokens": len(row.token_ids),
            "kind": "enriched" if row.enriched_key else "plain",
            "bytes": sizes.get(row.key, 0) + sizes.get(row.enriched_key or "", 0),
        }
        for row in library.catalog.all(scope)
    ]


def _details(library: ChunkLibrary, row: ChunkRow) -> dict[str, Any]:
    files = [
        {"kind": "plain" if key == row.key else "enriched", "tier": tier, "bytes": num_bytes}
        for key, tier, num_bytes in library.catalog.stored()
        if key in (row.key, row.enriched_key)
    ]
    added = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(library.catalog.added().get(row.key, 0.0)))
    return {
        "key": row.key,
        "scope": row.scope,
        "ids": library.catalog.ids_of(row.key),
        "num_tokens": len(row.token_ids),
        "ingested": added,
        "enriched_key": row.enriched_key,
        "top_n": row.top_n,
        "neighbours": list(row.neighbours),
        "went_into": [other.key for other in library.catalog.enriched_with(row.key)],
        "files": files,
    }
