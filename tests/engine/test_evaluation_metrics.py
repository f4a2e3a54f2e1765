"""Metrics against values made by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fusionrag_engine.evaluation import metrics


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Cat!", "cat"),
        ("a an the", ""),
        ("Theatre", "theatre"),
        ("U.S.A.", "usa"),
        ("an apple, A pear", "apple pear"),
        ("  ", ""),
        ("\u00c9cole", "\u00e9cole"),
    ],
)
def test_normalisation(text: str, normal: str) -> None:
    assert metrics.normalize(text) == normal


@pytest.mark.parametrize(
    ("answer", "golds", "em", "found", "f1"),
    [
        ("The cat.", ["cat"], 1, 1, 1),
        ("the black cat", ["cat", "black dog"], 0, 1, 2 / 3),
        ("concatenate", ["cat"], 0, 0, 0),
        ("cat cat", ["cat"], 0, 1, 2 / 3),
        ("", ["cat"], 0, 0, 0),
        ("the", ["a"], 1, 0, 1),
        ("dog", ["the"], 0, 0, 0),
        ("in 1998 there were two", ["two", "1998"], 0, 1, 1 / 3),
    ],
)
def test_answer_metrics(answer: str, golds: list[str], em: float, found: float, f1: float) -> None:
    assert metrics.exact_match(answer, golds) == em
    assert metrics.contains(answer, golds) == found
    assert metrics.f1(answer, golds) == pytest.approx(f1)


def test_kl_divergence() -> None:
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])
    expected = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    assert metrics.kl_divergence(p.log() + 3, q.log()) == pytest.approx(expected, rel=1e-6)
    assert metrics.kl_divergence(p.log(), p.log()) == 0


def test_normalized_f1() -> None:
    assert metrics.normalized([0.5, 0.6], [0.2, 0.2], [0.8, 0.8]) == pytest.approx((0.55 - 0.2) / 0.6)
    assert metrics.normalized([0.5], [0.8], [0.8]) is None
    assert metrics.normalized([0.5], [0.9], [0.8]) is None


def test_intervals_contain_the_mean_and_cover_it_in_nineteen_of_twenty_samples() -> None:
    draw = np.random.default_rng(1)
    hits = 0
    for _ in range(100):
        values = draw.exponential(2.0, 40)
        interval = metrics.bootstrap(np.mean, values)
        assert interval is not None
        assert interval[0] < values.mean() < interval[1]
        hits += interval[0] <= 2.0 <= interval[1]
    assert 85 <= hits <= 99
    assert metrics.bootstrap(np.mean, [3.0, 3.0]) == [3.0, 3.0]
    assert metrics.bootstrap(np.mean, []) is None


def test_columns_are_drawn_together() -> None:
    """A paired difference that never varies has an interval of no width."""
    values = np.arange(10.0)
    interval = metrics.bootstrap(lambda a, b: float(np.mean(a - b)), values + 2, values)
    assert interval == [2.0, 2.0]
