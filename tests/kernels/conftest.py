"""One seed for every test, and one thread: on small inputs waiting for a second costs more than it brings."""

from collections.abc import Iterator

import pytest
import torch

from fusionrag_kernels.runtime import has_triton


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def triton() -> None:
    """The Triton kernels, interpreted. Triton has wheels for Linux only."""
    if not has_triton():
        pytest.skip("triton is not installed")
