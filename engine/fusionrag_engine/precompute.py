"""Offline phase: plain caches behind `P`, then enriched ones behind `P` and the neighbours' plain caches.

FusionRAG, arXiv 2601.12904, section 3.1, eq. 10. Chunks go through the packed forward in batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .assemble import place_entry
from .canvas import Canvas
from .catalog import ChunkRow
from .keys import token_fingerprint
from .layout import PromptLayout
from .library import ChunkLibrary
from .neighbours import as_embeddings, content_digest, given_neighbours, most_similar
from .refresh import Deadline, RefreshReport, find_stale
from .rope import Rope
from .runner import ModelRunner, Rows
from .store import Entry
from .store.codecs import encode
from .types import Chunk, ChunkRecord, PrecomputeReport

BATCH_BYTES = 256 << 20
"""Canvases of one batch together; a single longer sequence is a batch of its own."""

REFRESH_STEP = 8
"""Chunks enriched between two looks at the clock."""

Progress = Callable[[int], Any]


@dataclass
class _Job:
    """One distinct chunk of a call. `neighbours`: what to enrich it with now; none while plain caches are computed."""

    key: str
    scope: str
    content: str
    token_ids: list[int]
    embedding: NDArray[np.float32] | None = None
    neighbours: list[str] = field(default_factory=list)


@dataclass
class _Counts:
    """What a call did so far."""

    plain_computed: int = 0
    enriched_computed: int = 0
    tokens: int = 0
    bytes: int = 0
    skipped: dict[int, str] = field(default_factory=dict)


class Precomputer:
    """Computes and stores chunk caches for one model, layout and library."""

    def __init__(
        self,
        runner: ModelRunner,
        rope: Rope,
        layout: PromptLayout,
        library: ChunkLibrary,
        *,
        top_n: int,
        max_context: int,
        max_rows: int,
        keep_plain: bool = True,
    ) -> None:
        self.runner = runner
        self.rope = rope
        self.layout = layout
        self.library = library
        self.top_n = top_n
        self.max_context = max_context
        self.max_rows = max_rows
        self.keep_plain = keep_plain
        self._prefix: Canvas | None = None

    def prefix(self) -> Canvas:
        """The rows of the cache prefix `P`, computed once. Read only."""
        if self._prefix is None:
            ids = self.layout.prefix_ids
            canvas = self.runner.canvas(len(ids))
            self.runner.forward([Rows(self.runner.tensor(ids), self.runner.tensor(range(len(ids))), canvas)])
            self._prefix = canvas
        return self._prefix

    def run(
        self,
        chunks: Sequence[Chunk],
        embeddings: Any,
        neighbours: Sequence[Sequence[int | str]] | None,
        progress: Callable[[int, str], Progress],
    ) -> PrecomputeReport:
        """Compute what is missing. `progress(total, phase)` opens a progress bar and returns its `update`."""
        begin = time.perf_counter()
        counts = _Counts()
        vectors = None if embeddings is None else as_embeddings(embeddings, len(chunks))
        has_vectors = vectors is not None and any(vector is not None for vector in vectors)
        keys, jobs = self._jobs(chunks, vectors, counts)

        missing = [job for job in jobs.values() if not self._is_stored(job.key)]
        update = progress(len(missing), "precompute")
        for job, entry in self._compute(missing):
            counts.bytes += self.library.put_plain(entry, job.scope, job.content, job.embedding)
            counts.plain_computed += 1
            counts.tokens += len(job.token_ids)
            update(1)
        computed = {job.key for job in missing}
        for job in jobs.values():
            if job.key not in computed:
                self.library.store.adopt(job.key)
                self.library.catalog.add(ChunkRow(job.key, job.scope, job.content, tuple(job.token_ids)), job.embedding)
        self._name(chunks, keys)

        self._find_neighbours(chunks, keys, jobs, has_vectors, neighbours)
        self._enrich([job for job in jobs.values() if job.neighbours], counts, progress)
        self._drop_plain(jobs)
        return self._report(chunks, keys, jobs, counts, has_vectors or neighbours is not None, begin)

    def refresh(
        self, scope: str | None, deadline: Deadline, progress: Callable[[int, str], Progress], *, is_dry_run: bool
    ) -> RefreshReport:
        """Enrich stale chunks again, the most changed first, until the deadline; see `refresh.find_stale`."""
        begin = time.perf_counter()
        counts = _Counts()
        stale, jobs = [], []
        for chunk in find_stale(self.library.catalog, scope, self.top_n):
            job = _Job(chunk.row.key, chunk.row.scope, chunk.row.content, list(chunk.row.token_ids))
            job.neighbours = self._that_fit(job, list(chunk.neighbours))
            is_current = self.library.has_enriched(chunk.row, self.top_n)
            if job.neighbours and not (is_current and list(chunk.row.neighbours) == job.neighbours):
                stale.append(chunk)
                jobs.append(job)
        jobs = [] if is_dry_run else jobs[: deadline.num_chunks]
        update = progress(len(jobs), "refresh")
        for start in range(0, len(jobs), REFRESH_STEP):
            if deadline.is_over(start):
                break
            self._enrich(jobs[start : start + REFRESH_STEP], counts, lambda _total, _phase: update)
        self._drop_plain([job.key for job in jobs])
        num_chunks = self.library.catalog.counts(scope)[0]
        seconds = time.perf_counter() - begin
        return RefreshReport(stale, num_chunks, counts.enriched_computed, counts.bytes, seconds)

    def _enrich(self, jobs: Sequence[_Job], counts: _Counts, progress: Callable[[int, str], Progress]) -> None:
        update = progress(len(jobs), "enrich")
        for job, entry in self._compute(jobs):
            counts.bytes += self.library.put_enriched(entry, job.key, self.top_n, job.neighbours)
            counts.enriched_computed += 1
            counts.tokens += len(job.token_ids)
            update(1)

    def _is_stored(self, key: str) -> bool:
        """Whether a chunk needs no plain cache: it has one, or it was enriched and the plain one was dropped."""
        if self.library.store.has(key):
            return True
        row = None if self.keep_plain else self.library.catalog.get(key)
        return row is not None and self.library.has_enriched(row, self.top_n)

    def _drop_plain(self, keys: Iterable[str]) -> None:
        """Without `keep_plain`, drop the plain caches of chunks that have an enriched one."""
        for key in [] if self.keep_plain else keys:
            row = self.library.catalog.get(key)
            if row is not None and self.library.has_enriched(row, self.top_n):
                self.library.drop_plain(key)

    def _name(self, chunks: Sequence[Chunk], keys: Sequence[str | None]) -> None:
        """Let each id name its chunk's content now. What an id named before goes when no id is left for it."""
        before: set[tuple[str, str]] = set()
        for chunk, key in zip(chunks, keys, strict=True):
            if chunk.id is not None and key is not None:
                before.update(self.library.catalog.keys_of(chunk.id, chunk.scope))
                self.library.catalog.set_id(chunk.scope, chunk.id, key)
        for scope, old in before - {(chunk.scope, key) for chunk, key in zip(chunks, keys, strict=True) if key}:
            if not self.library.catalog.has_ids(old):
                self.library.delete(scope, old, None)

    def _jobs(
        self, chunks: Sequence[Chunk], vectors: Sequence[NDArray[np.float32] | None] | None, counts: _Counts
    ) -> tuple[list[str | None], dict[str, _Job]]:
        """Tokenize; one job a distinct chunk. A chunk that cannot be cached gets no key and a reason."""
        keys: list[str | None] = []
        jobs: dict[str, _Job] = {}
        room = self.max_context - len(self.layout.prefix_ids)
        for index, chunk in enumerate(chunks):
            ids = self.layout.tokenize(chunk.text)
            if not ids or len(ids) >= room:
                counts.skipped[index] = (
                    "the chunk has no tokens"
                    if not ids
                    else f"the chunk has {len(ids)} tokens, but only {room - 1} fit behind the cache prefix; split it"
                )
                keys.append(None)
                continue
            key = self.library.keys.plain(ids, chunk.scope)
            vector = None if vectors is None else vectors[index]
            job = jobs.setdefault(key, _Job(key, chunk.scope, content_digest(chunk.text), ids, vector))
            if job.embedding is None:
                job.embedding = vector
            keys.append(key)
        return keys, jobs

    def _find_neighbours(
        self,
        chunks: Sequence[Chunk],
        keys: list[str | None],
        jobs: dict[str, _Job],
        has_embeddings: bool,
        neighbours: Sequence[Sequence[int | str]] | None,
    ) -> None:
        """Set `neighbours` of the jobs whose enriched cache has to be computed."""
        found: dict[str, list[str]] = {}
        if neighbours is not None:
            ids = {(chunk.scope, chunk.id): key for chunk, key in zip(chunks, keys, strict=True) if chunk.id and key}
            contents = [content_digest(chunk.text) for chunk in chunks]
            scopes = [chunk.scope for chunk in chunks]
            found = given_neighbours(neighbours, keys, contents, scopes, self.library.catalog, ids, self.top_n)
        elif has_embeddings:
            for scope in {job.scope for job in jobs.values()}:
                wanted = {job.key: job.content for job in jobs.values() if job.scope == scope}
                found.update(most_similar(self.library.catalog, scope, wanted, self.top_n))
        for key, chosen in found.items():
            fitting = self._that_fit(jobs[key], chosen)
            row = self.library.catalog.get(key)
            # Chunks ingested since may be more similar, but an unchanged document is not computed again for them: only
            # a given list, or a set that can grow, replaces an enriched cache.
            is_current = (
                row is not None
                and self.library.has_enriched(row, self.top_n)
                and (list(row.neighbours) == fitting or (neighbours is None and len(row.neighbours) >= len(fitting)))
            )
            jobs[key].neighbours = [] if is_current else fitting

    def _that_fit(self, job: _Job, neighbours: list[str]) -> list[str]:
        """The most similar neighbours that fit into the context together with the chunk."""
        room = self.max_context - len(self.layout.prefix_ids) - len(job.token_ids)
        fitting = []
        for key in neighbours:
            row = self.library.catalog.get(key)
            if row is not None and len(row.token_ids) <= room:
                fitting.append(key)
                room -= len(row.token_ids)
        return fitting

    def _compute(self, jobs: Sequence[_Job]) -> Iterator[tuple[_Job, Entry]]:
        """Rows of each job's chunk behind `P` and its neighbours' plain caches, in batches of packed sequences."""
        for batch in self._batches(jobs):
            placed = [self._canvas_behind(job) for job in batch]
            sequences = []
            for job, (canvas, start) in zip(batch, placed, strict=True):
                positions = range(start, start + len(job.token_ids))
                sequences.append(Rows(self.runner.tensor(job.token_ids), self.runner.tensor(positions), canvas))
            self.runner.forward(sequences)
            for job, (canvas, start) in zip(batch, placed, strict=True):
                keys, values = canvas.rows(start, start + len(job.token_ids))
                key = job.key
                if job.neighbours:
                    key = self.library.keys.enriched(job.key, job.neighbours, self.top_n)
                yield job, Entry(key, tuple(job.token_ids), start, keys.cpu(), values.cpu())

    def _batches(self, jobs: Sequence[_Job]) -> Iterator[list[_Job]]:
        batch: list[_Job] = []
        num_rows = num_bytes = 0
        for job in jobs:
            length = len(self.layout.prefix_ids) + len(job.token_ids)
            length += sum(len(row.token_ids) for row in map(self.library.catalog.get, job.neighbours) if row)
            size = length * self.runner.bytes_per_token()
            if batch and (num_rows + len(job.token_ids) > self.max_rows or num_bytes + size > BATCH_BYTES):
                yield batch
                batch, num_rows, num_bytes = [], 0, 0
            batch.append(job)
            num_rows += len(job.token_ids)
            num_bytes += size
        if batch:
            yield batch

    def _canvas_behind(self, job: _Job) -> tuple[Canvas, int]:
        """A canvas that holds `P` and the neighbours' plain caches at consecutive positions, and where the chunk
        begins."""
        prefix = self.prefix()
        entries = [self._plain_entry(key) for key in job.neighbours]
        start = prefix.capacity + sum(len(entry.token_ids) for entry in entries)
        canvas = self.runner.canvas(start + len(job.token_ids))
        canvas.keys[:, :, : prefix.capacity] = prefix.keys
        canvas.values[:, :, : prefix.capacity] = prefix.values
        position = prefix.capacity
        for entry in entries:
            place_entry(canvas, self.rope, entry, position)
            position += len(entry.token_ids)
        return canvas, start

    def _plain_entry(self, key: str) -> Entry:
        """A neighbour's plain cache; computed again where its file is gone or bad."""
        row = self.library.catalog.get(key)
        assert row is not None, f"neighbour {key} is not in the catalog"
        entry = self.library.store.get(key, row.token_ids)
        if entry is None:
            job = _Job(key, row.scope, row.content, list(row.token_ids))
            ((_, computed),) = self._compute([job])
            entry = encode(computed, self.library.codec)
            if self.keep_plain or row.enriched_key is None:
                self.library.put_plain(computed, job.scope, job.content)
            else:
                self.library.store.put_in_memory(entry)
        return entry

    def _report(
        self,
        chunks: Sequence[Chunk],
        keys: list[str | None],
        jobs: dict[str, _Job],
        counts: _Counts,
        can_enrich: bool,
        begin: float,
    ) -> PrecomputeReport:
        records = []
        for index, (chunk, key) in enumerate(zip(chunks, keys, strict=True)):
            if key is None:
                records.append(ChunkRecord(chunk.id, None, scope=chunk.scope, reason=counts.skipped[index]))
            else:
                records.append(self.record(chunk, key))
        num_enriched = sum(record.kind == "enriched" for record in {record.key: record for record in records}.values())
        return PrecomputeReport(
            records=records,
            num_chunks=len(chunks),
            num_duplicates=len(chunks) - len(counts.skipped) - len(jobs),
            num_skipped=len(counts.skipped),
            num_plain_computed=counts.plain_computed,
            num_plain_reused=len(jobs) - counts.plain_computed,
            num_enriched_computed=counts.enriched_computed,
            num_enriched_reused=num_enriched - counts.enriched_computed,
            num_tokens_computed=counts.tokens,
            bytes_written=counts.bytes,
            can_enrich=can_enrich,
            duration_s=time.perf_counter() - begin,
        )

    def record(self, chunk: Chunk, key: str) -> ChunkRecord:
        """What the library holds for a chunk now."""
        row = self.library.catalog.get(key)
        enriched = row.enriched_key if row is not None and self.library.has_enriched(row, self.top_n) else None
        if row is None or (enriched is None and not self.library.store.has(key)):
            return ChunkRecord(chunk.id, None, scope=chunk.scope, reason="no cache is stored")
        neighbours = row.neighbours if enriched else ()
        return ChunkRecord(
            chunk.id,
            key,
            enriched,
            len(row.token_ids),
            neighbours,
            chunk.scope,
            fingerprint=token_fingerprint(row.token_ids),
        )
