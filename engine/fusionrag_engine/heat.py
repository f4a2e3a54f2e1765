"""Heat: how often and how lately a key was used, as one number.

Each use counts half as much after `HALF_LIFE_S`. The number is `log2(sum over uses of 2 ** (time / HALF_LIFE_S))`, so
heats of different keys compare at any time without being decayed.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable

HALF_LIFE_S = 1800.0
MAX_KEYS = 200_000
"""Keys remembered, those that no tier holds included."""


def heated(heat: float | None, moment: float) -> float:
    """Heat after one more use at `moment`, in seconds since the epoch."""
    now = moment / HALF_LIFE_S
    if heat is None:
        return now
    low, high = sorted((heat, now))
    return high + math.log2(1 + 2 ** (low - high))


class HeatMap:
    """Heat of the keys that this process used. Thread-safe."""

    def __init__(self) -> None:
        self._heat: dict[str, float] = {}
        self._lock = threading.Lock()

    def use(self, keys: Iterable[str]) -> None:
        moment = time.time()
        with self._lock:
            for key in keys:
                self._heat[key] = heated(self._heat.get(key), moment)
            if len(self._heat) > MAX_KEYS:
                hottest = sorted(self._heat.items(), key=lambda item: item[1])[len(self._heat) // 2 :]
                self._heat = dict(hottest)

    def __getitem__(self, key: str) -> float:
        return self._heat.get(key, 0.0)
