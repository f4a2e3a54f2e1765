"""Query-guided selection: recompute what the question looks at (FusionRAG, arXiv 2601.12904, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fusionrag_engine.errors import ConfigError

from .base import SelectionContext

LAYER_SETS = ("last", "late_third", "all")


@dataclass(frozen=True)
class QueryGuided:
    """The tokens with the most attention from the question, over all chunks together.

    Attributes:
        layers: which layers vote: "last" is the paper's rule, "late_third" (the last third of the layers, rounded up)
            measures best and is the default, "all", or a tuple of layer indices.
    """

    layers: str | tuple[int, ...] = "late_third"

    def __post_init__(self) -> None:
        if isinstance(self.layers, str) and self.layers not in LAYER_SETS:
            raise ConfigError(f"layers={self.layers!r} is not accepted; give one of {LAYER_SETS} or a tuple of indices")
        if not self.layers:
            raise ConfigError("layers=() is not accepted; at least one layer must vote")

    def select(self, context: SelectionContext) -> Tensor:
        scores = context.question_scores(self._voting(context.num_layers))[context.candidates]
        return context.candidates[scores.topk(context.budget).indices]

    def _voting(self, num_layers: int) -> list[int]:
        if self.layers == "last":
            return [num_layers - 1]
        if self.layers == "late_third":
            return list(range(num_layers - (num_layers + 2) // 3, num_layers))
        if self.layers == "all":
            return list(range(num_layers))
        chosen = [int(layer) for layer in self.layers]
        if not all(0 <= layer < num_layers for layer in chosen):
            raise ConfigError(f"layers={self.layers!r}: the model has layers 0 to {num_layers - 1}")
        return chosen
