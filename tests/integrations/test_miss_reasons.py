"""Why a node missed, and what a question may and may not store: text that is no longer what was cached."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core import QueryBundle
from llama_index.core.node_parser import SentenceWindowNodeParser
from llama_index.core.postprocessor import MetadataReplacementPostProcessor
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import Document, NodeWithScore, TextNode

from fusionrag_engine import Chunk, Engine, Request
from fusionrag_integrations.explain import NOT_EXACT, explain
from fusionrag_integrations.llama_index import FusionRAGLLM, FusionRAGSynthesizer, FusionRAGTransform
from fusionrag_integrations.misses import NO_RECORD
from tests.integrations.support import QUESTION, TEXTS, LetterEmbedding, settle, statuses


def ingested(engine: Engine, hidden: tuple[str, ...] = ("note",), **settings: Any) -> list[NodeWithScore]:
    """Nodes with records and metadata, as a retriever returns them."""
    embed = LetterEmbedding()
    nodes = [
        TextNode(
            text=text,
            id_=f"node-{number}",
            metadata={"file": f"{number}.md", "note": "internal"},
            excluded_llm_metadata_keys=list(hidden),
            embedding=embed.get_text_embedding(text),
        )
        for number, text in enumerate(TEXTS[:3])
    ]
    FusionRAGTransform.from_engine(engine, **settings)(nodes)
    return [NodeWithScore(node=node, score=1.0 - number / 10) for number, node in enumerate(nodes)]


def ask(engine: Engine, nodes: list[NodeWithScore], **settings: Any) -> Any:
    return FusionRAGSynthesizer(FusionRAGLLM.from_engine(engine, **settings)).synthesize(QUESTION, nodes)


def reason(response: Any, node_id: str = "node-1") -> str:
    """Why the node was a miss; the others must not be."""
    missed = {row.id: row.reason for row in explain(response).rows if row.status == "miss"}
    assert list(missed) == [node_id]
    return missed[node_id] or ""


def replace_text(node: Any) -> None:
    node.set_content("Another text altogether.")


def add_metadata(node: Any) -> None:
    node.metadata["section"] = "2.1"


def show_hidden_metadata(node: Any) -> None:
    node.excluded_llm_metadata_keys = [key for key in node.excluded_llm_metadata_keys if key != "note"]


def hide_shown_metadata(node: Any) -> None:
    node.excluded_llm_metadata_keys = [*node.excluded_llm_metadata_keys, "file"]


def hide_all_metadata(node: Any) -> None:
    """What was cached had both keys."""
    node.excluded_llm_metadata_keys = [*node.excluded_llm_metadata_keys, "file", "note"]


def keep_original_aside(node: Any) -> None:
    node.metadata["original_text"] = node.text
    node.excluded_llm_metadata_keys = [*node.excluded_llm_metadata_keys, "original_text"]
    node.set_content(f"Before. {node.text} After.")


CHANGES: list[tuple[Callable[[Any], None], str]] = [
    (
        replace_text,
        r"differs from what was cached \(\d+ tokens then, \d+ now\): a postprocessor, query engine or templ",
    ),
    (add_metadata, "metadata 'section' reaches the prompt now"),
    (show_hidden_metadata, "metadata 'note' reaches the prompt now"),
    (hide_shown_metadata, "metadata 'file' is excluded from the prompt now"),
    (hide_all_metadata, "metadata mode 'embed', the prompt has 'llm'"),
    (keep_original_aside, r"a postprocessor replaced it; what was cached is metadata\['original_text'\] now"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=[change.__name__ for change, _ in CHANGES])
def test_the_reason_says_what_changed(engine: Engine, change: Callable[[Any], None], message: str) -> None:
    nodes = ingested(engine, () if change is hide_all_metadata else ("note",))
    change(nodes[1].node)
    response = ask(engine, nodes)
    assert re.search(message, reason(response)), reason(response)
    assert reason(response) in str(explain(response))


@pytest.mark.parametrize("score", [0.5, None])
def test_nodes_that_were_never_ingested_are_named(engine: Engine, score: float | None) -> None:
    nodes = ingested(engine)
    nodes[1] = NodeWithScore(node=TextNode(text="never seen", id_="new"), score=score)
    assert reason(ask(engine, nodes), "new") == NO_RECORD
    settle(engine)
    is_stored = engine.has(Chunk("never seen")).key is not None
    assert is_stored == (score is not None), "what no retriever found was made for this question, and stays nobody's"


def test_another_scope_is_named(engine: Engine) -> None:
    nodes = ingested(engine, scope="team")
    rows = explain(ask(engine, nodes)).rows
    assert {row.status for row in rows} == {"miss"}
    assert "cached in scope 'team', asked for in scope ''" in (rows[0].reason or "")
    settle(engine)
    assert not engine.has(Chunk(TEXTS[0])).key, "deletion by the record's scope would leave it behind"
    assert "miss" not in statuses(ask(engine, nodes, scope="team")).values()


def test_another_engine_is_named(engine: Engine, make_engine: Callable[..., Engine]) -> None:
    nodes = ingested(make_engine(system_prompt="Be long."))
    rows = explain(ask(engine, nodes)).rows
    assert all("another model, tokenizer, dtype, codec or system prompt" in (row.reason or "") for row in rows)


def test_a_cache_that_is_gone_is_named(engine: Engine) -> None:
    nodes = ingested(engine)
    engine.delete(["node-1"])
    assert "its file is gone" in reason(ask(engine, nodes))


def test_a_full_prefill_has_no_misses_to_explain(engine: Engine) -> None:
    rows = explain(ask(engine, ingested(engine), method="full")).rows
    assert {row.reason for row in rows} == {"method 'full' uses no cache"}


def test_a_template_of_ones_own_is_noted(engine: Engine) -> None:
    nodes = ingested(engine)
    assert explain(ask(engine, nodes)).notes == []
    template = PromptTemplate("Notes: {context_str}\n{query_str}")
    llm = FusionRAGLLM.from_engine(engine)
    response = FusionRAGSynthesizer(llm, text_qa_template=template).synthesize(QUESTION, nodes)
    assert explain(response).notes == [NOT_EXACT]
    twice = PromptTemplate("{context_str} {context_str}\n{query_str}")
    response = FusionRAGSynthesizer(llm, text_qa_template=twice).synthesize(QUESTION, nodes)
    assert explain(response).rows == []
    assert "exactly once; chunk caches are not used" in str(explain(response))
    assert response.metadata["fusionrag"]["stats"]["num_reused_tokens"] == 0


def test_replaced_text_does_not_take_the_place_of_what_was_cached(engine: Engine) -> None:
    """Stored under the node's name, it would drop the node's own cache, and every cache enriched with it."""
    nodes = ingested(engine)
    before = engine.stats()
    replaced = [NodeWithScore(node=node.node.model_copy(deep=True), score=node.score) for node in nodes]
    replace_text(replaced[1].node)
    for _ in range(2):
        assert statuses(ask(engine, replaced))["node-1"] == "miss"
        settle(engine)
    after = engine.stats()
    assert {name: after[name] for name in ("num_chunks", "num_enriched_chunks")} == {
        name: before[name] for name in ("num_chunks", "num_enriched_chunks")
    }
    assert "miss" not in statuses(ask(engine, nodes)).values()


def test_sentence_windows_are_computed_and_their_sentences_stay_cached(engine: Engine) -> None:
    """The whole way through LlamaIndex's own parser and postprocessor."""
    parser = SentenceWindowNodeParser.from_defaults(window_size=1)
    nodes = parser.get_nodes_from_documents([Document(text=" ".join(TEXTS[:3]))])
    for node in nodes:
        node.embedding = LetterEmbedding().get_text_embedding(node.get_content())
    FusionRAGTransform.from_engine(engine)(nodes)
    scored = [NodeWithScore(node=node, score=1.0) for node in nodes]
    assert "miss" not in statuses(ask(engine, scored)).values()
    replacement = MetadataReplacementPostProcessor(target_metadata_key="window")
    windows = replacement.postprocess_nodes(
        [NodeWithScore(node=node.model_copy(deep=True), score=1.0) for node in nodes], QueryBundle(QUESTION)
    )
    response = ask(engine, windows, recompute_ratio=1.0)
    for row in explain(response).rows:
        assert row.status == "miss"
        assert "metadata['original_text']" in (row.reason or "")
    texts = [node.node.get_content() for node in windows]
    assert str(response) == engine.generate(Request(QUESTION, texts, method="full")).text
    settle(engine)
    assert "miss" not in statuses(ask(engine, scored)).values()
