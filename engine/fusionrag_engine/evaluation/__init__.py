"""Evaluation: questions over chunks, metrics with intervals, and the harness behind `fusionrag bench quality`."""

from .datasets import Example, load_examples
from .embedders import EMBEDDERS, embed_bag_of_words, embedder
from .harness import Plan, machine, precompute, run
from .metrics import kl_divergence

__all__ = [
    "EMBEDDERS",
    "Example",
    "Plan",
    "embed_bag_of_words",
    "embedder",
    "kl_divergence",
    "load_examples",
    "machine",
    "precompute",
    "run",
]
