"""Fixtures of the adapters' tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fusionrag_engine import Engine
from tests.integrations.support import tiny_engine


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models are several times faster on one thread, above all on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    """`tiny_engine`, closed when the test ends."""
    engines: list[Engine] = []

    def make(**settings: Any) -> Engine:
        engines.append(tiny_engine(**settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine()
