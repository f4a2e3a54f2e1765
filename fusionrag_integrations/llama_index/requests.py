"""Engine requests from a LLM's settings and those of one call."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fusionrag_engine import Request

from .prompting import NodePrompt

if TYPE_CHECKING:
    from .llm import FusionRAGLLM

logger = logging.getLogger("fusionrag")

PER_CALL = ("max_new_tokens", "temperature", "top_p", "seed", "stop", "method", "recompute_ratio", "selector")


def make_request(llm: FusionRAGLLM, text: str, prompt: NodePrompt | None, settings: Mapping[str, Any]) -> Request:
    """A request over a prompt's nodes, or where there is none, ordinary prefill of `text`.

    Args:
        settings: of this call; None and what is absent is the LLM's own.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    if "max_tokens" in given:
        given["max_new_tokens"] = given.pop("max_tokens")
    unknown = sorted(set(given) - set(PER_CALL))
    if unknown:
        # Frameworks pass on what was meant for other LLMs, so this is not an error.
        logger.warning("FusionRAGLLM ignores %s; a call accepts: %s", unknown, ", ".join(PER_CALL))
    values = {name: given.get(name, getattr(llm, name)) for name in PER_CALL}
    if prompt is None:
        checked = Request("", (), text_around=[text], **values)  # a wrong method is an error here too
        return replace(checked, method="full", recompute_ratio=None)
    return Request(prompt.question, prompt.chunks, text_around=prompt.text_around, **values)
