"""Selectors: rules that choose the critical tokens of a request. One small file each, and one line in the registry
here."""

from __future__ import annotations

from typing import cast

from fusionrag_engine.errors import ConfigError

from .base import SelectionContext, Selector
from .query_guided import QueryGuided
from .random import Random

SELECTORS: dict[str, Selector] = {
    "query_guided": QueryGuided(),
    "random": Random(),
}


def register_selector(name: str, selector: Selector) -> None:
    """Make a selector available to `EngineConfig(selector=name)` and `Request(selector=name)`."""
    SELECTORS[name] = selector


def resolve_selector(selector: str | Selector) -> Selector:
    """The selector of that name, or the given object itself.

    Raises:
        ConfigError: no selector has that name.
    """
    if callable(getattr(selector, "select", None)):
        return cast(Selector, selector)
    if not isinstance(selector, str) or selector not in SELECTORS:
        raise ConfigError(f"selector={selector!r} is not registered; choose one of {', '.join(map(repr, SELECTORS))}")
    return SELECTORS[selector]


__all__ = [
    "SELECTORS",
    "QueryGuided",
    "Random",
    "SelectionContext",
    "Selector",
    "register_selector",
    "resolve_selector",
]
