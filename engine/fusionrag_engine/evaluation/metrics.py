"""Metrics of answers and of distributions over questions.

Answers are compared after SQuAD's normalisation: lower case, no punctuation, no articles, single spaces.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

NUM_RESAMPLES = 1000
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(answer: str, golds: Sequence[str]) -> float:
    """1 if the answer is one of the golds."""
    return float(any(normalize(answer) == normalize(gold) for gold in golds))


def contains(answer: str, golds: Sequence[str]) -> float:
    """1 if a gold stands in the answer as whole words. A gold that normalisation leaves empty is never found."""
    words = f" {normalize(answer)} "
    return float(any(normalize(gold) and f" {normalize(gold)} " in words for gold in golds))


def token_f1(answer: str, gold: str) -> float:
    """Harmonic mean of precision and recall over words. Two empty answers agree."""
    ours, theirs = normalize(answer).split(), normalize(gold).split()
    if not ours or not theirs:
        return float(ours == theirs)
    num_shared = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * num_shared / (len(ours) + len(theirs))


def f1(answer: str, golds: Sequence[str]) -> float:
    """The best F1 over the golds."""
    return max((token_f1(answer, gold) for gold in golds), default=0.0)


def kl_divergence(full: Tensor, other: Tensor) -> float:
    """KL(full || other) of two logit vectors, in nats."""
    p, q = full.double().log_softmax(0), other.double().log_softmax(0)
    return float((p.exp() * (p - q)).sum())


def normalized(ours: Sequence[float], reuse: Sequence[float], full: Sequence[float]) -> float | None:
    """(F1 - F1_FR) / (F1_FA - F1_FR) of the means (FusionRAG, arXiv 2601.12904, section 5); None where full is no
    better than reuse and there is nothing to win."""
    gap = float(np.mean(full)) - float(np.mean(reuse))
    return (float(np.mean(ours)) - float(np.mean(reuse))) / gap if gap > 1e-9 else None


def bootstrap(statistic: Callable[..., Any], *samples: Sequence[float], seed: int = 0) -> list[float] | None:
    """95 % percentile interval `[lo, hi]` of a statistic, the questions drawn again `NUM_RESAMPLES` times.

    Args:
        samples: columns of equal length, drawn together, so that comparisons stay paired.

    Returns None where the statistic is undefined on the samples; resamples where it is undefined are left out.
    """
    columns = [np.asarray(column, dtype=np.float64) for column in samples]
    if not len(columns[0]) or statistic(*columns) is None:
        return None
    drawn = np.random.default_rng(seed).integers(0, len(columns[0]), (NUM_RESAMPLES, len(columns[0])))
    values = [value for rows in drawn if (value := statistic(*(column[rows] for column in columns))) is not None]
    low, high = np.percentile(values, [2.5, 97.5])
    return [float(low), float(high)]
