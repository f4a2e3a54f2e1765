"""Questions over chunks: `{question, answers, ctxs}` files, LongBench-style lines, and generated sets by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusionrag_engine.errors import ConfigError
from fusionrag_engine.types import Chunk

from .generated import GENERATORS, generate

CHUNK_TOKENS = 300
"""Length of the pieces that a context given as one text is cut into."""


@dataclass(frozen=True)
class Example:
    """One question over its chunks; the first of `answers` is the gold whose probability is measured."""

    question: str
    answers: list[str]
    chunks: list[Chunk]


def load_examples(
    source: str | Path, limit: int | None = None, count_tokens: Callable[[str], int] = lambda text: len(text.split())
) -> list[Example]:
    """Read or generate at most `limit` examples.

    Args:
        source: a `.json` file, a list of `{question, answers, ctxs: [{title, text}]}`; a `.jsonl` file of
            `{input, context, answers}` (LongBench) or of the former; or a generated set, `needle`, `variables` or
            `two_hop` with its parameters: "needle:length=2000,depth=0.5,keys=4".
        count_tokens: length of a text, for what is generated or cut.

    Raises:
        ConfigError: no such file or set, or an entry without the fields named above.
    """
    name, _, parameters = str(source).partition(":")
    if name in GENERATORS:
        made = generate(name, parameters, 20 if limit is None else limit, count_tokens)
        return [Example(item.question, item.answers, [Chunk(text) for text in item.texts]) for item in made]
    path = Path(source)
    if not path.is_file():
        raise ConfigError(f"data {str(source)!r} is neither a file nor a generated set ({', '.join(GENERATORS)})")
    try:
        lines = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            items = [json.loads(line) for line in lines.splitlines() if line.strip()]
        else:
            items = json.loads(lines)
        return [_read(item, count_tokens) for item in items[:limit]]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: {type(error).__name__}: {error}; give {{question, answers, ctxs: [{{title, text}}]}} or lines "
            f"of {{input, context, answers}}"
        ) from error


def _read(item: dict[str, Any], count_tokens: Callable[[str], int]) -> Example:
    answers = [str(answer) for answer in item["answers"]]
    if not answers:
        raise ValueError("an entry has no answers")
    if "context" in item:
        return Example(item["input"], answers, [Chunk(text) for text in cut(item["context"], count_tokens)])
    texts = [f"{ctx['title']}\n{ctx['text']}" if ctx.get("title") else ctx["text"] for ctx in item["ctxs"]]
    return Example(item["question"], answers, [Chunk(text) for text in texts])


def cut(context: str, count_tokens: Callable[[str], int]) -> list[str]:
    """Cut one text into chunks of about `CHUNK_TOKENS`, at line ends, and at spaces in lines longer than that."""
    chunks: list[str] = []
    words: list[str] = []
    length = 0
    for line in context.splitlines(keepends=True):
        pieces = [line] if count_tokens(line) <= CHUNK_TOKENS else [f"{word} " for word in line.split()]
        for piece in pieces:
            size = count_tokens(piece)
            if words and length + size > CHUNK_TOKENS:
                chunks.append("".join(words).strip())
                words, length = [], 0
            words.append(piece)
            length += size
    chunks.append("".join(words).strip())
    return [chunk for chunk in chunks if chunk]
