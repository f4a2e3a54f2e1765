"""The one primitive: run some tokens, at given positions, against assembled canvases, writing their fresh rows into
them.

The Hugging Face model is used as it is. A registered attention function receives each layer's fresh queries, keys and
values, scatters keys and values into the canvas of each packed sequence, and attends there by position. The model
itself is called without a cache, so the cache interface of transformers, which changes between releases, is not
involved.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusionrag_kernels import q_sparse_attention

from .canvas import Canvas, KVShape
from .errors import UnsupportedModelError

ATTENTION_NAME = "fusionrag_packed"
"""Name of the registered attention function: without "sdpa", "flash" or "/", which transformers gives a meaning."""

Probe = Callable[[int, Tensor, "Rows", dict[str, Any]], None]
"""Called in every layer for every sequence: layer index, queries `[num_rows, num_heads, dim]`, the sequence, and the
keywords (`scale`, `window`, `softcap`) of its attention."""


@dataclass(frozen=True)
class Rows:
    """Tokens of one sequence to be computed in one pass, by ascending position.

    Attributes:
        token_ids, positions: int64 `[num_rows]` on the model's device.
        canvas: where their rows are written and what they attend to.
        kv_valid: bool `[max position + 1]`; rows that may be attended to. None: all of them.
    """

    token_ids: Tensor
    positions: Tensor
    canvas: Canvas
    kv_valid: Tensor | None = None


class _Pass:
    """State of one packed forward, handed to the attention function through the model's keywords."""

    def __init__(self, sequences: Sequence[Rows], probe: Probe | None) -> None:
        self.sequences = sequences
        self.places = [_place(rows.positions) for rows in sequences]
        self.probe = probe
        self.num_layers_seen = 0

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
        """Queries `[1, Hq, N, D]`, fresh keys and values `[1, Hkv, N, D]` of all sequences -> `[1, N, Hq, Dv]`."""
        self.num_layers_seen += 1
        outputs, start = [], 0
        for rows, place in zip(self.sequences, self.places, strict=True):
            stop = start + len(rows.positions)
            rows.canvas.write(layer, place, key[0, :, start:stop], value[0, :, start:stop])
            q = query[0, :, start:stop].transpose(0, 1)
            k = rows.canvas.keys[layer].transpose(0, 1)
            v = rows.canvas.values[layer].transpose(0, 1)
            if rows.kv_valid is not None:
                k, v = k[: len(rows.kv_valid)], v[: len(rows.kv_valid)]
            outputs.append(q_sparse_attention(q, k, v, rows.positions, kv_valid=rows.kv_valid, **keywords))
            if self.probe is not None:
                self.probe(layer, q, rows, keywords)
            start = stop
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0)


def _place(positions: Tensor) -> Tensor | slice:
    """Where rows go on a canvas: a slice where their positions follow one another."""
    first, last = int(positions[0]), int(positions[-1])
    return slice(first, last + 1) if last - first + 1 == len(positions) else positions


class _ShapeProbe:
    """Stands in for a pass: records the shape of each layer's keys and values."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int, int]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **_keywords: Any) -> Tensor:
        self.shapes[layer] = (key.shape[1], key.shape[3], value.shape[3])
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    fusionrag_pass: _Pass | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The registered attention function. Outside the engine the model keeps working: its own eager attention is
    called."""
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    if fusionrag_pass is None:
        eager = sys.modules[type(module).__module__].eager_attention_forward
        extra = {} if softcap is None else {"softcap": softcap}
        kwargs["sliding_window"] = sliding_window
        result: tuple[Tensor, Tensor | None] = eager(
            module, query, key, value, attention_mask, scaling=scaling, **extra, **kwargs
        )
        return result
    layer: int = module.layer_idx  # type: ignore[assignment]
    out = fusionrag_pass.attend(layer, query, key, value, scale=scaling, window=sliding_window, softcap=softcap)
    return out, None


