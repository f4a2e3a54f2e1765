"""The settings of `FusionRAGLLM`, and the engine it shares."""

from __future__ import annotations

from typing import Any, Literal, Self

from llama_index.core.base.llms.types import LLMMetadata
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.llms.llm import LLM

from fusionrag_engine import Engine, EngineConfig, FusionRAGError

from .settings import refuse_unknown


class EngineLLM(LLM):
    """An LLM without calls: see `FusionRAGLLM` for the settings."""

    model: str = Field(default="", description="Name of the model.")
    max_new_tokens: int = Field(default=256, gt=0, description="Length limit of an answer in tokens; the engine's.")
    temperature: float = Field(default=0.0, ge=0, description="0 is greedy.")
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = Field(default=None)
    stop: list[str] = Field(default_factory=list, description="Strings that end an answer.")
    method: Literal["full", "reuse", "fusionrag"] = Field(default="fusionrag")
    recompute_ratio: float | None = Field(default=None, ge=0, le=1, description="None is the engine's.")
    selector: str | None = Field(default=None, description="None is the engine's.")
    scope: str = Field(default="", description="Scope whose chunk caches are used.")
    _engine: Engine = PrivateAttr()

    def __init__(
        self, *, engine: Engine | None = None, engine_config: EngineConfig | None = None, **settings: Any
    ) -> None:
        refuse_unknown(type(self), settings, beside=["max_tokens"])
        if "max_tokens" in settings:
            settings["max_new_tokens"] = settings.pop("max_tokens")
        if isinstance(settings.get("stop"), str):
            settings["stop"] = [settings["stop"]]
        given = settings.keys()
        super().__init__(**settings)
        if engine is None:
            if not self.model:
                raise FusionRAGError("FusionRAGLLM needs engine=Engine(...) or model='directory or Hub name'")
            engine = Engine.from_pretrained(self.model, config=engine_config)
        elif engine_config is not None:
            raise FusionRAGError(
                "engine_config makes an engine from model=...; a ready engine has its own: leave it out"
            )
        self._engine = engine
        self.model = self.model or engine.model_name
        if "max_new_tokens" not in given:
            self.max_new_tokens = engine.config.max_new_tokens

    @classmethod
    def from_engine(cls, engine: Engine, **settings: Any) -> Self:
        return cls(engine=engine, **settings)

    @classmethod
    def class_name(cls) -> str:
        return "FusionRAGLLM"

    @property
    def engine(self) -> Engine:
        return self._engine

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(
            context_window=self._engine.max_context,
            num_output=self.max_new_tokens,
            is_chat_model=True,
            model_name=self.model,
        )

    def __deepcopy__(self, _memo: dict[int, Any] | None = None) -> Self:
        return self.model_copy()  # the engine is shared: it holds the model

    def __getstate__(self) -> dict[Any, Any]:
        raise FusionRAGError(
            "FusionRAGLLM cannot be pickled: its engine holds a loaded model; make one in each process with model=..."
        )
