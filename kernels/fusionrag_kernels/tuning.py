"""Tile sizes of every Triton kernel: one table, outside the kernels, so that it also holds interpreted and offline."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Backend = Literal["cuda", "hip"]
Rows = Literal["few", "many"]
FEW_ROWS = 16


@dataclass(frozen=True)
class Tiles:
    """A kernel's tile: `block_m` folded rows (row x head of the group) by `block_n` keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# (backend, bytes of an element, rows, padded head size): tiles. Chosen by reckoning, not measured yet.
ATTENTION: dict[tuple[Backend, int, Rows, int], Tiles] = {
    ("cuda", 2, "many", 64): Tiles(128, 64, 4, 3),
    ("cuda", 2, "many", 128): Tiles(128, 64, 8, 3),
    ("cuda", 2, "many", 256): Tiles(64, 32, 8, 2),
    ("cuda", 2, "few", 64): Tiles(16, 64, 4, 3),
    ("cuda", 2, "few", 128): Tiles(16, 64, 4, 3),
    ("cuda", 2, "few", 256): Tiles(16, 32, 4, 2),
    ("cuda", 4, "many", 64): Tiles(64, 32, 4, 2),
    ("cuda", 4, "many", 128): Tiles(64, 32, 8, 2),
    ("cuda", 4, "many", 256): Tiles(32, 32, 8, 1),
    ("cuda", 4, "few", 64): Tiles(16, 32, 4, 2),
    ("cuda", 4, "few", 128): Tiles(16, 32, 4, 2),
    ("cuda", 4, "few", 256): Tiles(16, 32, 8, 1),
    ("hip", 2, "many", 64): Tiles(128, 64, 4, 1),
    ("hip", 2, "many", 128): Tiles(128, 32, 8, 1),
    ("hip", 2, "many", 256): Tiles(64, 32, 8, 1),
    ("hip", 2, "few", 64): Tiles(16, 64, 4, 1),
    ("hip", 2, "few", 128): Tiles(16, 64, 4, 1),
    ("hip", 2, "few", 256): Tiles(16, 32, 4, 1),
    ("hip", 4, "many", 64): Tiles(64, 32, 4, 1),
    ("hip", 4, "many", 128): Tiles(32, 32, 4, 1),
    ("hip", 4, "many", 256): Tiles(16, 32, 4, 1),
    ("hip", 4, "few", 64): Tiles(16, 32, 4, 1),
    ("hip", 4, "few", 128): Tiles(16, 32, 4, 1),
    ("hip", 4, "few", 256): Tiles(16, 32, 4, 1),
}

MERGE_WARPS = 4
ASSEMBLE_ROWS = {64: 64, 128: 32, 256: 16}
ASSEMBLE_WARPS = 4
MAX_SPLITS = 32
MIN_SPLIT_TILES = 4


def padded(dim: int) -> int:
    """The head size a tile has: tensor cores and the table know 64, 128 and 256."""
    return 64 if dim <= 64 else 128 if dim <= 128 else 256


def attention_tiles(backend: Backend, element_bytes: int, num_folded_rows: int, head_dim: int) -> Tiles:
    rows: Rows = "few" if num_folded_rows <= FEW_ROWS else "many"
    return ATTENTION[backend, element_bytes, rows, padded(head_dim)]


def tables(backend: Backend) -> Iterator[tuple[int, Rows, int, Tiles]]:
    """Every entry for a backend: bytes of an element, rows, padded head size, tiles."""
    for (of, element_bytes, rows, dim), tiles in ATTENTION.items():
        if of == backend:
            yield element_bytes, rows, dim, tiles


def precision(backend: Backend) -> str:
    """How float32 tiles are multiplied: three TF32 products where there is no float32 tensor core (error ~1e-6)."""
    return "tf32x3" if backend == "cuda" else "ieee"


def num_splits(num_programs: int, num_tiles: int, num_processors: int) -> int:
    """Parts to cut the keys into, so that few rows over a long cache still fill the device."""
    if num_programs >= num_processors:
        return 1
    return max(1, min(MAX_SPLITS, 2 * num_processors // num_programs, num_tiles // MIN_SPLIT_TILES))
