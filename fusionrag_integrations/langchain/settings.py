"""`EngineSettings`: what the chat model and the completion model share - an engine, and how it answers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, cast

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage
from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from fusionrag_engine import Engine, EngineConfig, FusionRAGError, UnknownSettingError

from .documents import as_documents
from .messages import make_turns, render

logger = logging.getLogger("fusionrag")

PER_CALL = ("max_tokens", "temperature", "top_p", "seed", "stop", "method", "recompute_ratio", "selector", "scope")
FRAMEWORK = ("documents", "documents_in_prompt", "max_new_tokens", "stream", "model", "ls_structured_output_format")
"""What else a call may be given: documents, whether the prompt holds them in some form already, another name for a
setting, and LangChain's own."""
_ALIASES = {"model_name": "model", "max_new_tokens": "max_tokens"}


class EngineSettings(BaseModel):
    """A ready engine, or the name of a model to make one from, and the settings of every call."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    engine: Engine = Field(default=cast(Engine, None), exclude=True, repr=False)  # made below where there is none
    engine_config: EngineConfig | None = Field(default=None, exclude=True, repr=False)
    model: str = Field(default="", description="Directory or Hub name; with a ready engine only a name.")
    max_tokens: int | None = Field(default=None, gt=0, description="Length limit of an answer; None is the engine's.")
    temperature: float = Field(default=0.0, ge=0, description="0 is greedy.")
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = Field(default=None, ge=0)
    stop: list[str] | None = Field(default=None, description="Strings that end an answer.")
    method: Literal["full", "reuse", "fusionrag"] = Field(default="fusionrag")
    recompute_ratio: float | None = Field(default=None, ge=0, le=1, description="None is the engine's.")
    selector: str | None = Field(default=None, description="None is the engine's.")
    scope: str | None = Field(default=None, description="None is the scope each document was ingested into.")
    timeout: float | None = Field(default=None, gt=0, description="Seconds an answer may take; None is no limit.")
    streaming: bool = Field(default=False, description="Let `invoke` stream too, for callbacks that want tokens.")
    max_retries: int | None = Field(default=None, description="Accepted; a local engine has nothing to try again.")
    api_key: SecretStr | None = Field(default=None, exclude=True, description="Accepted; a local engine needs none.")

    @model_validator(mode="before")
    @classmethod
    def _known_names(cls, values: Any) -> Any:
        values = {_ALIASES.get(name, name): value for name, value in values.items()}
        if unknown := sorted(set(values) - set(cls.model_fields)):
            accepted = ", ".join(sorted(cls.model_fields))
            raise UnknownSettingError(f"{cls.__name__} has no setting {unknown}; accepted: {accepted}")
        if isinstance(values.get("stop"), str):
            values["stop"] = [values["stop"]]
        if isinstance(values.get("model"), Path):
            values["model"] = str(values["model"])
        return values

    @model_validator(mode="after")
    def _with_engine(self) -> Self:
        if cast(Engine | None, self.engine) is None:
            if not self.model:
                raise FusionRAGError(f"{type(self).__name__} needs engine=Engine(...) or model='directory or Hub name'")
            self.engine = Engine.from_pretrained(self.model, config=self.engine_config)
        elif self.engine_config is not None:
            raise FusionRAGError("engine_config makes an engine from model=...; a ready engine has its own")
        self.model = self.model or self.engine.model_name
        return self

    @classmethod
    def from_engine(cls, engine: Engine, **settings: Any) -> Self:
        return cls(engine=engine, **settings)

    def __deepcopy__(self, _memo: dict[int, Any] | None = None) -> Self:
        return self.model_copy()  # the engine is shared: it holds the model

    def __getstate__(self) -> dict[Any, Any]:
        raise FusionRAGError(
            f"{type(self).__name__} cannot be pickled: its engine holds a loaded model; make one in each process with "
            f"model=..."
        )

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        """Everything that decides an answer: response caches key on it."""
        engine = self.engine
        ratio = engine.config.recompute_ratio if self.recompute_ratio is None else self.recompute_ratio
        return {
            "model": self.model,
            "fingerprint": engine.namespace,
            "revision": getattr(engine.model.config, "_commit_hash", None),
            "dtype": str(engine.runner.dtype),
            "method": self.method,
            "recompute_ratio": ratio,
            "selector": self.selector or engine.config.selector,
            "top_n": engine.config.top_n,
            "scope": self.scope,
            "max_tokens": self.max_tokens or engine.config.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "default_stop": self.stop,  # LangChain sets "stop" to a call's own
        }

    def _call_settings(self, stop: Sequence[str] | None, given: Mapping[str, Any]) -> dict[str, Any]:
        """Settings of one call, its own where it has them, by the engine's names."""
        named = {_ALIASES.get(name, name): value for name, value in given.items() if value is not None}
        if ignored := sorted(set(named) - {*PER_CALL, *FRAMEWORK}):
            # Frameworks pass on what was meant for other models, so this is not an error.
            accepted = ", ".join(PER_CALL)
            logger.warning("%s ignores %s; a call accepts: documents, %s", type(self).__name__, ignored, accepted)
        if stop is not None:
            named["stop"] = stop
        values = {name: named.get(name, getattr(self, name)) for name in PER_CALL}
        values["max_new_tokens"] = values.pop("max_tokens")
        values["stop"] = values["stop"] or ()
        return values

    @staticmethod
    def _call_documents(given: Mapping[str, Any]) -> tuple[list[Document], bool]:
        """The documents of one call, and whether they may be put into the prompt where it does not hold them."""
        return as_documents(given.get("documents") or ()), not given.get("documents_in_prompt")

    # Token counts: LangChain's own would fetch another model's tokenizer

    def get_token_ids(self, text: str) -> list[int]:
        return self.engine.layout.tokenize(text)

    def get_num_tokens(self, text: str) -> int:
        return self.engine.count_tokens(text)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Tokens of the prompt that these messages make, the chat template's own included."""
        return len(self.engine.layout.tokenize_prefix(render(self.engine, make_turns(messages))))
