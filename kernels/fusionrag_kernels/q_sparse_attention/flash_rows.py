"""Ascending rows over their key intervals by the flash kernel, almost all of it without a mask.

The keys that all rows of a block see need no mask. What is left goes to smaller blocks of rows, and only the edges of
the smallest are masked. A row's pieces are merged by their log-sum-exp.
"""

from itertools import pairwise

import torch
from torch import Tensor

from fusionrag_kernels.q_sparse_attention.flash import flash, flash_masked
from fusionrag_kernels.visibility import Visibility, row_segments

BLOCK_ROWS = 512
MAX_EDGE_ROWS = 128
MAX_EDGE_KEYS = 1024
MIN_SHARED_KEYS = 64


class FlashRows:
    """Attention of folded rows q [Hkv, Nq*G, D] over k, v [Hkv, Nk, D], collected in `out` float32 [Hkv, Nq*G, D]."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, seen: Visibility, scale: float) -> None:
        self.q, self.k, self.v, self.seen, self.scale = q, k, v, seen, scale
        self.starts: list[int] = seen.starts.tolist()
        self.ends: list[int] = seen.ends.tolist()
        self.group = q.shape[1] // len(self.ends)
        self.out = q.new_empty(q.shape, dtype=torch.float32)
        self.logsumexp = q.new_empty(q.shape[:2], dtype=torch.float32)

    def run(self) -> Tensor:
        for first, beyond in row_segments(self.seen):
            self._descend(first, beyond, done=None, size=BLOCK_ROWS)
        return self.out

    def _descend(self, first: int, beyond: int, done: tuple[int, int] | None, size: int) -> None:
        """Attend rows first <= i < beyond, in blocks of `size`, to all they see outside the keys `done`."""
        for a, b in pairwise([*range(first, beyond, size), beyond]):
            done_here = self._attend_shared(a, b, done)
            if b - a == 1 or (b - a <= MAX_EDGE_ROWS and self._num_edge_keys(a, b) <= MAX_EDGE_KEYS):
                self._attend_edges(a, b, done_here)
            else:
                self._descend(a, b, done_here, max(size // 4, 1))

    def _num_edge_keys(self, a: int, b: int) -> int:
        return self.starts[b - 1] - self.starts[a] + self.ends[b - 1] - self.ends[a]

    def _attend_shared(self, a: int, b: int, done: tuple[int, int] | None) -> tuple[int, int] | None:
        """Attend rows a <= i < b to the keys that all of them see; return the keys then done."""
        start, end = self.starts[b - 1], self.ends[a]
        # One shared key is left to each edge, so that no row of an edge is without a key.
        start += self.starts[a] < start
        end -= end < self.ends[b - 1]
        if done is None:
            if end - start < MIN_SHARED_KEYS:
                return None
            self._attend(a, b, start, end, is_first=True)
            return start, end
        if done[0] - start >= MIN_SHARED_KEYS:
            self._attend(a, b, start, done[0], is_first=False)
            done = start, done[1]
        if end - done[1] >= MIN_SHARED_KEYS:
            self._attend(a, b, done[1], end, is_first=False)
            done = done[0], end
        return done

    def _attend_edges(self, a: int, b: int, done: tuple[int, int] | None) -> None:
        """Attend rows a <= i < b to all they see outside the keys `done`."""
        start, end = self.starts[a], self.ends[b - 1]
        if done is None:
            self._attend(a, b, start, end, is_first=True)
            return
        if start < done[0]:
            self._attend(a, b, start, done[0], is_first=False)
        if done[1] < end:
            self._attend(a, b, done[1], end, is_first=False)

    def _attend(self, a: int, b: int, start: int, end: int, *, is_first: bool) -> None:
        """Attend rows a <= i < b to the keys start <= j < end that they see, and merge with what they have seen."""
        rows = slice(a * self.group, b * self.group)
        q, k, v = self.q[:, rows], self.k[:, start:end], self.v[:, start:end]
        if self.starts[b - 1] <= start and end <= self.ends[a]:
            out, logsumexp = flash(q, k, v, self.scale)
        else:
            out, logsumexp = flash_masked(q, k, v, self._mask(a, b, start, end), self.scale)
        if is_first:
            self.out[:, rows], self.logsumexp[:, rows] = out, logsumexp
            return
        known = self.logsumexp[:, rows]
        self.out[:, rows].lerp_(out, torch.sigmoid(logsumexp - known)[..., None])
        torch.logaddexp(known, logsumexp, out=known)

    def _mask(self, a: int, b: int, start: int, end: int) -> Tensor:
        """Additive [rows, keys], for all heads."""
        keys = torch.arange(start, end)
        unseen = keys >= self.seen.ends[a:b, None]
        if self.starts[b - 1] > start:
            unseen |= keys < self.seen.starts[a:b, None]
        return self.q.new_zeros(b - a, end - start).masked_fill_(unseen, -torch.inf)
