"""Random batches over shared pages, beside the dense cache each sequence stands for: shared by tests and benchmarks."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusionrag_kernels.assemble.reference import rotate
from fusionrag_kernels.paged_q_sparse_attention import SCATTERED, PageTable, mark_stale, paged_q_sparse_attention
from fusionrag_kernels.q_sparse_attention import q_sparse_attention

Entry = tuple[int, int, int, int, int]  # page, start, first, beyond, turn


@dataclass(frozen=True)
class Dense:
    """What one sequence's pages amount to: a key and value a position, moved, with recomputed rows in place."""

    rows: slice
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Batch:
    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    table: PageTable
    q_positions: Tensor
    row_starts: Tensor
    rules: dict[str, Any]
    dense: list[Dense]

    def changed(self, **fields: Any) -> "Batch":
        return replace(self, **fields)

    def attend(self, impl: str = "auto") -> Tensor:
        return paged_q_sparse_attention(
            self.q, self.k_pages, self.v_pages, self.table, self.q_positions, self.row_starts, **self.rules, impl=impl
        )

    def assemble_then_attend(self) -> Tensor:
        """float32: attention over each dense cache, by the single-sequence reference."""
        rules = {name: value for name, value in self.rules.items() if name != "inv_freq"}
        outs = [
            q_sparse_attention(
                self.q[one.rows].float(), one.k, one.v, self.q_positions[one.rows], **rules, impl="reference"
            )
            for one in self.dense
        ]
        return torch.cat(outs)


