"""Turns positions, validity and window into one interval of key rows per query row."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Visibility:
    """Query rows in ascending position; row i sees the (reordered) key rows starts[i] <= j < ends[i].

    Both bounds ascend and no interval is empty: rows that see no key are left out.
    `q_order` and `kv_order` are the original rows to take, None where all are taken as they are.
    """

    q_order: Tensor | None
    kv_order: Tensor | None
    starts: Tensor
    ends: Tensor


def visibility(
    q_positions: Tensor, kv_positions: Tensor | None, kv_valid: Tensor | None, num_keys: int, window: int | None
) -> Visibility:
    """Row i sees key j iff kv_positions[j] <= q_positions[i], closer than `window`, and kv_valid[j]."""
    q_order = None if _ascends(q_positions) else q_positions.argsort(stable=True)
    if q_order is not None:
        q_positions = q_positions[q_order]
    kv_order, kv_positions = _order_keys(kv_positions, kv_valid, q_positions)
    starts, ends = _intervals(q_positions, kv_positions, num_keys, window)
    sees_any = ends > starts
    if not bool(sees_any.all()):
        kept = sees_any.nonzero().flatten()
        q_order = kept if q_order is None else q_order[kept]
        starts, ends = starts[kept], ends[kept]
    return Visibility(q_order, kv_order, starts, ends)


def row_segments(seen: Visibility) -> list[tuple[int, int]]:
    """Runs of rows whose intervals overlap or touch, so that each key of a run is seen by at least one of its rows."""
    if seen.starts[-1] <= seen.ends[0]:
        return [(0, seen.ends.shape[0])]
    gaps = (seen.starts[1:] > seen.ends[:-1]).nonzero().flatten().add_(1).tolist()
    return list(pairwise([0, *gaps, seen.ends.shape[0]]))


def _order_keys(
    kv_positions: Tensor | None, kv_valid: Tensor | None, q_positions: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Valid key rows in ascending position, and their positions; None where a key's row is its position."""
    if kv_positions is None:
        if kv_valid is None or q_positions.shape[0] == 0:
            return None, None
        reach = max(int(q_positions[-1]) + 1, 0)
        if bool(kv_valid[:reach].all()):
            return None, None
        order = kv_valid[:reach].nonzero().flatten()
        return order, order
    kv_order = None
    if kv_valid is not None and not bool(kv_valid.all()):
        kv_order = kv_valid.nonzero().flatten()
        kv_positions = kv_positions[kv_order]
    if not _ascends(kv_positions):
        by_position = kv_positions.argsort(stable=True)
        kv_positions = kv_positions[by_position]
        kv_order = by_position if kv_order is None else kv_order[by_position]
    return kv_order, kv_positions


def _intervals(
    q_positions: Tensor, kv_positions: Tensor | None, num_keys: int, window: int | None
) -> tuple[Tensor, Tensor]:
    beyond = q_positions + 1
    if kv_positions is None:
        ends = beyond.clamp(0, num_keys)
        starts = torch.zeros_like(ends) if window is None else (beyond - window).clamp(0, num_keys)
        return starts, ends
    ends = torch.searchsorted(kv_positions, beyond)
    starts = torch.zeros_like(ends) if window is None else torch.searchsorted(kv_positions, beyond - window)
    return starts, ends


def _ascends(positions: Tensor) -> bool:
    return positions.shape[0] < 2 or bool((positions[1:] >= positions[:-1]).all())
