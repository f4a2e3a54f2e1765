"""Assemble-then-attend: one sequence's pages gathered into a cache of its own, and attention over that.

The definition with the reference attention, the plain-torch path with the fast one.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fusionrag_kernels.assemble.reference import rotate
from fusionrag_kernels.paged_q_sparse_attention.pages import SCATTERED, PageTable, is_stale


def gather(
    k_pages: Tensor, v_pages: Tensor, table: PageTable, sequence: int, inv_freq: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys [N, Hkv, D] in their places, values [N, Hkv, Dv] and positions int64 [N] that a sequence sees."""
    page_size = k_pages.shape[1]
    rows = torch.arange(page_size, device=k_pages.device)
    keys, values, positions = [], [], []
    for entry in range(int(table.num_entries[sequence])):
        page, start = int(table.page[sequence, entry]), int(table.start[sequence, entry])
        kept = (rows >= table.first[sequence, entry]) & (rows < table.beyond[sequence, entry])
        kept &= ~is_stale(table, sequence, entry, page_size)
        if start == SCATTERED:
            assert table.row_positions is not None
            positions.append(table.row_positions[page][kept].long())
        else:
            positions.append(start + rows[kept])
        moved = k_pages[page][kept]
        turn = int(table.turn[sequence, entry])
        if inv_freq is not None and turn != 0:
            moved = rotate(moved.float()[None], (inv_freq.double() * turn)[None])[0].to(k_pages.dtype)
        keys.append(moved)
        values.append(v_pages[page][kept])
    if not keys:
        return k_pages[0, :0], v_pages[0, :0], rows[:0]
    return torch.cat(keys), torch.cat(values), torch.cat(positions)


@torch.no_grad()
def attend_gathered(
    attention: Callable[..., Tensor],
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: PageTable,
    q_positions: Tensor,
    row_starts: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    inv_freq: Tensor | None,
) -> Tensor:
    """The contract of `fusionrag_kernels.paged_q_sparse_attention` by a single-sequence `attention`."""
    out = q.new_zeros(q.shape[0], q.shape[1], v_pages.shape[3])
    for sequence in range(table.page.shape[0]):
        rows = slice(int(row_starts[sequence]), int(row_starts[sequence + 1]))
        if rows.start == rows.stop:
            continue
        k, v, positions = gather(k_pages, v_pages, table, sequence, inv_freq)
        out[rows] = attention(q[rows], k, v, q_positions[rows], positions, scale=scale, window=window, softcap=softcap)
    return out
