"""`FusionRAGSynthesizer`: whole nodes, all of them, in as few prompts as the context allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.llms import MockLLM
from llama_index.core.prompts import PromptTemplate, RichPromptTemplate
from llama_index.core.response_synthesizers import CompactAndRefine, ResponseMode, get_response_synthesizer
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from fusionrag_engine import ConfigError, ContextOverflowError, Engine, Request
from fusionrag_integrations.llama_index import FusionRAGLLM, FusionRAGSynthesizer, FusionRAGTransform
from fusionrag_integrations.llama_index.synthesizer import STRUCTURED
from tests.integrations.support import QUESTION, TEXTS, patch_forward, scored_nodes, statuses

STYLES = ["call", "stream", "async", "async_stream"]


async def synthesize(synthesizer: FusionRAGSynthesizer, style: str, nodes: list[NodeWithScore]) -> tuple[str, Any]:
    """Answer and response in one of four styles."""
    synthesizer._streaming = "stream" in style
    if style == "call":
        response: Any = synthesizer.synthesize(QUESTION, nodes)
        return response.response, response
    if style == "stream":
        response = synthesizer.synthesize(QUESTION, nodes)
        return "".join(response.response_gen), response
    response = await synthesizer.asynthesize(QUESTION, nodes)
    if style == "async":
        return response.response, response
    return "".join([token async for token in response.async_response_gen()]), response


def crowded(make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, room: int) -> Engine:
    """An engine whose context is small."""
    engine = make_engine()
    monkeypatch.setattr(engine, "max_context", room)
    return engine


@pytest.mark.parametrize("style", STYLES)
async def test_all_nodes_reach_the_model_whole(engine: Engine, style: str) -> None:
    FusionRAGTransform.from_engine(engine)([node.node for node in scored_nodes()])
    answer, response = await synthesize(FusionRAGSynthesizer.from_engine(engine), style, scored_nodes())
    assert answer == engine.generate(Request(QUESTION, TEXTS)).text
    assert statuses(response) == {"node-0": "prefix", **{f"node-{number}": "plain" for number in range(1, 5)}}
    info = response.metadata["fusionrag"]
    assert info["stats"] == info["calls"][-1]
    assert info["stats"]["num_reused_tokens"] > 0
    assert info["groups"] == [[f"node-{number}" for number in range(5)]]
    assert info["dropped_nodes"] == []
    assert [node.node.node_id for node in response.source_nodes] == [f"node-{number}" for number in range(5)]
    assert response.metadata["node-0"] == scored_nodes()[0].node.metadata, "LlamaIndex's own entries stay"


@pytest.mark.parametrize("style", STYLES)
async def test_too_many_nodes_are_refined_over_groups_of_whole_nodes(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, style: str
) -> None:
    engine = crowded(make_engine, monkeypatch, 200)
    FusionRAGTransform.from_engine(engine)([node.node for node in scored_nodes()])
    answer, response = await synthesize(FusionRAGSynthesizer.from_engine(engine), style, scored_nodes())
    info = response.metadata["fusionrag"]
    assert answer
    assert len(info["groups"]) > 1
    assert [node_id for group in info["groups"] for node_id in group] == [f"node-{number}" for number in range(5)]
    assert len(info["calls"]) == len(info["groups"])
    assert all(call["num_prompt_tokens"] + 8 <= 200 for call in info["calls"]), "each prompt has room for its answer"
    assert "miss" not in statuses(response).values(), "whole nodes keep their caches"


MODES = ["compact", "refine", "tree_summarize", "simple_summarize"]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("room", [4096, 200])
async def test_every_mode_at_ratio_1_is_ordinary_prefill(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, style: str, mode: str, room: int
) -> None:
    """In one prompt where all nodes fit, else over several; each node is asked whole, once, and is a hit."""
    engine = crowded(make_engine, monkeypatch, room)
    FusionRAGTransform.from_engine(engine)([node.node for node in scored_nodes()])
    answers = []
    for settings in ({"method": "full"}, {"recompute_ratio": 1.0}):
        synthesizer = FusionRAGSynthesizer(FusionRAGLLM.from_engine(engine, **settings), response_mode=mode)
        answer, response = await synthesize(synthesizer, style, scored_nodes())
        answers.append(answer)
    assert answers[0] == answers[1]
    info = response.metadata["fusionrag"]
    names = [f"node-{number}" for number in range(5)]
    dropped = [entry["node_id"] for entry in info["dropped_nodes"]]
    assert sorted([name for group in info["groups"] for name in group] + dropped) == names
    assert set(statuses(response)) == set(names) - set(dropped)
    assert "miss" not in statuses(response).values()
    num_groups = len(info["groups"])
    if mode == "refine":
        assert num_groups == 5
    elif mode == "simple_summarize":
        assert num_groups == 1
        assert bool(dropped) == (room == 200)
    else:
        assert (num_groups > 1) == (room == 200)
    assert len(info["calls"]) == num_groups + (mode == "tree_summarize" and num_groups > 1)
    assert all(call["num_prompt_tokens"] + 8 <= room for call in info["calls"])


def test_simple_leaves_out_the_lowest_scores_first(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = crowded(make_engine, monkeypatch, 200)
    nodes = scored_nodes()
    nodes[0].score, nodes[3].score = 0.01, None
    info = FusionRAGSynthesizer.from_engine(engine, response_mode="simple_summarize").synthesize(QUESTION, nodes)
    dropped = [entry["node_id"] for entry in info.metadata["fusionrag"]["dropped_nodes"]]
    assert dropped[:2] == ["node-3", "node-0"]
    assert "the nodes have" in info.metadata["fusionrag"]["dropped_nodes"][0]["reason"]


def test_a_tree_goes_on_until_one_answer_is_left(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty nodes, a few a prompt; their answers again a few a prompt."""
    engine = crowded(make_engine, monkeypatch, 150)
    texts = [f"Note {number}: {text}" for number in range(4) for text in TEXTS]
    llm = FusionRAGLLM.from_engine(engine, max_new_tokens=16)
    response = FusionRAGSynthesizer(llm, response_mode="tree_summarize").synthesize(QUESTION, scored_nodes(texts))
    info = response.metadata["fusionrag"]
    over_answers = [call for call in info["calls"] if not call["chunk_status"]]
    assert len(info["calls"]) - len(over_answers) == len(info["groups"]) > 3
    assert len(over_answers) > 2, "two levels at least"
    assert info["calls"][-1] is over_answers[-1]


