"""Progress bars of one call."""

from __future__ import annotations

from typing import Any


class ProgressBars:
    """The progress bars of one call, one after the other."""

    def __init__(self, is_shown: bool) -> None:
        self.is_shown = is_shown
        self._bar: Any = None

    def open(self, total: int, phase: str) -> Any:
        """Begin the bar of a phase; returns its `update`."""
        from tqdm.auto import tqdm

        self.__exit__()
        self._bar = tqdm(total=total, desc=phase, unit="chunk", disable=not self.is_shown or total == 0)
        return self._bar.update

    def __enter__(self) -> ProgressBars:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._bar is not None:
            self._bar.close()