def register_attention() -> None:
    """Register the attention function and its mask function with transformers. Idempotent."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, eager_mask)


class ModelRunner:
    """A Hugging Face causal LM behind the packed forward."""

    def __init__(self, model: Any) -> None:
        register_attention()
        self.model = model.eval()
        self.model.set_attn_implementation(ATTENTION_NAME)
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.config = model.config.get_text_config()
        # Of four dimensions: transformers then takes the mask as ready and builds none. It is never read.
        self._no_mask = torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.device)
        self.shape = self._read_shape()

    def canvas(self, capacity: int) -> Canvas:
        return Canvas(self.shape, capacity, dtype=self.dtype, device=self.device)

    def pieces(
        self, token_ids: Sequence[int], positions: Tensor, canvas: Canvas, limit: int, kv_valid: Tensor | None = None
    ) -> Iterator[Rows]:
        """The rows at ascending `positions` of a sequence of tokens, at most `limit` at a time."""
        ids = torch.tensor(token_ids)
        for piece in torch.split(positions, limit):
            yield Rows(ids[piece].to(self.device), piece.to(self.device), canvas, kv_valid)

    def bytes_per_token(self) -> int:
        return self.shape.num_elements * self.dtype.itemsize

    @torch.inference_mode()
    def forward(self, sequences: Sequence[Rows], *, probe: Probe | None = None) -> None:
        """Compute the rows of several sequences in one pass and write their keys and values; no logits."""
        state = _Pass(sequences, probe)
        self._call(self.model.base_model, sequences, state)
        self._check_layers(state)

    @torch.inference_mode()
    def forward_logits(self, sequences: Sequence[Rows]) -> Tensor:
        """As `forward`; returns float32 `[num_sequences, vocab]`, the logits behind the last row of each sequence."""
        state = _Pass(sequences, None)
        counts = torch.tensor([len(rows.positions) for rows in sequences], device=self.device)
        last = counts.cumsum(0) - 1
        logits: Tensor = self._call(self.model, sequences, state, logits_to_keep=last).logits[0]
        self._check_layers(state)
        assert logits.shape[0] == len(sequences), "logits_to_keep was not honoured"
        return logits.float()

    @torch.inference_mode()
    def forward_every_logits(self, rows: Rows) -> Tensor:
        """As `forward` on one sequence; returns float32 `[num_rows, vocab]`, the logits behind each of its rows."""
        state = _Pass([rows], None)
        logits: Tensor = self._call(self.model, [rows], state).logits[0]
        self._check_layers(state)
        return logits.float()

    def _call(self, module: nn.Module, sequences: Sequence[Rows], state: object, **keywords: Any) -> Any:
        token_ids = torch.cat([rows.token_ids for rows in sequences])
        positions = torch.cat([rows.positions for rows in sequences])
        return module(
            input_ids=token_ids[None],
            position_ids=positions[None],
            attention_mask=self._no_mask,
            use_cache=False,
            fusionrag_pass=state,
            **keywords,
        )

    def _check_layers(self, state: _Pass) -> None:
        expected = self.shape.num_layers
        assert state.num_layers_seen == expected, f"{state.num_layers_seen} of {expected} layers attended"

    @torch.inference_mode()
    def _read_shape(self) -> KVShape:
        name = type(self.model).__name__
        probe = _ShapeProbe()
        rows = Rows(self.tensor([0]), self.tensor([0]), canvas=None)  # type: ignore[arg-type]
        try:
            self._call(self.model.base_model, [rows], probe)
        except (TypeError, ValueError, RuntimeError, AttributeError, KeyError) as error:
            raise UnsupportedModelError(
                f"{name} cannot run with a registered attention function: {type(error).__name__}: {error}"
            ) from error
        num_layers = self.config.num_hidden_layers
        missing = sorted(set(range(num_layers)) - set(probe.shapes))
        if missing:
            raise UnsupportedModelError(
                f"{name}: layers {missing} have no attention over keys and values (recurrent or linear layers, or an "
                f"attention of its own); every layer must attend for chunk caches to hold its state"
            )
        if len(set(probe.shapes.values())) != 1:
            raise UnsupportedModelError(
                f"{name} has layers of different key-value shapes: {set(probe.shapes.values())}"
            )
        return KVShape(num_layers, *probe.shapes[0])

    def tensor(self, values: Sequence[int]) -> Tensor:
        """int64 tensor on the model's device."""
        return torch.tensor(values, dtype=torch.int64, device=self.device)
