"""Random attention cases, poisoned where nothing may read, and relative RMS: shared by tests and benchmarks."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fusionrag_kernels.critical_scores import critical_scores
from fusionrag_kernels.q_sparse_attention import q_sparse_attention

RowPattern = Literal["scattered", "last", "first", "any"]
KeyPattern = Literal["canvas", "canvas_with_holes", "gapped", "any"]
Layout = Literal["by_head", "by_row", "interleaved"]


@dataclass(frozen=True)
class Case:
    """The arguments of one call; `changed` makes the control that must differ."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_positions: Tensor
    kv_positions: Tensor | None
    scale: float
    window: int | None
    softcap: float | None
    kv_valid: Tensor | None

    def changed(self, **fields: Any) -> "Case":
        return replace(self, **fields)

    def attend(self, impl: str = "auto") -> Tensor:
        return q_sparse_attention(
            self.q, self.k, self.v, self.q_positions, self.kv_positions, **self._rules(), impl=impl
        )

    def score(self, impl: str = "auto", norm: str = "sum") -> Tensor:
        return critical_scores(
            self.q, self.k, self.q_positions, self.kv_positions, **self._rules(), norm=norm, impl=impl
        )

    def visible(self) -> Tensor:
        """bool [Nq, Nk]."""
        num_keys = self.k.shape[0]
        kv_positions = torch.arange(num_keys) if self.kv_positions is None else self.kv_positions
        distance = self.q_positions[:, None] - kv_positions
        valid = torch.ones(num_keys, dtype=torch.bool) if self.kv_valid is None else self.kv_valid
        return (distance >= 0) & (distance < (self.window or 1 << 62)) & valid

    def in_float32(self) -> "Case":
        return self.changed(q=self.q.float(), k=self.k.float(), v=self.v.float())

    def _rules(self) -> dict[str, Any]:
        return {"scale": self.scale, "window": self.window, "softcap": self.softcap, "kv_valid": self.kv_valid}


def make_case(
    *,
    num_rows: int,
    num_keys: int,
    num_kv_heads: int = 3,
    group: int = 3,
    head_dim: int = 64,
    value_dim: int | None = None,
    rows: RowPattern = "scattered",
    keys: KeyPattern = "canvas",
    layout: Layout = "by_head",
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    softcap: float | None = None,
    seed: int = 0,
) -> Case:
    """Random inputs whose keys and values are NaN or infinite wherever no row sees them.

    Rows: "scattered" ascending and gapped, ending in the last key; "last" and "first" consecutive; "any" unsorted with
    repeats, before, among and beyond the keys. Keys: "canvas" has position = row; "canvas_with_holes" has invalid rows
    too; "gapped" ascending positions; "any" unsorted with repeats and invalid rows.
    """
    random = torch.Generator().manual_seed(seed)
    q = torch.randn(num_rows, num_kv_heads * group, head_dim, generator=random)
    k = _empty(num_keys, num_kv_heads, head_dim, layout, dtype).copy_(
        torch.randn(num_keys, num_kv_heads, head_dim, generator=random)
    )
    value_dim = value_dim or head_dim
    v = _empty(num_keys, num_kv_heads, value_dim, layout, dtype).copy_(
        torch.randn(num_keys, num_kv_heads, value_dim, generator=random)
    )
    kv_positions = _key_positions(num_keys, keys, random)
    span = num_keys if kv_positions is None else int(kv_positions.max()) + 1
    has_holes = keys in ("canvas_with_holes", "any")
    case = Case(
        q=q.to(dtype) * 2,  # scores wide enough that a wrong mask or cap shows
        k=k,
        v=v,
        q_positions=_row_positions(num_rows, span, rows, random),
        kv_positions=kv_positions,
        scale=head_dim**-0.5,
        window=window,
        softcap=softcap,
        kv_valid=torch.rand(num_keys, generator=random) < 0.7 if has_holes else None,
    )
    unseen = ~case.visible().any(0)
    k[unseen], v[unseen] = torch.nan, torch.inf
    return case


def relative_rms(got: Tensor, expected: Tensor) -> float:
    """RMS of the difference over RMS of the expected; 0 when they are equal, even if zero or empty."""
    if torch.equal(got, expected):
        return 0.0
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def _empty(num_keys: int, num_heads: int, dim: int, layout: Layout, dtype: torch.dtype) -> Tensor:
    """[num_keys, num_heads, dim] as a view of a larger NaN-filled canvas."""
    if layout == "by_row":
        return torch.full((num_keys + 5, num_heads, dim), torch.nan, dtype=dtype)[:num_keys]
    if layout == "by_head":
        return torch.full((num_heads, num_keys + 5, dim), torch.nan, dtype=dtype).transpose(0, 1)[:num_keys]
    return torch.full((num_keys, num_heads, 2 * dim), torch.nan, dtype=dtype)[..., ::2]


def _row_positions(num_rows: int, span: int, rows: RowPattern, random: torch.Generator) -> Tensor:
    if rows == "any":
        return torch.randint(-2, span + 3, (num_rows,), generator=random)
    if rows == "last":
        return torch.arange(span - num_rows, span)
    if rows == "first":
        return torch.arange(num_rows)
    scattered = torch.randperm(span, generator=random)[:num_rows].sort().values
    return scattered + (span - 1 - int(scattered[-1])) if num_rows else scattered


def _key_positions(num_keys: int, keys: KeyPattern, random: torch.Generator) -> Tensor | None:
    if keys in ("canvas", "canvas_with_holes"):
        return None
    if keys == "gapped":
        return torch.randperm(2 * num_keys, generator=random)[:num_keys].sort().values
    return torch.randint(0, 2 * num_keys, (num_keys,), generator=random)
