"""`CacheReport`: what the cache did in a chain, an agent or a graph, whose result is no message that could tell."""

from __future__ import annotations

from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import Generation, LLMResult

from fusionrag_integrations.explain import explain


class CacheReport(BaseCallbackHandler):
    """Collects the engine's calls: `chain.invoke(x, {"callbacks": [report]})`, then `print(report)`.

    `explain(report)` gives the rows. An answer from LangChain's own response cache shows the call that once made it.

    Attributes:
        calls: the counts of each call so far, oldest first.
    """

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    @property
    def metadata(self) -> dict[str, Any]:
        """Where `explain` looks."""
        notes = dict.fromkeys(note for call in self.calls for note in call.get("notes", ()))
        return {"fusionrag": {"calls": list(self.calls), "notes": list(notes)}}

    def on_llm_end(self, response: LLMResult, **_kwargs: Any) -> None:
        found = (_info(generation) for answers in response.generations for generation in answers)
        self.calls += [info for info in found if info is not None]

    def __str__(self) -> str:
        return str(explain(self)) if self.calls else "no call of a FusionRAG model"


def _info(generation: Generation) -> dict[str, Any] | None:
    message = getattr(generation, "message", None)
    held = generation.generation_info if message is None else message.response_metadata
    return (held or {}).get("fusionrag")
