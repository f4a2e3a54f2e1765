"""What Triton can run here: found out when an op asks, never on import."""

import importlib.util
import os
from functools import cache

import torch

from fusionrag_kernels.tuning import Backend

INTERPRETED_PROCESSORS = 4


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def is_interpreted() -> bool:
    """Whether kernels run on CPU tensors: TRITON_INTERPRET=1 before triton is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_no_triton(device: torch.device) -> str | None:
    """None where the Triton kernels run on tensors of `device`, else the reason and the fix."""
    if not has_triton():
        return "triton is not installed (pip install triton; it has wheels for Linux)"
    if device.type == "cuda" or is_interpreted():
        return None
    return f"its kernels run on CUDA tensors, not on {device.type} (or anywhere under TRITON_INTERPRET=1, slowly)"


def backend() -> Backend:
    return "hip" if torch.version.hip else "cuda"


def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors or compute units; a few when interpreted, so that split keys are exercised."""
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
