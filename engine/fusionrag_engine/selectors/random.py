"""Random selection: the control every other rule must beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import SelectionContext


@dataclass(frozen=True)
class Random:
    """Candidates drawn uniformly, always the same ones for the same prompt length and `seed`."""

    seed: int = 0

    def select(self, context: SelectionContext) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(len(context.candidates), generator=generator).to(context.candidates.device)
        return context.candidates[order[: context.budget]]
