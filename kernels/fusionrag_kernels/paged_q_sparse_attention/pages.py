"""`PageTable`: which rows of which pages make up the cache of each sequence of a batch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fusionrag_kernels.errors import ArgumentError

WORD = 32


@dataclass(frozen=True)
class PageTable:
    """Entry e of sequence b: rows first[b, e] <= t < beyond[b, e] of page[b, e] belong to the sequence.

    Attributes:
        page: int32 [B, E] page of the pool. Entries from num_entries[b] on are not read.
        start: int32 [B, E] position of row 0 of the page, so that row t is at start + t (it may be negative where
            `first` is not 0). SCATTERED: the page's rows have the positions written in `row_positions`.
        first, beyond: int32 [B, E], 0 <= first <= beyond <= page size: the rows that are valid. A chunk need not begin
            or end at a page's edge.
        turn: int32 [B, E] positions by which the keys of the page are rotated when they are read. A shared chunk page
            holds keys as they were computed, and turn is this request's place of the chunk minus the chunk's own. An
            own page has 0: its keys are where they belong.
        num_entries: int32 [B]; 0 is an empty cache.
        row_positions: int32 [num_pages, page_size] positions of the rows of scattered pages, ascending within the rows
            of an entry; None where no entry is scattered. A request's recomputed tokens live in such pages of its own.
        stale: int32 [B, E, page_size / 32], bit t % 32 of word t // 32 set where row t is not to be seen: the stale
            original of a recomputed row. One bit a cached token and request, whatever the number of rows; shared
            pages stay as they are. None: no row is.
    """

    page: Tensor
    start: Tensor
    first: Tensor
    beyond: Tensor
    turn: Tensor
    num_entries: Tensor
    row_positions: Tensor | None = None
    stale: Tensor | None = None


SCATTERED = -(2**29)


def mark_stale(table: PageTable, page_size: int, positions: Tensor, row_starts: Tensor) -> Tensor:
    """The `stale` bits of `table` after recomputing some rows of its contiguous (not scattered) pages.

    Args:
        page_size: rows of a page, a multiple of 32.
        positions: int64 [N] recomputed positions of all sequences, packed, ascending within each.
        row_starts: int64 [B + 1] where each sequence's begin in `positions`; the last is N.

    Returns:
        int32 [B, E, page_size / 32]. Entries whose rows the request computed itself, such as its question, are marked
        too if their positions are given: give only those of rows that have an original.
    """
    num_sequences, num_entries = table.page.shape
    if page_size % WORD:
        raise ArgumentError(f"page_size is a multiple of {WORD} for stale bits, got {page_size}")
    device = table.page.device
    sequences = torch.arange(num_sequences, device=device)
    of_row = torch.repeat_interleave(sequences, row_starts.diff(), output_size=positions.shape[0])
    at = table.start[..., None].long() + torch.arange(page_size, device=device)
    is_marked = torch.isin(at + (sequences << 32)[:, None, None], positions + (of_row << 32))
    bits = is_marked & (table.start != SCATTERED)[..., None]
    words = bits.view(num_sequences, num_entries, page_size // WORD, WORD).long()
    packed = (words << torch.arange(WORD, device=words.device)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def is_stale(table: PageTable, sequence: int, entry: int, page_size: int) -> Tensor:
    """bool [page_size]: the stale bits of an entry, unpacked."""
    rows = torch.arange(page_size, device=table.page.device)
    if table.stale is None:
        return torch.zeros_like(rows, dtype=torch.bool)
    words = table.stale[sequence, entry].long()
    return (words[rows // WORD] >> (rows % WORD)) & 1 != 0
