"""`fusionrag ingest DIR`: a directory of texts into a workspace of nodes and chunk caches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .workspace import MINILM, NO_EMBEDDING, Settings, Workspace, fail, load_embedding

if TYPE_CHECKING:
    from chromadb.api.models.Collection import Collection
    from llama_index.core import Document

    from fusionrag_engine import Engine

SUFFIXES = (".md", ".markdown", ".txt", ".rst")
DEFAULTS = Settings(model="", embedding=MINILM, chunk_size=300, top_n=10)


def ingest(
    directory: Annotated[
        Path, typer.Argument(help="Directory of text and Markdown files; read with what is below it.")
    ],
    store: Annotated[Path, typer.Option(help="Directory of the workspace; made where it does not exist.")] = Path(
        "fusionrag"
    ),
    model: Annotated[str | None, typer.Option(help="Directory or Hub name of the language model.")] = None,
    embedding_model: Annotated[
        str | None,
        typer.Option(
            help=f'sentence-transformers model: a directory, a Hub name, "{MINILM}" (the default), or '
            f'"{NO_EMBEDDING}" for plain caches only.'
        ),
    ] = None,
    chunk_size: Annotated[int | None, typer.Option(help="Tokens a chunk at most; 300 by default.")] = None,
    top_n: Annotated[int | None, typer.Option(help="Neighbours a chunk is enriched with; 10 by default.")] = None,
    repair: Annotated[bool, typer.Option(help="Look at every chunk, for caches that are gone.")] = False,
) -> None:
    """Split, embed and cache a directory's documents. Run again, only what changed is computed."""
    if not directory.is_dir():
        raise fail(f"{str(directory)!r} is not a directory")
    workspace = Workspace(store)
    settings = _settings(workspace, model, embedding_model, chunk_size, top_n)
    documents = read_documents(directory)
    with workspace.open_engine(settings) as engine:
        is_other_engine = settings.namespace not in ("", engine.namespace)
        summary = run(workspace, engine, settings, documents, is_repair=repair or is_other_engine)
        workspace.write_settings(replace(settings, namespace=engine.namespace))
    typer.echo(summary)


def read_documents(directory: Path) -> list[Document]:
    """One document a file, named by its path below the directory."""
    from llama_index.core import Document

    documents = []
    for path in sorted(path for path in directory.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file()):
        name = path.relative_to(directory).as_posix()
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            typer.secho(f"{name} is left out: not UTF-8 ({error.reason})", err=True, fg=typer.colors.YELLOW)
            continue
        hidden = ["file"]
        documents.append(
            Document(
                text=text,
                doc_id=name,
                metadata={"file": name},
                excluded_llm_metadata_keys=hidden,
                excluded_embed_metadata_keys=hidden,
            )
        )
    return documents


def run(
    workspace: Workspace, engine: Engine, settings: Settings, documents: list[Document], *, is_repair: bool = False
) -> str:
    """Bring a workspace up to date with the documents, which are all that it is to hold; returns what was done."""
    from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
    from llama_index.core.node_parser import SentenceSplitter
    from llama_index.core.storage.docstore import SimpleDocumentStore

    from fusionrag_integrations.llama_index import FusionRAGChromaVectorStore, FusionRAGTransform

    path = workspace.docstore_path
    docstore = SimpleDocumentStore.from_persist_path(str(path)) if path.is_file() else SimpleDocumentStore()
    before = _hashes(docstore)
    collection = workspace.open_collection()
    transform = FusionRAGTransform.from_engine(engine, show_progress=True, is_strict=True)
    splitter = SentenceSplitter(
        chunk_size=settings.chunk_size, chunk_overlap=0, id_func=lambda index, node: f"{node.node_id}#{index}"
    )
    has_embedding = settings.embedding != NO_EMBEDDING
    steps = [load_embedding(settings.embedding), transform] if has_embedding else [transform, _placeholder()]
    pipeline = IngestionPipeline(
        transformations=[splitter, *steps],
        vector_store=FusionRAGChromaVectorStore.from_engine(engine, chroma_collection=collection),
        docstore=docstore,
        docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
        disable_cache=True,
    )
    pipeline.run(documents=documents)
    docstore.persist(str(path))
    after = _hashes(docstore)
    computed = _complete(transform, collection, has_embedding, is_needed=is_repair or after != before)
    return _summary(before, after, collection, engine, computed, has_embedding)


def _complete(transform: Any, collection: Collection, has_embedding: bool, *, is_needed: bool) -> str:
    """Make the caches that rows lack: chunks enriched with a document that is gone were left with plain ones."""
    if not is_needed:
        return "nothing changed, nothing computed"
    report = transform.last_report
    again = transform.backfill(collection, with_embeddings=has_embedding)
    if not again.num_computed:
        return str(report.summary())
    return f"{report.summary()}\nof chunks that did not change: {again.summary()}"


def _placeholder() -> Any:
    """Chroma wants an embedding a row, and the first one decides the size of all."""
    from llama_index.core.schema import BaseNode, TransformComponent

    class Placeholder(TransformComponent):
        @classmethod
        def class_name(cls) -> str:
            return "Placeholder"

        def __call__(self, nodes: Any, **_kwargs: Any) -> list[BaseNode]:
            for node in nodes:
                node.embedding = [1.0]
            return list(nodes)

    return Placeholder()


def _settings(
    workspace: Workspace, model: str | None, embedding: str | None, chunk_size: int | None, top_n: int | None
) -> Settings:
    """What was asked for, and otherwise what the workspace was made with."""
    known = workspace.read_settings()
    base = known or DEFAULTS
    settings = Settings(
        model=model or base.model,
        embedding=embedding or base.embedding,
        chunk_size=chunk_size or base.chunk_size,
        top_n=base.top_n if top_n is None else top_n,
        namespace=base.namespace,
    )
    if not settings.model:
        raise fail("the first ingestion needs --model, a directory or Hub name of a causal language model")
    if known is not None and settings.embedding != known.embedding:
        raise fail(
            f"{workspace.path} was made with --embedding-model {known.embedding}, and vectors of two models cannot be "
            f"compared; use that one, or another --store"
        )
    if known is not None and settings.chunk_size != known.chunk_size:
        raise fail(f"{workspace.path} was made with --chunk-size {known.chunk_size}; use that, or another --store")
    return settings


def _hashes(docstore: Any) -> dict[str, str]:
    """Hash of each document."""
    return {name: digest for digest, name in docstore.get_all_document_hashes().items()}


def _summary(
    before: dict[str, str],
    after: dict[str, str],
    collection: Collection,
    engine: Engine,
    computed: str,
    has_embedding: bool,
) -> str:
    num_new = len(after.keys() - before.keys())
    num_changed = sum(before[name] != after[name] for name in after.keys() & before.keys())
    num_gone = len(before.keys() - after.keys())
    lines = [
        f"{len(after)} documents ({num_new} new, {num_changed} changed, {num_gone} deleted) in "
        f"{collection.count()} chunks",
        computed,
        f"caches: {engine.stats()['disk_bytes'] / 1e6:.1f} MB",
    ]
    if not has_embedding:
        lines.append("no embedding model: chunks have plain caches only, and `fusionrag ask` cannot search them")
    return "\n".join(lines)
