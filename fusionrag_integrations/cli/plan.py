"""`fusionrag cache plan`: bytes of a corpus by codec and tier, before anything is computed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from .stored import fail, show, size


def plan(
    model: Annotated[str, typer.Option(help="Directory or Hub name; only its configuration and tokenizer are read.")],
    files: Annotated[list[Path] | None, typer.Argument(help="Text files of the corpus.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of the corpus, instead of files.")] = None,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens of a chunk.")] = 300,
    dtype: Annotated[str, typer.Option(help="The engine's dtype: float32, bfloat16 or float16.")] = "bfloat16",
    keep_plain: Annotated[bool, typer.Option(help="As the engine's keep_plain.")] = True,
    is_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Predict the size of a corpus's caches, by codec and tier."""
    import torch
    from transformers import AutoConfig

    from fusionrag_engine.config import CODECS, DTYPES
    from fusionrag_engine.plan import kv_shape, plan_storage

    if bool(files) == (tokens is not None):
        raise fail("give text files, or --tokens")
    if chunk_tokens < 1 or (tokens is not None and tokens < 1):
        raise fail("--tokens and --chunk-tokens are at least 1")
    if dtype not in DTYPES[1:]:
        raise fail(f"--dtype {dtype} is not accepted; choose one of {', '.join(DTYPES[1:])}")
    total = tokens if tokens is not None else _count_tokens(model, files or [])
    shape = kv_shape(AutoConfig.from_pretrained(model))
    whole, rest = divmod(total, chunk_tokens)
    counts = [chunk_tokens] * whole + [rest] * bool(rest)
    data: list[dict[str, Any]] = []
    for codec in CODECS:
        planned = plan_storage(counts, shape, getattr(torch, dtype), codec=codec, keep_plain=keep_plain)
        data.append({**asdict(planned), "bytes_per_token": planned.host_bytes / planned.num_tokens})
    rows = [
        (row["codec"], size(row["bytes_per_token"]), *(size(row[name]) for name in _COLUMNS.values())) for row in data
    ]
    title = f"{total} tokens in {len(counts)} chunks, {model} in {dtype}"
    show(is_json, data, title, ("codec", "A token", *_COLUMNS), rows)


_COLUMNS = {
    "Plain": "plain_bytes",
    "Enriched": "enriched_bytes",
    "Disk or remote": "disk_bytes",
    "While ingesting": "peak_bytes",
    "Host or device": "host_bytes",
}


def _count_tokens(model: str, files: list[Path]) -> int:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    try:
        texts = [path.read_text() for path in files]
    except (OSError, UnicodeDecodeError) as error:
        raise fail(f"a file of the corpus cannot be read: {error}") from error
    return sum(len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) for text in texts)
