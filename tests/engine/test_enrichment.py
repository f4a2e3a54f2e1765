"""Enriched rows are those of eq. 10 (FusionRAG, arXiv 2601.12904, section 3.1), written out by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusionrag_engine import Chunk, Engine, Request
from fusionrag_engine.store import Entry
from tests.engine.support import assert_differs, assert_same, documents, eager_copy, full, ring, tiny_model
from tests.tiny_models import ARCHITECTURES

MakeEngine = Callable[..., Engine]
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def _plain(engine: Engine, chunk: Chunk) -> Entry:
    entry = engine.library.plain(engine.layout.tokenize(chunk.text), chunk.scope)
    assert entry is not None
    return entry


def _enriched(engine: Engine, chunk: Chunk) -> Entry:
    entry = engine.library.enriched(engine.layout.tokenize(chunk.text), chunk.scope, engine.config.top_n)
    assert entry is not None
    return entry


@torch.inference_mode()
def _own_rows(architecture: str, token_ids: list[int]) -> tuple[Tensor, Tensor]:
    """Keys and values `[layers, heads, tokens, dim]` of a whole sequence, as the eager model computes them."""
    output = eager_copy(tiny_model(architecture))(input_ids=torch.tensor([token_ids]), use_cache=True)
    stored = getattr(output, "cache", None) or output.past_key_values
    layers = [(layer.keys[0], layer.values[0]) for layer in stored.layers]
    return torch.stack([keys for keys, _ in layers]), torch.stack([values for _, values in layers])


@pytest.mark.parametrize("architecture", ["llama", "llama_yarn", "phi3", "qwen3", "olmo2", "smollm3"])
def test_plain_rows_are_those_of_the_chunk_behind_the_prefix(make_engine: MakeEngine, architecture: str) -> None:
    engine = make_engine(architecture)
    (chunk,) = documents(1)
    engine.precompute([chunk])
    prefix, tokens = engine.layout.prefix_ids, engine.layout.tokenize(chunk.text)
    keys, values = _own_rows(architecture, [*prefix, *tokens])
    entry = _plain(engine, chunk)
    assert entry.start == len(prefix)
    assert_same(entry.keys, keys[:, :, len(prefix) :])
    assert_same(entry.values, values[:, :, len(prefix) :])


@pytest.mark.parametrize("architecture", ["llama", "llama_yarn", "phi3", "qwen3", "olmo2", "smollm3"])
def test_rows_enriched_with_one_neighbour_are_those_behind_prefix_and_neighbour(
    make_engine: MakeEngine, architecture: str
) -> None:
    """With a single neighbour nothing is approximate: its plain cache behind `P` is exact."""
    engine = make_engine(architecture)
    chunk, neighbour = documents(2)
    engine.precompute([chunk, neighbour], neighbours=[[1], []])
    prefix = engine.layout.prefix_ids
    behind = [*prefix, *engine.layout.tokenize(neighbour.text)]
    keys, values = _own_rows(architecture, [*behind, *engine.layout.tokenize(chunk.text)])
    entry = _enriched(engine, chunk)
    assert entry.start == len(behind)
    assert_same(entry.keys, keys[:, :, len(behind) :])
    assert_same(entry.values, values[:, :, len(behind) :])
    assert_differs(entry.values, _plain(engine, chunk).values)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_enriched_with_several_neighbours_are_those_behind_their_plain_rows(
    make_engine: MakeEngine, architecture: str
) -> None:
    """`P`, then each neighbour's plain rows moved to consecutive positions, then the chunk."""
    from fusionrag_engine.runner import Rows

    engine = make_engine(architecture)
    chunks = documents(4)
    engine.precompute(chunks, neighbours=[[2, 1, 3], [], [], []])
    runner, prefix = engine.runner, engine.layout.prefix_ids
    tokens = engine.layout.tokenize(chunks[0].text)
    entries = [_plain(engine, chunks[index]) for index in (2, 1, 3)]
    start = len(prefix) + sum(len(entry.token_ids) for entry in entries)
    canvas = runner.canvas(start + len(tokens))
    runner.forward([Rows(runner.tensor(prefix), runner.tensor(range(len(prefix))), canvas)])
    inv_freq, position = engine._precomputer.rope.inv_freq, len(prefix)
    for entry in entries:
        stop = position + len(entry.token_ids)
        canvas.keys[:, :, position:stop] = _rotate(entry.keys, inv_freq, position - entry.start)
        canvas.values[:, :, position:stop] = entry.values
        position = stop
    runner.forward([Rows(runner.tensor(tokens), runner.tensor(range(start, start + len(tokens))), canvas)])
    ours = _enriched(engine, chunks[0])
    assert ours.start == start
    assert_same(ours.keys, canvas.keys[:, :, start:])
    assert_same(ours.values, canvas.values[:, :, start:])


def _rotate(keys: Tensor, inv_freq: Tensor, offset: int) -> Tensor:
    """Each pair (d, d + half) as a complex number, turned by `offset * inv_freq`."""
    half = inv_freq.shape[1]
    pairs = torch.complex(keys[..., :half].double(), keys[..., half : 2 * half].double())
    turn = torch.polar(torch.ones_like(inv_freq.double()), inv_freq.double() * offset)[:, None, None, :]
    turned = pairs * turn
    return torch.cat([turned.real, turned.imag, keys[..., 2 * half :].double()], -1).float()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_prompt_in_the_very_order_of_enrichment_needs_no_recomputation(
    make_engine: MakeEngine, architecture: str
) -> None:
    """Chunk 1 enriched with chunk 0, and asked for behind it without a separator: exact at r = 0."""
    engine = make_engine(architecture, chunk_separator="")
    chunks = documents(2)
    engine.precompute(chunks, neighbours=[[], [0]])
    request = Request("Who?", chunks, recompute_ratio=0.0)
    ours = engine.prefill(request)
    assert ours.stats.chunk_status == ["prefix", "enriched"]
    assert ours.stats.num_recomputed_tokens == 0
    assert_same(ours.logits, full(engine, request).logits)
    reuse = Request("Who?", chunks, method="reuse")
    assert_differs(engine.prefill(reuse).logits, full(engine, reuse).logits, 1e-3)


def test_neighbours_that_do_not_fit_into_the_context_are_left_out(make_engine: MakeEngine) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    from tests.tiny_models import SIZES

    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, "max_position_embeddings": 95})).eval()
    engine = make_engine(model=model)
    chunks = [Chunk("Z" * size) for size in (20, 60, 15, 12)]
    assert [engine.count_tokens(chunk.text) for chunk in chunks] == [20, 60, 15, 12]
    room = 95 - len(engine.layout.prefix_ids) - 20
    records = engine.precompute(chunks, neighbours=[[1, 2, 3], [], [], []]).records
    assert 15 + 12 <= room < 60
    assert records[0].neighbours == (records[2].key, records[3].key)


def test_the_report_counts_what_was_computed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    report = engine.precompute(documents(4), neighbours=ring(4))
    tokens = sum(engine.count_tokens(chunk.text) for chunk in documents(4))
    assert report.num_plain_computed == report.num_enriched_computed == 4
    assert report.num_tokens_computed == 2 * tokens
    assert report.num_computed == 8
    assert [record.num_tokens for record in report.records] == [
        engine.count_tokens(chunk.text) for chunk in documents(4)
    ]
    assert report.duration_s > 0
