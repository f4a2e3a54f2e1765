"""The one place that decides which implementation of an op runs."""

from typing import Literal

import torch

from fusionrag_kernels.errors import ImplementationError
from fusionrag_kernels.runtime import why_no_triton

Implementation = Literal["triton", "cpu", "reference"]
MAX_HEAD_DIM = 256
CHOICES = ("auto", "triton", "cpu", "reference")


def resolve(impl: str, device: torch.device, head_dim: int = 0) -> Implementation:
    """Name the implementation that `impl` stands for on tensors of `device`; only "auto" may fall back.

    "auto" is "cpu", the blocked plain-torch path, on every device: the Triton kernels are chosen by name only until
    `bench/gpu_check.py` has passed on a GPU.

    Raises:
        ImplementationError: `impl` is not one of CHOICES, or is "triton" where its kernels cannot run.
    """
    if impl in ("auto", "cpu"):
        return "cpu"
    if impl == "reference":
        return "reference"
    reason: str | None = "it is not known"
    if impl == "triton":
        reason = why_no_triton(device)
        if reason is None and head_dim > MAX_HEAD_DIM:
            reason = f"its kernels take heads of at most {MAX_HEAD_DIM}, not {head_dim}"
        if reason is None:
            return "triton"
    accepted = ", ".join(repr(choice) for choice in CHOICES)
    raise ImplementationError(f"impl={impl!r}: {reason}; accepted are {accepted}")
