"""The one place that decides which implementation of an op runs."""

from typing import Literal

from fusionrag_kernels.errors import ImplementationError

Implementation = Literal["cpu", "reference"]
CHOICES = ("auto", "cpu", "reference")


def resolve(impl: str) -> Implementation:
    """Name the implementation that `impl` stands for; only "auto" may fall back.

    "auto" is "cpu", the blocked plain-torch path, on every device (it runs on CUDA tensors too).

    Raises:
        ImplementationError: `impl` is not one of CHOICES.
    """
    if impl == "auto" or impl == "cpu":
        return "cpu"
    if impl == "reference":
        return "reference"
    accepted = ", ".join(repr(choice) for choice in CHOICES)
    reason = "is not built yet" if impl == "triton" else "is not known"
    raise ImplementationError(f"impl={impl!r} {reason}; accepted are {accepted}")
