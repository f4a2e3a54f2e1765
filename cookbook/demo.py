"""The demo: a company's documents are ingested once, then questions are answered twice - by ordinary prefill and by
FusionRAG.

LlamaIndex splits and embeds the documents, `FusionRAGTransform` computes their enriched chunk caches, Chroma holds the
nodes and cache records. Run again, everything is found in the cache. The report is also written as JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STATE = HERE.parent / ".demo"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=STATE / "models" / "SmolLM2-135M-Instruct", help="directory or Hub name")
    parser.add_argument("--corpus", type=Path, default=HERE / "corpus", help="directory of Markdown files")
    parser.add_argument("--questions", type=Path, default=HERE / "questions.json")
    parser.add_argument("--limit", type=int, default=5, help="questions to ask")
    parser.add_argument("--state", type=Path, default=STATE, help="where Chroma, the caches and the report are kept")
    args = parser.parse_args()
    quiet()

    from rich.console import Console

    console = Console(width=110)
    console.print(f"[bold]1. Loading[/] {Path(args.model).name} and MiniLM embeddings")
    rag = build(args.model, args.state)
    console.print(f"[bold]2. Ingesting[/] {args.corpus}")
    console.print(f"   {ingest(rag, args.corpus)}")
    console.print("[bold]3. Asking[/], first by ordinary prefill, then by FusionRAG over the cached chunks\n")
    questions = json.loads(args.questions.read_text())[: args.limit]
    report = [ask(rag, item["question"]) for item in questions]
    for row in report:
        show(console, row)
    show_summary(console, report)
    path = args.state / "report.json"
    path.write_text(json.dumps({"model": str(args.model), "questions": report}, indent=1))
    console.print(f"Written: {path}")
    rag["engine"].close()


def quiet() -> None:
    """Keep other libraries' progress bars and notices out of the demo's output."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("sentence_transformers").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning)


def build(model: str | Path, state: Path, top_k: int = 8) -> dict[str, Any]:
    """Engine, embeddings, Chroma-backed index and the transformations, all kept below `state`."""
    import chromadb
    from embeddings import MiniLMEmbedding
    from llama_index.core import VectorStoreIndex
    from llama_index.core.node_parser import SentenceSplitter

    from fusionrag_engine import Engine, EngineConfig
    from fusionrag_integrations.llama_index import FusionRAGChromaVectorStore, FusionRAGTransform

    state.mkdir(parents=True, exist_ok=True)
    engine = Engine.from_pretrained(model, config=EngineConfig(cache_dir=state / "caches", top_n=4))
    embedding = MiniLMEmbedding()
    client = chromadb.PersistentClient(str(state / "chroma"), settings=chromadb.Settings(anonymized_telemetry=False))
    collection = client.get_or_create_collection("handbook")
    store = FusionRAGChromaVectorStore.from_engine(engine, chroma_collection=collection)
    index = VectorStoreIndex.from_vector_store(store, embed_model=embedding)
    transform = FusionRAGTransform.from_engine(engine, show_progress=True)
    splitter = SentenceSplitter(chunk_size=300, chunk_overlap=0, id_func=lambda i, node: f"{node.node_id}-{i}")
    return {
        "engine": engine,
        "embedding": embedding,
        "store": store,
        "index": index,
        "transform": transform,
        "transformations": [splitter, embedding, transform],
        "top_k": top_k,
    }


def ingest(rag: dict[str, Any], corpus: Path) -> str:
    """Put every document through the pipeline into Chroma; returns what the cache had to do."""
    from llama_index.core import Document
    from llama_index.core.ingestion import IngestionPipeline

    documents = [
        Document(
            text=path.read_text(),
            doc_id=path.stem,
            metadata={"file": path.name},
            excluded_llm_metadata_keys=["file"],
            excluded_embed_metadata_keys=["file"],
        )
        for path in sorted(corpus.glob("*.md"))
    ]
    pipeline = IngestionPipeline(transformations=rag["transformations"], vector_store=rag["store"], disable_cache=True)
    nodes = pipeline.run(documents=documents)
    return f"{len(documents)} documents, {len(nodes)} chunks. {rag['transform'].last_report.summary()}"


def ask(rag: dict[str, Any], question: str) -> dict[str, Any]:
    """Answer a question by both methods, through the same LlamaIndex query engine."""
    full = query(rag, question, "full")
    fusion = query(rag, question, "fusionrag")
    return {
        "question": question,
        "answer_full": full["answer"],
        "answer_fusionrag": fusion["answer"],
        "ttft_full_s": full["stats"]["ttft_s"],
        "ttft_fusionrag_s": fusion["stats"]["ttft_s"],
        "stats_full": full["stats"],
        "stats": fusion["stats"],
    }


def query(rag: dict[str, Any], question: str, method: str) -> dict[str, Any]:
    """One query-engine call; the engine's stats come back in the response's metadata."""
    from fusionrag_integrations.llama_index import FusionRAGLLM, FusionRAGSynthesizer

    llm = FusionRAGLLM.from_engine(rag["engine"], max_new_tokens=32, method=method)
    query_engine = rag["index"].as_query_engine(
        llm=llm, response_synthesizer=FusionRAGSynthesizer(llm=llm), similarity_top_k=rag["top_k"]
    )
    response = query_engine.query(question)
    return {"answer": str(response).strip(), "stats": response.metadata["fusionrag"]["stats"]}


def show(console: Any, row: dict[str, Any]) -> None:
    """A question, its two answers, and where the time went."""
    from rich.table import Table

    table = Table(title=row["question"], title_justify="left", title_style="bold", show_edge=False)
    for name in ("", "TTFT s", "load", "place", "select", "prefill", "decode", "reused", "recomputed", "computed"):
        table.add_column(name, justify="left" if not name else "right")
    for name, stats in (("ordinary prefill", row["stats_full"]), ("FusionRAG", row["stats"])):
        parts = ("ttft", "load", "assemble", "select", "prefill", "decode")
        times = [f"{stats[f'{part}_s']:.2f}" for part in parts]
        counts = [str(stats[f"num_{part}_tokens"]) for part in ("reused", "recomputed", "computed")]
        table.add_row(name, *times, *counts)
    console.print(table)
    same = "the same answer" if row["answer_full"] == row["answer_fusionrag"] else "the answers differ"
    status = row["stats"]["chunk_status"]
    chunks = ", ".join(f"{status.count(kind)} {kind}" for kind in dict.fromkeys(status))
    console.print(f"  ordinary prefill: {row['answer_full']}", markup=False)
    console.print(f"  FusionRAG:        {row['answer_fusionrag']}", markup=False)
    console.print(f"  {same}; {row['ttft_full_s'] / row['ttft_fusionrag_s']:.1f}x sooner; chunks: {chunks}\n")


def show_summary(console: Any, report: list[dict[str, Any]]) -> None:
    full = sum(row["ttft_full_s"] for row in report)
    fusion = sum(row["ttft_fusionrag_s"] for row in report)
    same = sum(row["answer_full"] == row["answer_fusionrag"] for row in report)
    console.print(
        f"[bold]{len(report)} questions: {full / len(report):.2f} s to the first token by ordinary prefill, "
        f"{fusion / len(report):.2f} s by FusionRAG: {full / fusion:.1f}x sooner; {same} of {len(report)} answers "
        f"word for word the same.[/]"
    )


if __name__ == "__main__":
    main()
