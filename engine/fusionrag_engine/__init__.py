"""The embedded inference engine of FusionRAG: chunk caches computed once, enriched, moved, and partly recomputed."""

from .config import EngineConfig
from .engine import Engine
from .errors import (
    CacheMissError,
    ConfigError,
    ContextOverflowError,
    EngineClosedError,
    FusionRAGError,
    SelectorError,
    UnknownSettingError,
    UnsupportedModelError,
)
from .types import (
    Chunk,
    ChunkRecord,
    Generation,
    PrecomputeReport,
    Prefill,
    Request,
    Stats,
    TokenDelta,
)

__all__ = [
    "CacheMissError",
    "Chunk",
    "ChunkRecord",
    "ConfigError",
    "ContextOverflowError",
    "Engine",
    "EngineClosedError",
    "EngineConfig",
    "FusionRAGError",
    "Generation",
    "PrecomputeReport",
    "Prefill",
    "Request",
    "SelectorError",
    "Stats",
    "TokenDelta",
    "UnknownSettingError",
    "UnsupportedModelError",
]
