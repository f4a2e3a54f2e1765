"""An entry as the bytes of one file: safetensors with a header of ours and a checksum over everything."""

from __future__ import annotations

import json
import math
from typing import Any

import safetensors.torch
import torch
import xxhash
from torch import Tensor

from fusionrag_engine.keys import FORMAT_VERSION, tensor_bytes

from .entry import Entry
from .errors import CorruptEntryError

_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
}
_DAMAGE = (KeyError, ValueError, TypeError, IndexError, AttributeError, RuntimeError, RecursionError, OverflowError)
MAX_HEADER = 1 << 26


def to_bytes(entry: Entry) -> bytes:
    tensors = {name: tensor.cpu().contiguous() for name, tensor in entry.tensors().items()}
    tensors["token_ids"] = torch.tensor(entry.token_ids, dtype=torch.int32)
    header = {"format": str(FORMAT_VERSION), "key": entry.key, "start": str(entry.start)}
    header["checksum"] = _checksum(tensors, header)
    data: bytes = safetensors.torch.save(tensors, metadata=header)
    return data


def from_buffer(buffer: Any, key: str) -> Entry:
    """The entry of that key in a writable buffer, its tensors views of it.

    Raises:
        CorruptEntryError: the bytes are not a whole entry of that key and of this format.
    """
    try:
        tensors, header = _parse(buffer)
        checksum = header.pop("checksum")
        entry = Entry(
            key=header["key"],
            token_ids=tuple(tensors["token_ids"].tolist()),
            start=int(header["start"]),
            keys=tensors["keys"],
            values=tensors["values"],
            key_scales=tensors.get("key_scales"),
            value_scales=tensors.get("value_scales"),
        )
    except _DAMAGE as error:
        raise CorruptEntryError(f"{type(error).__name__}: {error}") from error
    if header.get("format") != str(FORMAT_VERSION) or entry.key != key:
        raise CorruptEntryError(f"holds key {entry.key} in format {header.get('format')}")
    if checksum != _checksum(tensors, header):
        raise CorruptEntryError("checksum differs")
    return entry


def told_size(data: bytes) -> int:
    """Size of the whole file, as the header at its beginning tells it; raises one of several errors if there is none.

    `data`: the first 8 bytes and the header.
    """
    tensors = json.loads(data[8:])
    return len(data) + int(max(item["data_offsets"][1] for name, item in tensors.items() if name != "__metadata__"))


def header_length(data: bytes) -> int:
    """Length of the header behind the first 8 bytes; 0 where they tell none that can be."""
    length = int.from_bytes(data[:8], "little")
    return length if len(data) >= 8 and length < MAX_HEADER else 0


def _parse(buffer: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata. Every byte behind the header must belong to exactly one tensor."""
    view = memoryview(buffer)
    begin = 8 + header_length(bytes(view[:8]))
    if not 8 < begin <= len(view):
        raise ValueError(f"a file of {len(view)} bytes with a header of {begin - 8}")
    fields = json.loads(bytes(view[8:begin]))
    metadata: dict[str, str] = dict(fields.pop("__metadata__"))
    tensors, end = {}, 0
    for name, field in sorted(fields.items(), key=lambda item: int(item[1]["data_offsets"][0])):
        start, stop = map(int, field["data_offsets"])
        shape, dtype = list(map(int, field["shape"])), _DTYPES[field["dtype"]]
        if start != end or min(shape) < 1 or stop - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"tensor {name} does not lie where its shape says")
        flat = torch.frombuffer(buffer, dtype=dtype, count=math.prod(shape), offset=begin + start)
        tensors[name], end = flat.view(shape), stop
    if begin + end != len(view):
        raise ValueError(f"{len(view)} bytes, of which {begin + end} belong to it")
    return tensors, metadata


def _checksum(tensors: dict[str, Tensor], header: dict[str, str]) -> str:
    """Over every tensor, and every other field of the header."""
    state = xxhash.xxh3_128(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        state.update(f"{name}:{tuple(tensors[name].shape)}:{tensors[name].dtype}".encode())
        state.update(tensor_bytes(tensors[name]))
    return state.hexdigest()