def make_batch(
    *,
    num_sequences: int = 3,
    num_chunks: int = 4,
    page_size: int = 32,
    num_kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 64,
    value_dim: int | None = None,
    rotary_dim: int | None = None,
    ratio: float = 0.3,
    num_asking: int = 3,
    window: int | None = None,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Batch:
    """Sequences that share chunk pages at different places; recomputed and asking rows in pages of their own.

    Recomputed are a random `ratio` of each chunk and the rows at its pages' edges (none at ratio 0). The second
    sequence is empty. What is no valid row of a page is NaN; pages stand in the pool in random order.
    """
    random = torch.Generator().manual_seed(seed)
    value_dim = value_dim or head_dim
    half = (rotary_dim or head_dim) // 2
    inv_freq = 10000.0 ** (-torch.arange(half) / half)
    pool = _Pool(page_size, num_kv_heads, head_dim, value_dim, dtype, random)
    chunks = [pool.add_chunk() for _ in range(num_chunks)]
    entries: list[list[Entry]] = []
    dense, positions, recomputed = [], [], []
    row = 0
    for sequence in range(num_sequences):
        if sequence == 1:
            entries.append([])
            positions.append(torch.empty(0, dtype=torch.int64))
            recomputed.append(positions[-1])
            dense.append(Dense(slice(row, row), *pool.rows(0)))
            continue
        order = torch.randperm(num_chunks, generator=random)[: 1 + int(torch.randint(num_chunks, (), generator=random))]
        shared, k, v, edges = pool.lay_out([chunks[i] for i in order.tolist()], inv_freq)
        length = k.shape[0]
        stale = torch.rand(length, generator=random) < ratio
        stale[edges] = ratio > 0
        again = stale.nonzero().flatten()
        at = torch.cat([again, torch.arange(length, length + num_asking)])
        own, own_k, own_v = pool.add_own(at)
        k = torch.cat([k, own_k[:0].new_zeros(num_asking, *k.shape[1:])]).index_copy(0, at, own_k)
        v = torch.cat([v, own_v[:0].new_zeros(num_asking, *v.shape[1:])]).index_copy(0, at, own_v)
        entries.append(shared + own)
        dense.append(Dense(slice(row, row + len(at)), k, v))
        positions.append(at)
        recomputed.append(again)
        row += len(at)
    table = pool.table(entries)
    table = replace(table, stale=mark_stale(table, page_size, torch.cat(recomputed), _starts(recomputed)))
    return Batch(
        q=(2 * torch.randn(row, num_kv_heads * group, head_dim, generator=random)).to(dtype),
        k_pages=torch.stack(pool.keys),
        v_pages=torch.stack(pool.values),
        table=table,
        q_positions=torch.cat(positions),
        row_starts=_starts(positions),
        rules={"scale": head_dim**-0.5, "window": window, "softcap": softcap, "inv_freq": inv_freq},
        dense=dense,
    )


@dataclass(frozen=True)
class _Chunk:
    pages: list[tuple[int, int, int]]  # page, first, beyond
    lead: int
    place: int
    k: Tensor
    v: Tensor


class _Pool:
    """Pages that grow one by one."""

    def __init__(
        self, page_size: int, heads: int, dim: int, value_dim: int, dtype: torch.dtype, random: torch.Generator
    ) -> None:
        self.page_size, self.heads, self.dims, self.dtype, self.random = (
            page_size,
            heads,
            (dim, value_dim),
            dtype,
            random,
        )
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.row_positions: list[Tensor] = []
        self.add_page()  # named by nobody

    def rows(self, count: int) -> tuple[Tensor, Tensor]:
        """Random keys and values [count, Hkv, dim], float32 numbers that the pages' dtype holds exactly."""
        k, v = (torch.randn(count, self.heads, dim, generator=self.random) for dim in self.dims)
        return k.to(self.dtype).float(), v.to(self.dtype).float()

    def add_page(self) -> int:
        for pages, dim in ((self.keys, self.dims[0]), (self.values, self.dims[1])):
            pages.append(torch.full((self.page_size, self.heads, dim), torch.nan, dtype=self.dtype))
        self.row_positions.append(torch.full((self.page_size,), 7, dtype=torch.int32))
        return len(self.keys) - 1

    def fill(self, k: Tensor, v: Tensor, lead: int) -> list[tuple[int, int, int]]:
        """Rows into new pages, from row `lead` of the first on."""
        pages, done = [], 0
        while done < k.shape[0]:
            count = min(self.page_size - lead, k.shape[0] - done)
            page = self.add_page()
            self.keys[page][lead : lead + count] = k[done : done + count].to(self.dtype)
            self.values[page][lead : lead + count] = v[done : done + count].to(self.dtype)
            pages.append((page, lead, lead + count))
            done, lead = done + count, 0
        return pages

    def add_chunk(self) -> _Chunk:
        length = 1 + int(torch.randint(3 * self.page_size, (), generator=self.random))
        lead = int(torch.randint(self.page_size, (), generator=self.random))
        k, v = self.rows(length)
        place = int(torch.randint(100, (), generator=self.random))
        return _Chunk(self.fill(k, v, lead), lead, place, k, v)

    def lay_out(self, chunks: list[_Chunk], inv_freq: Tensor) -> tuple[list[Entry], Tensor, Tensor, list[int]]:
        """Chunks one after another from position 0: entries, dense keys and values, positions at the pages' edges."""
        entries: list[Entry] = []
        edges, keys, values, at = [], [], [], 0
        for chunk in chunks:
            turn = at - chunk.place
            for index, (page, first, beyond) in enumerate(chunk.pages):
                start = at - chunk.lead + index * self.page_size
                entries.append((page, start, first, beyond, turn))
                edges += [start + first, start + beyond - 1]
            keys.append(rotate(chunk.k[None], (inv_freq.double() * turn)[None])[0])
            values.append(chunk.v)
            at += chunk.k.shape[0]
        return entries, torch.cat(keys), torch.cat(values), edges

    def add_own(self, positions: Tensor) -> tuple[list[Entry], Tensor, Tensor]:
        k, v = self.rows(len(positions))
        entries: list[Entry] = []
        for index, (page, first, beyond) in enumerate(self.fill(k, v, 0)):
            begin = index * self.page_size
            self.row_positions[page][first:beyond] = positions[begin : begin + beyond - first].to(torch.int32)
            entries.append((page, SCATTERED, first, beyond, 0))
        return entries, k, v

    def table(self, entries: list[list[Entry]]) -> PageTable:
        longest = max(map(len, entries))
        garbage: Entry = (10**6, 0, 0, self.page_size, 3)  # behind num_entries: not to be read
        fields = torch.tensor([own + [garbage] * (longest - len(own)) for own in entries], dtype=torch.int32)
        shuffled = torch.randperm(len(self.keys), generator=self.random)
        place = shuffled.argsort().to(torch.int32)
        self.keys = [self.keys[i] for i in shuffled.tolist()]
        self.values = [self.values[i] for i in shuffled.tolist()]
        row_positions = torch.stack(self.row_positions)[shuffled]
        page, start, first, beyond, turn = fields.unbind(-1)
        page = torch.where(page == garbage[0], page, place[page.clamp(max=len(place) - 1).long()])
        counts = torch.tensor([len(own) for own in entries], dtype=torch.int32)
        return PageTable(page, start, first, beyond, turn, counts, row_positions)


def _starts(parts: list[Tensor]) -> Tensor:
    return torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)
