"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Before anything imports triton: its kernels then run on CPU tensors. `kernels/bench/gpu_check.py` runs them compiled.
os.environ.setdefault("TRITON_INTERPRET", "1")

REPOSITORY = Path(__file__).resolve().parent.parent
SMOLLM2 = REPOSITORY / ".demo" / "models" / "SmolLM2-135M-Instruct"


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """Directory of the demo model. A test that needs it fails without it: `make test` fetches it first."""
    if not (SMOLLM2 / "model.safetensors").is_file():
        pytest.fail(f"{SMOLLM2} has no model; run `make test`, which fetches it", pytrace=False)
    return SMOLLM2


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` and its kind give NaN, so that a row read before it was written shows in the answer."""
    import torch

    was_deterministic = torch.are_deterministic_algorithms_enabled()
    was_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(was_deterministic, warn_only=was_warn_only)
