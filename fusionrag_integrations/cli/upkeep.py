"""`fusionrag cache verify | gc | rm | refresh`: looking after stored chunk caches. Only `refresh` loads a model."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import CacheDir, CatalogDir, DryRun, Json, Namespace, RemoteDir, Scope
from .stored import choose_namespaces, choose_one, config_of, fail, find_chunks, opened, show, size

if TYPE_CHECKING:
    from fusionrag_engine import Engine


def verify(
    cache_dir: CacheDir,
    namespace: Namespace = None,
    repair: Annotated[bool, typer.Option("--repair", help="Forget what is bad, so that it is computed again.")] = False,
    catalog_dir: CatalogDir = None,
    remote_dir: RemoteDir = None,
    is_json: Json = False,
) -> None:
    """Read every stored cache and check it; bad files are moved aside. Leaves with status 1 if there were any."""
    config = config_of(cache_dir, catalog_dir, remote_dir)
    data: list[dict[str, Any]] = []
    for name in choose_namespaces(config, namespace):
        with opened(config, name) as library:
            data += [{"namespace": name, **asdict(problem)} for problem in library.verify(can_repair=repair)]
    rows = [(row["key"][:12], row["kind"], repr(row["scope"]), row["tier"], row["reason"]) for row in data]
    show(is_json, data, f"{len(data)} problems in {cache_dir}", ("key", "kind", "scope", "tier", "reason"), rows)
    if data:
        raise typer.Exit(1)


def gc(
    cache_dir: CacheDir,
    namespace: Namespace = None,
    chroma: Annotated[Path | None, typer.Option(help="Embedded Chroma whose records say what is wanted.")] = None,
    collection: Annotated[str, typer.Option(help="Its collection of nodes, or of records.")] = "fusionrag_caches",
    grace_s: Annotated[float, typer.Option(help="Chunks ingested or used so lately stay, in seconds.")] = 3600.0,
    dry_run: DryRun = False,
    catalog_dir: CatalogDir = None,
    remote_dir: RemoteDir = None,
    is_json: Json = False,
) -> None:
    """Remove files that belong to no chunk; with --chroma also chunks that no record there refers to."""
    config = config_of(cache_dir, catalog_dir, remote_dir)
    live = None
    names = choose_namespaces(config, namespace)
    if chroma is not None:
        names = [choose_one(config, namespace)]
        live = _chroma_keys(chroma, collection)
    data: list[dict[str, Any]] = []
    for name in names:
        with opened(config, name) as library:
            swept = library.gc(live, grace_s, is_dry_run=dry_run)
        found = {"chunks": swept.chunks, "files": swept.files, "leftovers": list(map(str, swept.leftovers))}
        data.append({"namespace": name, **found, "num_bytes": swept.num_bytes, "dry_run": dry_run})
    rows = [
        (row["namespace"][:12], *(len(row[kind]) for kind in ("chunks", "files", "leftovers")), size(row["num_bytes"]))
        for row in data
    ]
    columns = ("namespace", "Chunks", "Files", "Leftovers", "Bytes")
    show(is_json, data, "Would be removed" if dry_run else "Removed", columns, rows)


def rm(
    cache_dir: CacheDir,
    chunks: Annotated[list[str] | None, typer.Argument(help="Ids, or beginnings of keys.")] = None,
    namespace: Namespace = None,
    scope: Scope = None,
    remove_all: Annotated[bool, typer.Option("--all", help="Every chunk of the namespace, or of --scope.")] = False,
    dry_run: DryRun = False,
    catalog_dir: CatalogDir = None,
    remote_dir: RemoteDir = None,
    is_json: Json = False,
) -> None:
    """Remove chunks, with every enriched cache made with them; those fall back to plain until a refresh."""
    if bool(chunks) == remove_all:
        raise fail("give chunks, or --all")
    config = config_of(cache_dir, catalog_dir, remote_dir)
    data: list[dict[str, Any]] = []
    for name in choose_namespaces(config, namespace):
        with opened(config, name) as library:
            found = (
                library.catalog.all(scope)
                if remove_all
                else [r for c in chunks or [] for r in find_chunks(library, c, scope)]
            )
            for row in {row.key: row for row in found}.values():
                touched = [other.key for other in library.catalog.enriched_with(row.key)]
                num_caches = 0 if dry_run else library.delete(row.scope, row.key, None)
                entry = {"key": row.key, "scope": row.scope, "fall_back_to_plain": touched, "num_caches": num_caches}
                data.append({"namespace": name, **entry, "dry_run": dry_run})
    if not data and not remove_all:
        raise fail(f"no chunk has an id, or a key that begins, as in {chunks}; see `fusionrag cache ls --chunks`")
    rows = [
        (row["namespace"][:12], row["key"][:12], repr(row["scope"]), len(row["fall_back_to_plain"])) for row in data
    ]
    columns = ("namespace", "key", "scope", "Fall back to plain")
    show(is_json, data, f"{len(data)} chunks {'would be ' if dry_run else ''}removed", columns, rows)


def refresh(
    cache_dir: CacheDir,
    model: Annotated[str, typer.Option(help="Directory or Hub name of the model that the caches are of.")],
    namespace: Namespace = None,
    scope: Scope = None,
    budget: Annotated[int | None, typer.Option(help="Chunks to enrich at most.")] = None,
    budget_s: Annotated[float | None, typer.Option(help="Begin no more after so many seconds.")] = None,
    dry_run: DryRun = False,
    catalog_dir: CatalogDir = None,
    remote_dir: RemoteDir = None,
    is_json: Json = False,
) -> None:
    """Enrich chunks again whose best neighbours changed, or that lost one; the most changed first."""
    from fusionrag_engine import Engine, EngineConfig

    where = config_of(cache_dir, catalog_dir, remote_dir)
    name = choose_one(where, namespace)
    before = choose_namespaces(where, None)
    with opened(where, name) as library:
        facts = library.catalog.facts()
    settings = ("dtype", "codec", "top_n", "keep_plain", "system_prompt", "chat_template_kwargs")
    config = EngineConfig(
        cache_dir=cache_dir,
        catalog_dir=catalog_dir,
        remote_dir=remote_dir,
        **{setting: facts[setting] for setting in settings},
    )
    with Engine.from_pretrained(model, config=config) as engine:
        if engine.library.keys.namespace != name:
            _remove_if_empty(engine, before)
            raise fail(
                f"{model} is not the model, or has not the tokenizer, that made the caches of {facts['model']!r}"
            )
        report = engine.refresh(
            budget=budget, budget_s=budget_s, scope=scope, show_progress=not is_json, dry_run=dry_run
        )
    stale: list[dict[str, Any]] = [
        {"key": chunk.row.key, "scope": chunk.row.scope, "change": chunk.change} for chunk in report.stale
    ]
    data = {"num_refreshed": report.num_refreshed, "num_left": report.num_left, "stale": stale, "dry_run": dry_run}
    rows = [(chunk["key"][:12], repr(chunk["scope"]), f"{chunk['change']:.0%}") for chunk in stale]
    show(is_json, data, report.summary(), ("key", "scope", "Changed"), rows)


def _remove_if_empty(engine: Engine, before: list[str]) -> None:
    """Take away the namespace that opening an engine on the wrong model made."""
    from fusionrag_engine.opening import catalog_directory

    directory, name = catalog_directory(engine.config), engine.library.keys.namespace
    if directory is not None and name not in before and engine.stats()["num_chunks"] == 0:
        shutil.rmtree(directory / name)


def _chroma_keys(path: Path, collection: str) -> set[str]:
    """Keys that the records of an existing collection refer to."""
    import chromadb
    from chromadb.config import Settings
    from chromadb.errors import NotFoundError

    from fusionrag_integrations.chroma import ChromaCacheIndex

    if not path.is_dir():
        raise fail(f"there is no Chroma at {path}")
    client = chromadb.PersistentClient(str(path), settings=Settings(anonymized_telemetry=False))
    try:
        return ChromaCacheIndex(client.get_collection(collection, embedding_function=None)).keys()
    except NotFoundError:
        known = ", ".join(found.name for found in client.list_collections())
        raise fail(f"there is no collection {collection!r} at {path}; there are: {known}") from None
