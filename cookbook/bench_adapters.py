"""What the adapters add to a call: wall time of one call over nodes or documents, minus that of `Engine.generate` on
the very same request, on a tiny random model with prompts of real size.

All run in turn, so that the machine's noise meets all of them; medians are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fusionrag_engine import Engine, EngineConfig, Request
from fusionrag_integrations.llama_index import FusionRAGLLM, FusionRAGSynthesizer, FusionRAGTransform

HERE = Path(__file__).parent
QUESTION = "Who approves a purchase above 5,000?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default=HERE.parent / ".demo" / "models" / "SmolLM2-135M-Instruct")
    parser.add_argument("--chunks", type=int, default=10)
    parser.add_argument("--chunk-chars", type=int, default=1200, help="about 300 tokens")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    args = parser.parse_args()
    engine = Engine(tiny_model(), tokenizer(args.tokenizer), EngineConfig(max_new_tokens=4, recompute_ratio=0.0))
    texts = corpus(args.chunks, args.chunk_chars)
    calls = {**llama_index_calls(engine, texts), **langchain_calls(engine, texts)}
    figures = measure(calls, args.repeats)
    base = figures["engine.generate"]
    for name, milliseconds in figures.items():
        print(f"{name:32} {milliseconds:8.2f} ms {milliseconds - base:+8.2f} ms over engine.generate")
    if args.out:
        args.out.write_text(json.dumps({"milliseconds": figures, "chunks": args.chunks, "repeats": args.repeats}))
    engine.close()


def tiny_model() -> Any:
    """Two small random layers: the forward passes cost little, and the adapters' share shows."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
    )
    return LlamaForCausalLM(config).float().eval()


def tokenizer(directory: str | Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def corpus(num_chunks: int, num_chars: int) -> list[str]:
    text = "\n".join(path.read_text() for path in sorted((HERE / "corpus").glob("*.md")))
    return [text[number * num_chars : (number + 1) * num_chars] for number in range(num_chunks)]


def llama_index_calls(engine: Engine, texts: list[str]) -> dict[str, Callable[[], Any]]:
    """The same request by the engine, by the LLM, and by a synthesizer."""
    from llama_index.core.schema import NodeWithScore, TextNode

    from fusionrag_integrations.llama_index import default_text_qa_template

    nodes = FusionRAGTransform.from_engine(engine)([TextNode(text=text) for text in texts])
    scored = [NodeWithScore(node=node, score=1.0) for node in nodes]
    llm, template = FusionRAGLLM.from_engine(engine), default_text_qa_template(engine)
    synthesizer = FusionRAGSynthesizer(llm)
    return {
        "engine.generate": lambda: engine.generate(Request(QUESTION, texts)),
        "FusionRAGLLM.predict": lambda: llm.predict(template, query_str=QUESTION, retrieved_nodes=scored),
        "FusionRAGSynthesizer.synthesize": lambda: synthesizer.synthesize(QUESTION, scored),
    }


def langchain_calls(engine: Engine, texts: list[str]) -> dict[str, Callable[[], Any]]:
    """The same request by the chat model, and by a documents chain."""
    from langchain_core.documents import Document

    from fusionrag_integrations.langchain import ChatFusionRAG, create_fusion_documents_chain, default_prompt

    documents = [Document(text) for text in texts]
    model = ChatFusionRAG.from_engine(engine)
    chain = create_fusion_documents_chain(model, default_prompt(engine))
    return {
        "ChatFusionRAG.invoke": lambda: model.invoke(QUESTION, documents=documents),
        "create_fusion_documents_chain": lambda: chain.invoke({"context": documents, "input": QUESTION}),
    }


def measure(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each call."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in range(repeats + 3):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            if round_number >= 3:  # the first rounds warm up
                times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(values) for name, values in times.items()}


if __name__ == "__main__":
    main()
