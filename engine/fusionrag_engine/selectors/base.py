"""What a selector is given, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class SelectionContext:
    """One assembled prompt, ready to be looked at.

    Attributes:
        candidates: int64 `[num_candidates]`, ascending positions of the reusable chunk tokens. Only these may be
            chosen: never the prefix, an exact chunk, a miss or the question.
        budget: how many to choose, `0 < budget < num_candidates`.
        num_layers: layers of the model.
        question_scores: set of layers -> float32 `[num_prompt_tokens]`, the attention each prompt token receives from
            the question in these layers, summed over layers, heads and question tokens. Costs one pass of the question.
    """

    candidates: Tensor
    budget: int
    num_layers: int
    question_scores: Callable[[Collection[int]], Tensor]


class Selector(Protocol):
    """A frozen dataclass with its parameters as fields and one verb."""

    def select(self, context: SelectionContext) -> Tensor:
        """Positions of the critical tokens: `budget` of the candidates, int64, in any order."""
        ...
