"""Every error the engine raises; all derive from one `RuntimeError`.

LlamaIndex's response builders swallow `ValueError` and `TypeError` and answer "Empty Response" instead, so an error
that can happen while a question is answered must be neither.
"""


class FusionRAGError(RuntimeError):
    """Base class of every error of this project."""


class ConfigError(FusionRAGError):
    """A setting or an argument has a value that is not accepted."""


class UnknownSettingError(ConfigError, TypeError):
    """A setting was given under a name that does not exist."""


class UnsupportedModelError(FusionRAGError):
    """The model cannot be served from chunk caches correctly; the message names the feature in the way."""


class ContextOverflowError(FusionRAGError):
    """The prompt does not fit into the model's context."""


class CacheMissError(FusionRAGError):
    """A chunk has no usable cache and `EngineConfig(on_miss="error")` forbids computing it."""


class SelectorError(FusionRAGError):
    """A selector broke its contract: it must choose `budget` distinct candidates."""


class EngineClosedError(FusionRAGError):
    """The engine was used after `close()`."""