def test_a_tree_that_cannot_shrink_says_so(make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = crowded(make_engine, monkeypatch, 140)
    monkeypatch.setattr(FusionRAGLLM, "predict", lambda *_args, **_settings: "a long answer " * 8)
    llm = FusionRAGLLM.from_engine(engine, max_new_tokens=8)
    with pytest.raises(ContextOverflowError, match=r"no two of 3 partial answers.*lower max_new_tokens"):
        FusionRAGSynthesizer(llm, response_mode="tree_summarize").synthesize(QUESTION, scored_nodes())


def test_unknown_modes_are_refused(engine: Engine) -> None:
    with pytest.raises(ConfigError, match=r"response_mode='accumulate'.*tree_summarize"):
        FusionRAGSynthesizer.from_engine(engine, response_mode="accumulate")
    assert FusionRAGSynthesizer.from_engine(engine, response_mode=ResponseMode.REFINE)._mode == "refine"


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("mode", MODES)
async def test_with_another_llm_every_mode_is_llama_indexs(style: str, mode: Any) -> None:
    ours = FusionRAGSynthesizer(MockLLM(), response_mode=mode)
    theirs: Any = get_response_synthesizer(llm=MockLLM(), response_mode=mode)
    assert (await synthesize(ours, style, scored_nodes()))[0] == (await synthesize(theirs, style, scored_nodes()))[0]


@pytest.mark.parametrize("style", STYLES)
async def test_rich_templates_and_partials(engine: Engine, style: str) -> None:
    FusionRAGTransform.from_engine(engine)([node.node for node in scored_nodes()])
    template = RichPromptTemplate(
        "{% chat role='system' %}{{ tone }}. Use: {{ context_str }}{% endchat %}"
        "{% chat role='user' %}{{ query_str }}{% endchat %}"
    ).partial_format(tone="Kindly")
    answers = []
    for settings in ({"method": "full"}, {"recompute_ratio": 1.0}):
        synthesizer = FusionRAGSynthesizer(FusionRAGLLM.from_engine(engine, **settings), text_qa_template=template)
        answer, response = await synthesize(synthesizer, style, scored_nodes())
        answers.append(answer)
    assert answers[0] == answers[1]
    assert set(statuses(response).values()) == {"plain"}


def test_the_prompts_are_filled(make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """The count of a prompt is exact: one token less of context is one group more."""
    engine = make_engine()
    synthesizer = FusionRAGSynthesizer.from_engine(engine)
    needed = synthesizer.synthesize(QUESTION, scored_nodes()).metadata["fusionrag"]["stats"]["num_prompt_tokens"]
    exact = needed + engine.config.max_new_tokens + 1  # 1: the BOS that this model does not want
    for room, num_groups in ((exact, 1), (exact - 1, 2)):
        monkeypatch.setattr(engine, "max_context", room)
        info = synthesizer.synthesize(QUESTION, scored_nodes()).metadata["fusionrag"]
        assert len(info["groups"]) >= num_groups
        assert (len(info["groups"]) == 1) == (num_groups == 1)


def test_a_node_that_never_fits_is_left_out_and_named(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = crowded(make_engine, monkeypatch, 200)
    nodes = [*scored_nodes(), NodeWithScore(node=TextNode(text="long " * 300, id_="long"), score=0.1)]
    info = FusionRAGSynthesizer.from_engine(engine).synthesize(QUESTION, nodes).metadata["fusionrag"]
    (dropped,) = info["dropped_nodes"]
    assert dropped["node_id"] == "long"
    assert "tokens" in dropped["reason"]
    assert "long" not in {entry["node_id"] for entry in info["nodes"]}


@pytest.mark.parametrize("room", [60, 10])
def test_where_no_node_fits_the_error_says_so(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """LlamaIndex would answer "Empty Response"."""
    engine = crowded(make_engine, monkeypatch, room)
    with pytest.raises(ContextOverflowError, match=f"context of {room} tokens.*max_new_tokens"):
        FusionRAGSynthesizer.from_engine(engine).synthesize(QUESTION, scored_nodes())


def test_refining_shows_the_answer_so_far(make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = crowded(make_engine, monkeypatch, 200)
    prompts: list[Any] = []
    own = engine.stream

    def watched(request: Request) -> Any:
        prompts.append(request)
        return own(request)

    monkeypatch.setattr(engine, "stream", watched)
    llm = FusionRAGLLM.from_engine(engine, max_new_tokens=4, method="full")
    synthesizer = FusionRAGSynthesizer(
        llm, refine_template=PromptTemplate("So far: <{existing_answer}>\n{context_msg}\n{query_str}")
    )
    synthesizer.synthesize(QUESTION, scored_nodes())
    first, second = prompts[:2]
    assert f"So far: <{engine.generate(first).text}>" in second.text_around[0]


async def test_without_nodes_the_answer_is_llama_indexs(engine: Engine) -> None:
    for style in ("call", "stream", "async", "async_stream"):
        answer, response = await synthesize(FusionRAGSynthesizer.from_engine(engine), style, [])
        assert answer == "Empty Response"
        assert response.metadata["fusionrag"]["nodes"] == []


@pytest.mark.parametrize("style", STYLES)
async def test_with_another_llm_it_is_compact_and_refine(style: str) -> None:
    template = PromptTemplate("{context_str}|{query_str}")
    ours = FusionRAGSynthesizer(MockLLM(), text_qa_template=template)
    theirs: Any = CompactAndRefine(llm=MockLLM(), text_qa_template=template)
    answer, response = await synthesize(ours, style, scored_nodes())
    assert answer == (await synthesize(theirs, style, scored_nodes()))[0]
    assert TEXTS[0] in answer
    assert response.metadata["fusionrag"]["stats"] is None


class JsonLLM(FusionRAGLLM):
    """Answers with JSON, whatever it is asked: a tiny model cannot."""

    def chat(self, messages: Any, **kwargs: Any) -> Any:
        response = super().chat(messages, **kwargs)
        response.message.content = '{"text": "at noon"}'
        return response

    async def achat(self, messages: Any, **kwargs: Any) -> Any:
        response = await super().achat(messages, **kwargs)
        response.message.content = '{"text": "at noon"}'
        return response


class Answer(BaseModel):
    text: str


@pytest.mark.parametrize("mode", ["compact", "refine", "tree_summarize", "simple_summarize"])
async def test_structured_output_takes_llama_indexs_path(engine: Engine, mode: str) -> None:
    """The class is asked for, so the answer must not silently be a string."""
    synthesizer = FusionRAGSynthesizer(
        JsonLLM.from_engine(engine), output_cls=None if mode == "simple_summarize" else Answer, response_mode=mode
    )
    for response in (
        synthesizer.synthesize(QUESTION, scored_nodes(TEXTS[:2])),
        await synthesizer.asynthesize(QUESTION, scored_nodes(TEXTS[:2])),
    ):
        if mode == "simple_summarize":  # LlamaIndex's has no structured output at all
            assert response.response == '{"text": "at noon"}'
            assert response.metadata["fusionrag"]["notes"] == []
        else:
            assert response.response == Answer(text="at noon")
            assert response.metadata["fusionrag"]["notes"] == [STRUCTURED]


def test_templates_are_read_and_replaced_by_their_names(engine: Engine) -> None:
    synthesizer = FusionRAGSynthesizer.from_engine(engine)
    assert set(synthesizer.get_prompts()) == {"text_qa_template", "refine_template"}
    template = PromptTemplate("Read {context_str} and say: {query_str}")
    synthesizer.update_prompts({"text_qa_template": template})
    assert synthesizer.get_prompts()["text_qa_template"].template == template.template  # type: ignore[attr-defined]
    assert {"text_qa_template", "refine_template"} <= set(FusionRAGSynthesizer(MockLLM()).get_prompts())
    tree = FusionRAGSynthesizer.from_engine(engine, response_mode="tree_summarize")
    assert set(tree.get_prompts()) == {"summary_template"}
    tree.update_prompts({"summary_template": template})
    used = tree.synthesize(QUESTION, scored_nodes()).metadata["fusionrag"]["stats"]["num_prompt_tokens"]
    whole = "\n\n".join(TEXTS)
    rendered = engine.render_chat([{"role": "user", "content": f"Read {whole} and say: {QUESTION}"}])
    assert abs(used - engine.count_tokens(rendered)) < 12, "pieces are tokenized apart"
    simple = FusionRAGSynthesizer.from_engine(engine, response_mode="simple_summarize")
    assert set(simple.get_prompts()) == {"text_qa_template"}


def test_partial_variables_travel_to_the_template(engine: Engine) -> None:
    template = PromptTemplate("In a {tone} tone. {context_str} {query_str}")
    synthesizer = FusionRAGSynthesizer.from_engine(engine, text_qa_template=template)
    formal = synthesizer.synthesize(QUESTION, scored_nodes(), tone="formal").metadata["fusionrag"]["stats"]
    short = synthesizer.synthesize(QUESTION, scored_nodes(), tone="x").metadata["fusionrag"]["stats"]
    assert formal["num_prompt_tokens"] > short["num_prompt_tokens"]


def test_query_bundles_and_additional_sources_are_accepted(engine: Engine) -> None:
    extra = NodeWithScore(node=TextNode(text="extra", id_="extra"))
    response = FusionRAGSynthesizer.from_engine(engine).synthesize(
        QueryBundle(QUESTION), scored_nodes(TEXTS[:1]), additional_source_nodes=[extra]
    )
    assert [node.node.node_id for node in response.source_nodes] == ["node-0", "extra"]


def test_an_engine_error_is_raised_not_answered(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise TypeError("a library changed")

    patch_forward(monkeypatch, engine, broken)
    with pytest.raises(RuntimeError, match="a library changed"):
        FusionRAGSynthesizer.from_engine(engine).synthesize(QUESTION, scored_nodes())
