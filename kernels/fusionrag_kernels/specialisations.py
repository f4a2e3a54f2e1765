"""Every kernel with every entry of the tuning table, as what an offline compiler needs: signatures and constants."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fusionrag_kernels.assemble.kernel import assemble_kernel
from fusionrag_kernels.critical_scores.kernel import key_scores_kernel, row_sums_kernel
from fusionrag_kernels.launch import block_dim
from fusionrag_kernels.paged_q_sparse_attention.kernel import paged_attention_kernel
from fusionrag_kernels.q_sparse_attention.kernel import attention_kernel
from fusionrag_kernels.q_sparse_attention.split_keys import merge_kernel
from fusionrag_kernels.tuning import (
    ASSEMBLE_ROWS,
    ASSEMBLE_WARPS,
    MERGE_WARPS,
    Backend,
    Tiles,
    precision,
    tables,
)

DTYPES = {4: ("fp32",), 2: ("bf16", "fp16")}
HEAD_DIMS = {64: (64,), 128: (80, 96, 128), 256: (256,)}
INT64 = {"row_positions", "row_starts"}
INT32 = {
    "key_positions", "tile_first", "tile_last", "tile_sequence", "tile_index", "page", "start", "first", "beyond",
    "num_entries", "page_positions", "stale",
}  # fmt: skip
FLOAT32 = {"log_sums", "cos", "sin", "parts"}
NUMBERS = {"factor": "fp32", "cap": "fp32"}
UNUSED = ("key_positions", "tile_first", "tile_last")


@dataclass(frozen=True)
class Specialisation:
    """One compilation: `signature` has every argument in order, "constexpr" for those in `constants`."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int


def specialisations(backend: Backend, *, is_quick: bool) -> Iterator[Specialisation]:
    """All, or every kernel in bfloat16 at head size 128 with most rules on."""
    modes = (0,) if is_quick else (0, 1, 2)
    for element_bytes, rows, padded_dim, tiles in tables(backend):
        if is_quick and (element_bytes, padded_dim) != (2, 128):
            continue
        for dtype in DTYPES[element_bytes][: 1 if is_quick else None]:
            for dim in HEAD_DIMS[padded_dim][-1 if is_quick else 0 :]:
                for rules in _rules(is_quick):
                    splits = 8 if rows == "few" else 1
                    yield from _attention(f"{dtype}-{dim}-{rows}", backend, dtype, dim, splits, tiles, rules, modes)
    for dtype in ("bf16",) if is_quick else ("bf16", "fp16", "fp32"):
        yield _make(
            merge_kernel, f"{dtype}-128", dtype, {"DIM": 128, "BLOCK_DIM": 128, "NUM_SPLITS": 8}, MERGE_WARPS, 1
        )
    yield from _assemblies(is_quick)


def _rules(is_quick: bool) -> list[dict[str, bool]]:
    plain = {"HAS_KEY_POSITIONS": False, "HAS_WINDOW": False, "HAS_SOFTCAP": False}
    everything = dict.fromkeys(plain, True)
    if is_quick:
        return [{**plain, "HAS_WINDOW": True, "HAS_SOFTCAP": True}]
    return [plain, {**plain, "HAS_WINDOW": True}, {**plain, "HAS_WINDOW": True, "HAS_SOFTCAP": True}, everything]


def _attention(
    name: str,
    backend: Backend,
    dtype: str,
    dim: int,
    splits: int,
    tiles: Tiles,
    rules: dict[str, bool],
    modes: tuple[int, ...],
) -> Iterator[Specialisation]:
    sizes = {"GROUP": 4, "DIM": dim, "BLOCK_DIM": block_dim(dim), "PRECISION": precision(backend), **rules}
    values = {"VALUE_DIM": dim, "BLOCK_VALUE_DIM": block_dim(dim)}
    blocks = {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n}
    name += "".join("-" + rule[4:].lower() for rule, is_on in rules.items() if is_on)
    warps, stages = tiles.num_warps, tiles.num_stages
    attention = {**sizes, **values, **blocks, "NUM_KV_HEADS": 8, "NUM_SPLITS": splits}
    yield _make(attention_kernel, name, dtype, attention, warps, stages)
    paged = {key: value for key, value in attention.items() if key not in ("HAS_KEY_POSITIONS", "BLOCK_N")}
    own = {"PAGE_SIZE": 64, "HALF": dim // 2, "HAS_SCATTERED": True, "HAS_STALE": True}
    yield _make(paged_attention_kernel, name, dtype, {**paged, **own}, warps, stages)
    yield _make(row_sums_kernel, name, dtype, {**sizes, **blocks}, warps, stages)
    for mode in modes:
        yield _make(key_scores_kernel, f"{name}-mode{mode}", dtype, {**sizes, **blocks, "MODE": mode}, warps, stages)


def _assemblies(is_quick: bool) -> Iterator[Specialisation]:
    for dim, block_n in ASSEMBLE_ROWS.items():
        if is_quick and dim != 128:
            continue
        for stored, has_scales in (("bf16", False), ("i8", True)):
            for dtype in ("bf16",) if is_quick else ("bf16", "fp16", "fp32"):
                constants = {
                    "HAS_SCALES": has_scales,
                    "HALF": dim // 2,
                    "DIM": dim,
                    "BLOCK_DIM": dim,
                    "BLOCK_N": block_n,
                }
                yield _make(
                    assemble_kernel, f"{stored}-{dtype}-{dim}", dtype, constants, ASSEMBLE_WARPS, 1, stored=stored
                )


def _make(
    kernel: Any, name: str, dtype: str, constants: dict[str, Any], warps: int, stages: int, stored: str = ""
) -> Specialisation:
    constants = dict(constants)
    if constants.get("HAS_KEY_POSITIONS") is False:
        constants.update(dict.fromkeys(UNUSED))
    if constants.get("NUM_SPLITS") == 1 or constants.get("MODE") == 2:
        constants["log_sums"] = None
    if constants.get("HAS_SCALES") is False:
        constants["scales"] = None
    signature = {}
    for argument in kernel.arg_names:
        is_constant = argument in constants or argument.endswith("_stride_d")  # heads are contiguous in every cache
        signature[argument] = "constexpr" if is_constant else _type(argument, dtype, stored, constants)
        if is_constant and argument not in constants:
            constants[argument] = 1
    return Specialisation(f"{kernel.__name__}-{name}", kernel, signature, constants, warps, stages)


def _type(argument: str, dtype: str, stored: str, constants: dict[str, Any]) -> str:
    if argument in INT64:
        return "*i64"
    if argument in INT32:
        return "*i32"
    if argument in FLOAT32 or (argument == "scales"):
        return "*fp32"
    if argument == "out":
        is_float32 = constants.get("NUM_SPLITS", 1) > 1 and "DIM" in constants and "GROUP" in constants
        return "*fp32" if is_float32 or "MODE" in constants else f"*{dtype}"
    if argument in ("q", "k", "v"):
        return f"*{dtype}"
    if argument == "stored":
        return f"*{stored}"
    return NUMBERS.get(argument, "i32")
