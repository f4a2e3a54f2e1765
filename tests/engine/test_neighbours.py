"""Which chunks a chunk is enriched with: by embeddings, by given lists, or by the config's embedding function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fusionrag_engine import Chunk, ConfigError, Engine, Request
from tests.engine.support import documents, ring

MakeEngine = Callable[..., Engine]


def _embeddings(count: int, dim: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)


def _most_similar(vectors: np.ndarray, own: int, top_n: int) -> list[int]:
    """By cosine, written out."""
    similarity = {
        other: float(vectors[own] @ vectors[other] / np.linalg.norm(vectors[own]) / np.linalg.norm(vectors[other]))
        for other in range(len(vectors))
        if other != own
    }
    return sorted(similarity, key=lambda other: -similarity[other])[:top_n]


def test_embeddings_choose_the_most_similar_by_cosine(make_engine: MakeEngine) -> None:
    engine = make_engine(top_n=3)
    vectors = _embeddings(7) * np.arange(1, 8)[:, None]  # lengths do not matter
    records = engine.precompute(documents(7), embeddings=vectors).records
    for own, record in enumerate(records):
        assert list(record.neighbours) == [records[other].key for other in _most_similar(vectors, own, 3)]


@pytest.mark.parametrize("convert", [np.ndarray.tolist, torch.from_numpy, lambda array: array.astype(np.float64), list])
def test_embeddings_may_be_any_array(make_engine: MakeEngine, convert: Callable[[Any], Any]) -> None:
    report = make_engine().precompute(documents(3), embeddings=convert(_embeddings(3)))
    assert report.num_enriched_computed == 3


BAD_EMBEDDINGS = {
    "too few rows": _embeddings(2),
    "too many rows": _embeddings(4),
    "one dimension": _embeddings(3)[:, 0],
    "three dimensions": _embeddings(3)[:, :, None],
    "no columns": np.zeros((3, 0), dtype=np.float32),
    "NaN": np.where(np.arange(24).reshape(3, 8) == 9, np.nan, 1.0),
    "infinite": np.where(np.arange(24).reshape(3, 8) == 9, np.inf, 1.0),
    "a zero row": _embeddings(3) * np.array([[1], [0], [1]]),
    "rows of different lengths": [[1.0, 2.0], [1.0], [2.0, 3.0]],
    "words": [["a"], ["b"], ["c"]],
    "a bad row beside none": [None, [1.0, float("nan")], [1.0, 2.0]],
    "too many rows, some none": [None, [1.0, 2.0], [2.0, 1.0], [1.0, 1.0]],
}


@pytest.mark.parametrize("name", BAD_EMBEDDINGS)
def test_bad_embeddings_are_named_errors_and_store_nothing(make_engine: MakeEngine, name: str) -> None:
    engine = make_engine()
    with pytest.raises(ConfigError, match="embeddings"):
        engine.precompute(documents(3), embeddings=BAD_EMBEDDINGS[name])
    assert engine.stats()["num_chunks"] == 0


def test_a_bad_row_is_named(make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match=r"\[1\]"):
        make_engine().precompute(documents(3), embeddings=BAD_EMBEDDINGS["a zero row"])


def test_a_bad_row_keeps_its_number_beside_rows_that_are_none(make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match=r"chunks \[2\] are zero"):
        make_engine().precompute(documents(3), embeddings=[[1.0, 2.0], None, [0.0, 0.0]])


def test_a_chunk_without_an_embedding_gets_a_plain_cache_and_is_nobodys_neighbour(make_engine: MakeEngine) -> None:
    """The others are enriched as if it were not there."""
    vectors = _embeddings(5)
    report = make_engine(top_n=4).precompute(documents(5), embeddings=[*vectors[:2], None, *vectors[3:]])
    assert [record.kind for record in report.records] == ["enriched", "enriched", "plain", "enriched", "enriched"]
    without = report.records[2].key
    assert all(without not in record.neighbours and len(record.neighbours) in (0, 3) for record in report.records)
    assert report.can_enrich


def test_without_any_embedding_there_are_plain_caches(make_engine: MakeEngine) -> None:
    report = make_engine().precompute(documents(2), embeddings=[None, None])
    assert [record.kind for record in report.records] == ["plain", "plain"]
    assert "plain caches only" in report.summary()


def test_of_duplicates_the_one_with_an_embedding_counts(make_engine: MakeEngine) -> None:
    first, second, third = documents(3)
    twin = Chunk(first.text, id="twin")
    report = make_engine().precompute([first, twin, second, third], embeddings=[None, *_embeddings(3)])
    assert {record.kind for record in report.records} == {"enriched"}


def test_neighbours_may_be_indices_or_ids(make_engine: MakeEngine) -> None:
    by_index, by_id = make_engine(), make_engine()
    one = by_index.precompute(documents(3), neighbours=[[1, 2], [0], [1]]).records
    two = by_id.precompute(documents(3), neighbours=[["doc-1", "doc-2"], ["doc-0"], [np.int64(1)]]).records
    assert one == two
    assert one[0].neighbours == (one[1].key, one[2].key)


def test_ids_of_chunks_ingested_earlier_are_neighbours(make_engine: MakeEngine) -> None:
    engine = make_engine()
    earlier = engine.precompute(documents(2)).records
    record = engine.precompute([Chunk("New.", id="new")], neighbours=[["doc-1", "doc-0"]]).records[0]
    assert record.neighbours == (earlier[1].key, earlier[0].key)


BAD_NEIGHBOURS: dict[str, tuple[list[Any], str]] = {
    "too few lists": ([[1], [0]], "2 neighbour lists for 3 chunks"),
    "an index too high": ([[3], [], []], "out of range"),
    "a negative index": ([[-1], [], []], "out of range"),
    "an unknown id": ([["nobody"], [], []], "nobody"),
}


@pytest.mark.parametrize("name", BAD_NEIGHBOURS)
def test_bad_neighbours_are_named_errors(make_engine: MakeEngine, name: str) -> None:
    lists, message = BAD_NEIGHBOURS[name]
    with pytest.raises(ConfigError, match=message):
        make_engine().precompute(documents(3), neighbours=lists)


def test_embeddings_and_neighbours_together_are_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match="one of them"):
        make_engine().precompute(documents(2), embeddings=_embeddings(2), neighbours=[[1], [0]])


def test_only_the_first_top_n_of_a_given_list_are_used(make_engine: MakeEngine) -> None:
    records = make_engine(top_n=2).precompute(documents(5), neighbours=[[3, 1, 4, 2], [], [], [], []]).records
    assert records[0].neighbours == (records[3].key, records[1].key)
    assert records[1].kind == "plain"


def test_no_chunk_is_its_own_neighbour_nor_that_of_a_duplicate(make_engine: MakeEngine) -> None:
    """Copies differ in white space: other tokens, other caches, the same content."""
    chunks = [Chunk("One two three."), Chunk("One  two three. "), Chunk("One\ntwo three."), Chunk("Something else.")]
    for arguments in (
        {"neighbours": [[0, 1, 2, 3]] * 4},
        {"embeddings": [[1, 0], [1, 0], [1, 0.001], [0.3, 1]]},
    ):
        records = make_engine().precompute(chunks, **arguments).records
        keys = [record.key for record in records]
        assert len(set(keys)) == 4
        for record in records[:3]:
            assert record.neighbours == (keys[3],)
        # And of several copies only one is a neighbour.
        assert len(records[3].neighbours) == 1
        assert records[3].neighbours[0] in keys[:3]


def test_a_duplicate_text_under_another_id_is_no_neighbour(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.precompute([Chunk("Same.", id="a"), Chunk("Other.", id="b")], embeddings=[[1, 0], [0.9, 0.1]])
    record = engine.precompute([Chunk("Same.", id="c")], embeddings=[[1, 0]]).records[0]
    other = engine.has("Other.")
    assert record.neighbours == (other.key,)


def test_neighbours_come_from_the_whole_store_of_the_scope(tmp_path: Path, make_engine: MakeEngine) -> None:
    """Also from what another engine put there."""
    vectors = _embeddings(6)
    first = make_engine(cache_dir=tmp_path, top_n=2).precompute(documents(4), embeddings=vectors[:4]).records
    second = make_engine(cache_dir=tmp_path, top_n=2).precompute(documents(2, first=4), embeddings=vectors[4:]).records
    keys = [record.key for record in (*first, *second)]
    for own, record in ((4, second[0]), (5, second[1])):
        assert list(record.neighbours) == [keys[other] for other in _most_similar(vectors, own, 2)]


@pytest.mark.parametrize("arguments", [{"embeddings": _embeddings(4)}, {"neighbours": ring(4)}, {}])
def test_a_second_ingestion_of_unchanged_chunks_computes_nothing(
    tmp_path: Path, make_engine: MakeEngine, arguments: dict[str, Any]
) -> None:
    engine = make_engine(cache_dir=tmp_path)
    first = engine.precompute(documents(4), **arguments)
    for again in (engine, make_engine(cache_dir=tmp_path)):
        report = again.precompute(documents(4), **arguments)
        assert report.num_computed == report.num_tokens_computed == report.bytes_written == 0
        assert report.num_plain_reused == 4
        assert report.num_enriched_reused == first.num_enriched_computed
        assert report.records == first.records
        assert "0 plain caches computed, 4 reused" in report.summary()


def test_chunks_ingested_later_do_not_make_earlier_ones_computed_again(make_engine: MakeEngine) -> None:
    engine = make_engine(top_n=2)
    vectors = _embeddings(8)
    engine.precompute(documents(4), embeddings=vectors[:4])
    engine.precompute(documents(4, first=4), embeddings=vectors[4:])
    assert engine.precompute(documents(4), embeddings=vectors[:4]).num_computed == 0


def test_a_small_store_grows_its_neighbour_sets(make_engine: MakeEngine) -> None:
    """The first chunk had no neighbour to be enriched with; once there are some, the next ingestion enriches it."""
    engine = make_engine(top_n=2)
    vectors = _embeddings(4)
    assert engine.precompute(documents(1), embeddings=vectors[:1]).records[0].kind == "plain"
    engine.precompute(documents(3, first=1), embeddings=vectors[1:])
    report = engine.precompute(documents(1), embeddings=vectors[:1])
    assert report.records[0].kind == "enriched"
    assert len(report.records[0].neighbours) == 2


def test_the_configs_embedding_function_is_used(make_engine: MakeEngine) -> None:
    vectors, seen = _embeddings(4), []

    def embed(texts: Sequence[str]) -> np.ndarray:
        seen.append(list(texts))
        return vectors[: len(texts)]

    engine = make_engine(embed=embed, top_n=2)
    records = engine.precompute(documents(4)).records
    assert seen == [[chunk.text for chunk in documents(4)]]
    assert list(records[0].neighbours) == [records[other].key for other in _most_similar(vectors, 0, 2)]
    engine.precompute(documents(4), neighbours=ring(4))
    engine.precompute([])
    assert len(seen) == 1


def test_with_nothing_to_find_neighbours_by_there_are_plain_caches_and_the_report_says_so(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    report = engine.precompute(documents(3))
    assert not report.can_enrich
    assert [record.kind for record in report.records] == ["plain"] * 3
    assert "plain caches only" in report.summary()
    assert engine.precompute(documents(3), neighbours=ring(3)).can_enrich
    assert engine.prefill(Request("Who?", documents(3))).stats.chunk_status == ["prefix", "enriched", "enriched"]


def test_an_ingestion_without_neighbours_keeps_what_was_enriched(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.precompute(documents(3), neighbours=ring(3))
    report = engine.precompute(documents(3))
    assert [record.kind for record in report.records] == ["enriched"] * 3


def test_top_n_zero_means_plain_caches(make_engine: MakeEngine) -> None:
    report = make_engine(top_n=0).precompute(documents(3), embeddings=_embeddings(3))
    assert [record.kind for record in report.records] == ["plain"] * 3


def test_embeddings_of_another_size_are_not_compared(make_engine: MakeEngine) -> None:
    """The embedding model was changed: old chunks are no neighbours until they are embedded again."""
    engine = make_engine()
    engine.precompute(documents(3), embeddings=_embeddings(3, dim=8))
    records = engine.precompute(documents(2, first=3), embeddings=_embeddings(2, dim=5)).records
    assert records[0].neighbours == (records[1].key,)


def test_neighbours_do_not_depend_on_the_order_of_ingestion(make_engine: MakeEngine) -> None:
    vectors = _embeddings(5)
    vectors[3] = vectors[2]  # a tie
    results = []
    for order in (range(5), reversed(range(5))):
        order = list(order)
        engine = make_engine(top_n=3)
        engine.precompute([documents(5)[place] for place in order], embeddings=vectors[order])
        results.append([engine.has(chunk).neighbours for chunk in documents(5)])
    assert results[0] == results[1]


def test_progress_is_shown_when_asked_for(make_engine: MakeEngine, capfd: pytest.CaptureFixture[str]) -> None:
    engine = make_engine()
    engine.precompute(documents(3), neighbours=ring(3))
    assert capfd.readouterr().err == ""
    engine.precompute(documents(3, first=3), neighbours=ring(3), show_progress=True)
    shown = capfd.readouterr().err
    assert "precompute" in shown
    assert "enrich" in shown
    assert "3/3" in shown
