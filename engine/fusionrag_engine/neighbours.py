"""Which chunks a chunk is enriched with (FusionRAG, arXiv 2601.12904, section 3.1)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .catalog import Catalog
from .errors import ConfigError


def content_digest(text: str) -> str:
    """Equal for texts that differ in white space only: such chunks are duplicates, never each other's neighbours."""
    return hashlib.blake2b(" ".join(text.split()).encode(), digest_size=16).hexdigest()


def as_embeddings(embeddings: Any, num_chunks: int) -> list[NDArray[np.float32] | None]:
    """Check embeddings `[num_chunks, dim]` and normalise their rows. A row of a list may be None: the chunk has none.

    Raises:
        ConfigError: another shape, or a row with NaN, infinity or no length.
    """
    result: list[NDArray[np.float32] | None] = [None] * num_chunks
    rows = list(range(num_chunks))
    if isinstance(embeddings, (list, tuple)) and len(embeddings) == num_chunks:
        rows = [index for index in rows if embeddings[index] is not None]
        embeddings = [embeddings[index] for index in rows]
        if not rows:
            return result
    try:
        array = np.asarray(embeddings, dtype=np.float32)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"embeddings are not a table of numbers ({error}); give one row a chunk") from error
    if array.ndim != 2 or array.shape[0] != len(rows):
        raise ConfigError(f"embeddings have shape {array.shape}; give one row a chunk: ({len(rows)}, dim)")
    norms = np.linalg.norm(array, axis=1, keepdims=True)
    bad = np.flatnonzero(~(np.isfinite(norms[:, 0]) & (norms[:, 0] > 0)))
    if bad.size:
        names = [rows[index] for index in bad[:5]]
        raise ConfigError(f"embeddings of chunks {names} are zero or not finite; embed these texts again")
    for index, row in zip(rows, np.asarray(array / norms, dtype=np.float32), strict=True):
        result[index] = row
    return result


def most_similar(catalog: Catalog, scope: str, wanted: Mapping[str, str], top_n: int) -> dict[str, list[str]]:
    """The `top_n` most similar chunks of the whole scope, by cosine, for each wanted chunk (key -> content digest).

    Never the chunk itself nor a duplicate of it, and of several duplicates only one. Ties go to the smaller key, so the
    result depends only on what the scope holds. A chunk without an embedding is absent from the result.
    """
    keys, contents, vectors = catalog.embeddings(scope)
    groups: dict[int, list[int]] = {}
    for index, vector in enumerate(vectors):
        groups.setdefault(len(vector), []).append(index)
    result: dict[str, list[str]] = {}
    for members in groups.values():  # embeddings of another size come from another model and cannot be compared
        matrix = np.stack([vectors[index] for index in members])
        for row, index in enumerate(members):
            if keys[index] not in wanted:
                continue
            order = np.argsort(-(matrix @ matrix[row]), kind="stable")
            taken: set[str] = {contents[index]}
            chosen: list[str] = []
            for other in order:
                if len(chosen) == top_n:
                    break
                candidate = members[other]
                if contents[candidate] not in taken:
                    taken.add(contents[candidate])
                    chosen.append(keys[candidate])
            result[keys[index]] = chosen
    return result


def given_neighbours(
    neighbours: Sequence[Sequence[int | str]],
    keys: Sequence[str | None],
    contents: Sequence[str],
    scopes: Sequence[str],
    catalog: Catalog,
    ids: Mapping[tuple[str, str], str],
    top_n: int,
) -> dict[str, list[str]]:
    """Resolve neighbour lists given by the caller: indices into the call's chunks, or chunk ids of the same scope.

    The first `top_n` of each are used; the chunk itself, its duplicates and chunks without a cache are left out.

    Raises:
        ConfigError: the number of lists differs from that of chunks, an index is out of range, an id is unknown, or a
            neighbour is of another scope.
    """
    if len(neighbours) != len(keys):
        raise ConfigError(f"{len(neighbours)} neighbour lists for {len(keys)} chunks; give one list a chunk")
    result: dict[str, list[str]] = {}
    for index, names in enumerate(neighbours):
        own = keys[index]
        if own is None:
            continue
        taken: set[str] = {contents[index]}
        chosen: list[str] = []
        for name in names:
            found = _resolve(name, index, keys, contents, scopes, catalog, ids)
            if found is not None and found[1] not in taken and len(chosen) < top_n:
                taken.add(found[1])
                chosen.append(found[0])
        result[own] = chosen
    return result


def _resolve(
    name: int | str,
    index: int,
    keys: Sequence[str | None],
    contents: Sequence[str],
    scopes: Sequence[str],
    catalog: Catalog,
    ids: Mapping[tuple[str, str], str],
) -> tuple[str, str] | None:
    """Key and content digest of one named neighbour; None where it has no cache."""
    if isinstance(name, str):
        scope = scopes[index]
        key = ids.get((scope, name)) or next((key for _, key in catalog.keys_of(name, scope)), None)
        row = None if key is None else catalog.get(key)
        if row is None:
            raise ConfigError(
                f"neighbour id {name!r} of chunk {index} is not known in scope {scope!r}; precompute it first"
            )
        return row.key, row.content
    position = int(name)
    if not 0 <= position < len(keys):
        raise ConfigError(f"neighbour index {name!r} of chunk {index} is out of range; there are {len(keys)} chunks")
    if scopes[position] != scopes[index]:
        raise ConfigError(
            f"neighbour {position} of chunk {index} is in scope {scopes[position]!r}, the chunk in {scopes[index]!r}; "
            f"chunks are enriched within their scope only"
        )
    other = keys[position]
    return None if other is None else (other, contents[position])
