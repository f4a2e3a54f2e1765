"""`fusionrag ask QUESTION`: an answer over what `fusionrag ingest` put into a workspace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .workspace import NO_EMBEDDING, Workspace, fail, load_embedding


def ask(
    question: Annotated[str, typer.Argument(help="The question.")],
    store: Annotated[Path, typer.Option(help="Directory of the workspace.")] = Path("fusionrag"),
    top_k: Annotated[int, typer.Option(min=1, help="Chunks to retrieve.")] = 5,
    max_tokens: Annotated[int, typer.Option(min=1, help="Length limit of the answer.")] = 128,
    method: Annotated[str, typer.Option(help='"fusionrag", "reuse" or "full" (ordinary prefill).')] = "fusionrag",
    show: Annotated[bool, typer.Option("--explain", help="Show what the cache did.")] = False,
) -> None:
    """Answer a question from the ingested documents."""
    workspace = Workspace(store)
    settings = workspace.read_settings()
    if settings is None:
        raise fail(f"{str(store)!r} holds nothing; run `fusionrag ingest DIR --store {store}` first")
    if settings.embedding == NO_EMBEDDING:
        raise fail(f"{str(store)!r} was made without an embedding model, so it cannot be searched")
    if method not in ("fusionrag", "reuse", "full"):
        raise fail(f"--method {method!r} is not accepted; choose fusionrag, reuse or full")
    from llama_index.core import VectorStoreIndex

    from fusionrag_integrations.explain import explain
    from fusionrag_integrations.llama_index import FusionRAGChromaVectorStore, FusionRAGLLM, FusionRAGSynthesizer

    with workspace.open_engine(settings) as engine:
        nodes = FusionRAGChromaVectorStore.from_engine(engine, chroma_collection=workspace.open_collection())
        index = VectorStoreIndex.from_vector_store(nodes, embed_model=load_embedding(settings.embedding))
        llm = FusionRAGLLM.from_engine(engine, max_new_tokens=max_tokens, method=method)
        synthesizer = FusionRAGSynthesizer(llm, streaming=True)
        response = index.as_query_engine(llm=llm, response_synthesizer=synthesizer, similarity_top_k=top_k).query(
            question
        )
        for piece in response.response_gen:  # type: ignore[union-attr]
            typer.echo(piece, nl=False)
        typer.echo()
        if show:
            typer.echo(f"\n{explain(response)}")
