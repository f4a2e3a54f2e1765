"""Settings of the adapters: a name that does not exist is an error, not a wish that is silently dropped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from llama_index.core.bridge.pydantic import BaseModel

from fusionrag_engine import UnknownSettingError


def refuse_unknown(owner: type[BaseModel], settings: Mapping[str, Any], *, beside: Iterable[str] = ()) -> None:
    """Raise `UnknownSettingError` for settings that are neither fields of `owner` nor in `beside`."""
    accepted = sorted({*owner.model_fields, *beside})
    unknown = sorted(set(settings) - set(accepted))
    if unknown:
        raise UnknownSettingError(f"{owner.__name__} has no setting {unknown}; accepted: {', '.join(accepted)}")
