"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fusionrag_engine import Engine
from tests.engine.support import tiny_engine


@pytest.fixture(scope="module", autouse=True)
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

    def make(*args: Any, **settings: Any) -> Engine:
        engines.append(tiny_engine(*args, **settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
