"""Query engines, postprocessors and retrievers of LlamaIndex over chunk caches: engine x call style, whose answers at
ratio 1 are ordinary prefill's, and whose cache status is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from llama_index.core import QueryBundle, SummaryIndex, VectorStoreIndex
from llama_index.core.base.base_selector import BaseSelector, SelectorResult, SingleSelection
from llama_index.core.indices.query.query_transform import HyDEQueryTransform, StepDecomposeQueryTransform
from llama_index.core.postprocessor import (
    LLMRerank,
    LongContextReorder,
    SimilarityPostprocessor,
)
from llama_index.core.query_engine import (
    CitationQueryEngine,
    MultiStepQueryEngine,
    RetrieverQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
    TransformQueryEngine,
)
from llama_index.core.query_engine.citation_query_engine import CITATION_QA_TEMPLATE
from llama_index.core.question_gen.types import BaseQuestionGenerator, SubQuestion
from llama_index.core.retrievers import BaseRetriever, QueryFusionRetriever
from llama_index.core.retrievers.fusion_retriever import FUSION_MODES
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.tools import QueryEngineTool

from fusionrag_engine import Engine, Request
from fusionrag_integrations.explain import explain
from fusionrag_integrations.llama_index import FusionRAGLLM, FusionRAGSynthesizer, FusionRAGTransform
from tests.integrations.support import QUESTION, TEXTS, LetterEmbedding, settle, statuses, tiny_engine

STYLES = ["call", "stream", "async", "async_stream"]


@dataclass
class Rag:
    """An engine, and an index of nodes that were ingested with it."""

    engine: Engine
    index: Any
    nodes: list[TextNode]

    def llm(self, **settings: Any) -> FusionRAGLLM:
        return FusionRAGLLM.from_engine(self.engine, **settings)

    def synthesizer(self, style: str, template: Any = None, **settings: Any) -> FusionRAGSynthesizer:
        return FusionRAGSynthesizer(self.llm(**settings), streaming="stream" in style, text_qa_template=template)

    def retriever(self, top_k: int = 3) -> Any:
        return self.index.as_retriever(similarity_top_k=top_k)

    def over(self, style: str, retriever: Any = None, **settings: Any) -> RetrieverQueryEngine:
        return RetrieverQueryEngine(retriever or self.retriever(), self.synthesizer(style, **settings))


@pytest.fixture(scope="module")
def rag() -> Iterator[Rag]:
    """Tests only ask it."""
    engine = tiny_engine()
    embed = LetterEmbedding()
    nodes = [
        TextNode(
            text=text,
            id_=f"node-{number}",
            metadata={"file": f"{number}.md"},
            excluded_llm_metadata_keys=["file"],
            embedding=embed.get_text_embedding(text),
        )
        for number, text in enumerate(TEXTS)
    ]
    FusionRAGTransform.from_engine(engine)(nodes)
    yield Rag(engine, VectorStoreIndex(nodes, embed_model=embed), nodes)
    engine.close()


async def query(engine: Any, style: str) -> tuple[str, Any]:
    """Answer and response in one of four styles."""
    response = await engine.aquery(QUESTION) if style.startswith("async") else engine.query(QUESTION)
    if style == "stream":
        return "".join(response.response_gen), response
    if style == "async_stream":
        return "".join([token async for token in response.async_response_gen()]), response
    return response.response, response


def shown(response: Any) -> list[str]:
    """Status of each chunk, and no reason but for misses."""
    rows = explain(response).rows
    assert all((row.reason is not None) == (row.status == "miss") for row in rows)
    return [row.status for row in rows]


HITS = ["prefix", "enriched", "enriched"]


class Fixed(BaseSelector):
    """Chooses engines by number."""

    def __init__(self, *indices: int) -> None:
        self.indices = indices

    def _select(self, choices: Any, query: QueryBundle) -> SelectorResult:
        return SelectorResult(selections=[SingleSelection(index=index, reason="given") for index in self.indices])

    async def _aselect(self, choices: Any, query: QueryBundle) -> SelectorResult:
        return self._select(choices, query)

    def _get_prompts(self) -> dict[str, Any]:
        return {}

    def _update_prompts(self, prompts: dict[str, Any]) -> None:
        pass


class Split(BaseQuestionGenerator):
    """Two sub-questions, whatever the question."""

    def generate(self, tools: Any, query: QueryBundle) -> list[SubQuestion]:
        return [SubQuestion(sub_question=f"{query.query_str} {n}", tool_name=tools[0].name) for n in range(2)]

    async def agenerate(self, tools: Any, query: QueryBundle) -> list[SubQuestion]:
        return self.generate(tools, query)

    def _get_prompts(self) -> dict[str, Any]:
        return {}

    def _update_prompts(self, prompts: dict[str, Any]) -> None:
        pass


def tool(engine: Any) -> QueryEngineTool:
    return QueryEngineTool.from_defaults(engine, name="handbook", description="The handbook.")


def citation(rag: Rag, style: str, **settings: Any) -> Any:
    synthesizer = rag.synthesizer(style, CITATION_QA_TEMPLATE, **settings)
    return CitationQueryEngine(rag.retriever(), rag.llm(), response_synthesizer=synthesizer)


def sub_question(rag: Rag, style: str, **settings: Any) -> Any:
    return SubQuestionQueryEngine.from_defaults(
        [tool(rag.over("call", **settings))],
        llm=rag.llm(),
        question_gen=Split(),
        response_synthesizer=rag.synthesizer(style, **settings),
        use_async=False,
    )


def router(rag: Rag, style: str, **settings: Any) -> Any:
    return RouterQueryEngine(Fixed(0), [tool(rag.over(style, **settings))], llm=rag.llm())


def transformed(rag: Rag, style: str, **settings: Any) -> Any:
    """HyDE asks the LLM for a passage, over no nodes."""
    return TransformQueryEngine(rag.over(style, **settings), HyDEQueryTransform(rag.llm()))


def multi_step(rag: Rag, style: str, **settings: Any) -> Any:
    return MultiStepQueryEngine(
        rag.over("call", **settings),
        StepDecomposeQueryTransform(rag.llm()),
        response_synthesizer=rag.synthesizer(style, **settings),
        num_steps=2,
        early_stopping=False,
    )


# What the caches do below: an engine of LlamaIndex -> (how it is made, status of each chunk of its prompts).
ENGINES: dict[str, tuple[Any, list[str]]] = {
    "retriever": (lambda rag, style, **settings: rag.over(style, **settings), HITS),
    "citation": (citation, ["enriched"] * 3),  # its template begins differently
    "router": (router, HITS),
    "transform": (transformed, HITS),
    "sub_question": (sub_question, ["miss"] * 2),  # the answers of the sub-questions, of which each had hits
    "multi_step": (multi_step, HITS * 2),
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", ENGINES)
async def test_every_engine_answers_from_caches(rag: Rag, name: str, style: str) -> None:
    make, expected = ENGINES[name]
    before = rag.engine.stats()
    ours, response = await query(make(rag, style, recompute_ratio=1.0), style)
    settle(rag.engine)
    after = rag.engine.stats()
    assert shown(response) == expected
    full, _ = await query(make(rag, style, method="full"), style)
    assert ours == full
    assert after["num_prefix"] + after["num_enriched"] > before["num_prefix"] + before["num_enriched"]
    assert after["num_chunks"] == len(TEXTS), "nothing that was made for a question is stored"


def test_a_citation_is_the_text_llama_index_renders(rag: Rag) -> None:
    """Numbers stand beside the chunks, which are the cached texts."""
    requests: list[Request] = []
    own = rag.engine.stream
    rag.engine.stream = lambda request: (requests.append(request), own(request))[1]  # type: ignore[method-assign]
    try:
        response = citation(rag, "call").query(QUESTION)
    finally:
        del rag.engine.stream  # type: ignore[method-assign]
    (request,) = requests
    assert [chunk.text for chunk in request.chunks] == [  # type: ignore[union-attr]
        node.node.get_content().split("\n", 1)[1].removesuffix("\n") for node in response.source_nodes
    ]
    assert request.text_around is not None
    assert request.text_around[0].endswith("Source 1:\n")
    assert request.text_around[1] == f"\n{rag.engine.config.chunk_separator}Source 2:\n"
    assert [chunk.text in TEXTS for chunk in request.chunks] == [True] * 3  # type: ignore[union-attr]


def test_a_citation_that_splits_its_sources_is_explained(rag: Rag) -> None:
    synthesizer = rag.synthesizer("call", CITATION_QA_TEMPLATE)
    engine = CitationQueryEngine(
        rag.retriever(1), rag.llm(), response_synthesizer=synthesizer, citation_chunk_size=8, citation_chunk_overlap=0
    )
    response = engine.query(QUESTION)
    rows = explain(response).rows
    assert len(rows) > 1
    assert all("the text differs from what was cached" in (row.reason or "") for row in rows)


def test_a_router_over_several_engines_combines_their_answers(rag: Rag) -> None:
    engine = RouterQueryEngine(
        Fixed(0, 1), [tool(rag.over("call")), tool(rag.over("call", rag.retriever(2)))], llm=rag.llm()
    )
    before = rag.engine.stats()
    assert engine.query(QUESTION).response is not None  # type: ignore[union-attr]
    after = rag.engine.stats()
    assert after["num_prefix"] - before["num_prefix"] == 2
    assert after["num_enriched"] - before["num_enriched"] == 2 + 1


class Keywords(BaseRetriever):
    """The other half of a hybrid: nodes with words of the question, without embeddings."""

    def __init__(self, nodes: Sequence[TextNode]) -> None:
        super().__init__()
        self.nodes = nodes

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        words = set(query_bundle.query_str.lower().split())
        found = [
            NodeWithScore(node=node, score=float(len(words & set(node.get_content().lower().split()))))
            for node in self.nodes
        ]
        return sorted(found, key=lambda item: -(item.score or 0))[:3]


@pytest.mark.parametrize("mode", list(FUSION_MODES))
def test_fused_and_hybrid_retrievers(rag: Rag, mode: Any) -> None:
    fused = QueryFusionRetriever(
        [rag.retriever(), Keywords(rag.nodes)],
        llm=rag.llm(),
        num_queries=2,
        similarity_top_k=4,
        mode=mode,
        use_async=False,
    )
    response = rag.over("call", fused).query(QUESTION)
    assert shown(response) == ["prefix", "enriched", "enriched", "enriched"]


def test_a_retriever_without_scores(rag: Rag) -> None:
    response = rag.over("call", SummaryIndex(list(rag.nodes)).as_retriever()).query(QUESTION)
    assert shown(response) == ["prefix", *["enriched"] * (len(TEXTS) - 1)]


@pytest.mark.parametrize("style", ["call", "async"])
async def test_postprocessors_that_choose_and_reorder(rag: Rag, style: str) -> None:
    """They keep the text, so the caches are found wherever a node lands."""

    def parse(_answer: str, num_choices: int) -> tuple[list[int], list[float]]:
        return [3, 1], [9.0, 4.0]  # what a larger model would answer

    best = rag.index.as_retriever(similarity_top_k=5).retrieve(QUESTION)
    order = [item.node.node_id for item in best]
    chains: list[tuple[list[Any], list[str]]] = [
        ([LongContextReorder()], [order[index] for index in (0, 2, 4, 3, 1)]),
        ([SimilarityPostprocessor(similarity_cutoff=best[2].score)], order[:3]),
        ([LLMRerank(llm=rag.llm(), parse_choice_select_answer_fn=parse)], [order[2], order[0]]),
    ]
    for postprocessors, expected in chains:
        engine = RetrieverQueryEngine(
            rag.index.as_retriever(similarity_top_k=5), rag.synthesizer("call"), node_postprocessors=postprocessors
        )
        response = await engine.aquery(QUESTION) if style == "async" else engine.query(QUESTION)
        assert list(statuses(response)) == expected
        assert list(statuses(response).values()) == ["prefix", *["enriched"] * (len(expected) - 1)]
