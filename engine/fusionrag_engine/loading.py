"""Loading a model and its tokenizer, and the choices that "auto" stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .config import EngineConfig
from .errors import ConfigError


def load_pretrained(model_id_or_dir: str | Path, gguf_file: str | None, config: EngineConfig) -> tuple[Any, Any]:
    """A causal LM and its tokenizer, from a directory, a Hub name, or a GGUF file in one of these."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = choose_device(config.device)
    source = str(model_id_or_dir)
    extra = {} if gguf_file is None else {"gguf_file": gguf_file}
    model = AutoModelForCausalLM.from_pretrained(source, dtype=choose_dtype(config.dtype, device), **extra)
    tokenizer = AutoTokenizer.from_pretrained(source, **extra)
    model.to(device)  # type: ignore[arg-type]
    return model, tokenizer


def choose_device(name: str) -> torch.device:
    """The named device; "auto" is the GPU where there is one."""
    if name != "auto":
        try:
            return torch.device(name)
        except RuntimeError as error:
            raise ConfigError(f"device={name!r} is not accepted; give 'auto', 'cpu', 'cuda' or 'cuda:0'") from error
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The named dtype; "auto" is bfloat16 where the device computes in it, else float32."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    return torch.bfloat16 if device.type != "cpu" or cpu_has_bfloat16() else torch.float32


def cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware; emulated, it is slower than float32."""
    checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(check is not None and check() for check in checks)


def check_ready_model(model: Any, config: EngineConfig) -> None:
    """A model handed over ready is used as it is; settings that contradict it are refused.

    Raises:
        ConfigError: the config names another dtype or device than the model has.
    """
    if config.dtype != "auto" and model.dtype != getattr(torch, config.dtype):
        raise ConfigError(f"dtype={config.dtype!r}, but the model given is {model.dtype}; convert it, or leave 'auto'")
    if config.device != "auto" and model.device.type != choose_device(config.device).type:
        raise ConfigError(
            f"device={config.device!r}, but the model given is on {model.device}; move it, or leave 'auto'"
        )
