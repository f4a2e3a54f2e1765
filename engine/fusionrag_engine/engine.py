"""`Engine`: the embedded inference engine, as its users see it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from .answering import Answering, decode_together
from .assemble import Assembler
from .config import EngineConfig
from .decode import end_tokens
from .errors import ConfigError, ContextOverflowError, EngineClosedError
from .keys import CacheKeys, model_fingerprint, token_fingerprint, tokenizer_fingerprint
from .layout import Prompt, PromptLayout
from .loading import check_ready_model, load_pretrained
from .maintenance import COUNTERS, Maintenance
from .online import Prefilled, Prefiller, score_answer
from .opening import open_library
from .precompute import Precomputer
from .progress import ProgressBars
from .rope import read_rope
from .runner import ModelRunner
from .selectors import resolve_selector
from .selfcheck import refuse_by_config, self_check
from .types import Chunk, ChunkRecord, Generation, PrecomputeReport, Prefill, Request, TokenDelta, as_chunks

logger = logging.getLogger("fusionrag")

DECODE_TOGETHER = 8
"""Requests of one `generate_many` whose canvases are held, and decoded, at the same time."""


class Engine(Maintenance):
    """A causal LM that answers over cached chunks. Safe to call from several threads.

    Args:
        model, tokenizer: ready transformers objects; the model is used on its device and in its dtype.
        config: settings.

    Raises:
        UnsupportedModelError: the model cannot be served from chunk caches correctly; checked here, on the model
        itself.
    """

    def __init__(self, model: Any, tokenizer: Any, config: EngineConfig | None = None) -> None:
        self.config = config = config or EngineConfig()
        resolve_selector(config.selector)
        refuse_by_config(model)
        check_ready_model(model, config)
        self.model = model
        self.tokenizer = tokenizer
        rope = read_rope(model)
        self.runner = ModelRunner(model)
        self_check(self.runner, rope)

        self.model_name: str = getattr(model.config, "_name_or_path", "") or type(model).__name__
        self.max_context: int = self.runner.config.max_position_embeddings
        self.layout = PromptLayout(tokenizer, config)
        self._end_tokens = end_tokens(model, tokenizer)
        keys = CacheKeys(
            model=model_fingerprint(model),
            tokenizer=tokenizer_fingerprint(tokenizer),
            dtype=str(self.runner.dtype),
            codec=config.codec,
            prefix_ids=self.layout.prefix_ids,
        )
        self.library = open_library(keys, config, self.runner.device)
        self.library.catalog.set_facts(self._facts())
        self._precomputer = Precomputer(
            self.runner,
            rope,
            self.layout,
            self.library,
            top_n=config.top_n,
            max_context=self.max_context,
            max_rows=config.prefill_tokens,
            keep_plain=config.keep_plain,
        )
        assembler = Assembler(
            rope,
            self.layout,
            self.library,
            top_n=config.top_n,
            on_miss=config.on_miss,
            keep_plain=config.keep_plain,
        )
        self._prefiller = Prefiller(self.runner, assembler, self._precomputer, prefill_tokens=config.prefill_tokens)

        self._is_closed = False
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._scope_counts: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(COUNTERS, 0))
        self._counts_lock = threading.Lock()
        self._async_worker = ThreadPoolExecutor(1, thread_name_prefix="fusionrag-async")
        self._background = ThreadPoolExecutor(1, thread_name_prefix="fusionrag-background")
        self._pending: list[Future[Any]] = []

    @classmethod
    def from_pretrained(
        cls, model_id_or_dir: str | Path, *, gguf_file: str | None = None, config: EngineConfig | None = None
    ) -> Engine:
        """An engine on a model loaded from a directory, a Hub name, or a GGUF file in one of these."""
        config = config or EngineConfig()
        model, tokenizer = load_pretrained(model_id_or_dir, gguf_file, config)
        return cls(model, tokenizer, config)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish background work and release the store. Idempotent; afterwards every call raises
        `EngineClosedError`."""
        if self._is_closed:
            return
        self._is_closed = True
        self._async_worker.shutdown(wait=True)
        self._background.shutdown(wait=True)
        self.library.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineClosedError("this engine was closed; make a new one")

    # Ingestion

    def precompute(
        self,
        chunks: Sequence[Chunk | str],
        *,
        embeddings: Any = None,
        neighbours: Sequence[Sequence[int | str]] | None = None,
        show_progress: bool = False,
    ) -> PrecomputeReport:
        """Compute and store what is missing: plain caches, then enriched ones (FusionRAG, arXiv 2601.12904, section
        3.1).

        Args:
            chunks: texts to cache. An id that named another text before names this one now.
            embeddings: `[num_chunks, dim]`; neighbours are the most similar chunks of the whole store of the scope.
                Rows of a list may be None: these chunks get plain caches, and are no one's neighbours.
            neighbours: instead, a list a chunk: indices into `chunks`, or ids of chunks in the store.
            show_progress: show progress bars.

        Chunks that cannot be cached (no tokens, longer than the context) are skipped; the report says which and why.

        Raises:
            ConfigError: `embeddings` or `neighbours` do not fit `chunks`, or both are given.
        """
        self._check_open()
        chunks = as_chunks(chunks)
        if not chunks:
            embeddings = neighbours = None
        if embeddings is not None and neighbours is not None:
            raise ConfigError("embeddings and neighbours were both given; give one of them")
        if embeddings is None and neighbours is None and self.config.embed is not None and chunks:
            embeddings = self.config.embed([chunk.text for chunk in chunks])
        with ProgressBars(show_progress) as bars:
            return self._precomputer.run(chunks, embeddings, neighbours, bars.open)

    def has(self, chunk: Chunk | str) -> ChunkRecord:
        """What is stored for a chunk now; `ChunkRecord.kind` is "none" where nothing is."""
        self._check_open()
        chunk = Chunk(chunk) if isinstance(chunk, str) else chunk
        return self._precomputer.record(chunk, self._key(chunk))

    def delete(self, chunks: Iterable[Chunk | str], *, scope: str | None = None) -> int:
        """Forget chunks, given as ids or as `Chunk`s; returns the number of caches dropped.

        A chunk's caches stay while another id names the same text. With them goes every enriched cache made with the
        chunk; the chunks these belonged to fall back to their plain caches. Unknown ids are ignored. An id means the
        chunks it names in every scope, or only in `scope`.
        """
        self._check_open()
        self._settle()  # what a request met online must not be stored behind its deletion
        num_dropped = 0
        for chunk in [chunks] if isinstance(chunks, (str, Chunk)) else chunks:
            if isinstance(chunk, str):
                for found, key in self.library.catalog.keys_of(chunk, scope):
                    num_dropped += self.library.delete(found, key, chunk)
            else:
                key = self._key(chunk)
                named = [] if chunk.id is None else self.library.catalog.keys_of(chunk.id, chunk.scope)
                for name in {key, *(name for _, name in named)}:
                    num_dropped += self.library.delete(chunk.scope, name, chunk.id)
        return num_dropped

    def prefetch(self, chunks: Iterable[Chunk | str]) -> None:
        """Start to bring the caches of these chunks into host memory, in the background."""
        self._check_open()
        wanted = as_chunks(chunks)

        def load() -> None:
            for chunk in wanted:
                token_ids = self.layout.tokenize(chunk.text)
                if self.library.enriched(token_ids, chunk.scope, self.config.top_n) is None:
                    self.library.plain(token_ids, chunk.scope)

        self._in_background(load)

    # Prompts, for adapters

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Apply the model's chat template once; see `PromptLayout.render_chat`."""
        return self.layout.render_chat(messages, add_generation_prompt)

    def default_messages(self, context: str, question: str) -> list[dict[str, str]]:
        """The chat messages whose rendering is the engine's own layout."""
        return self.layout.default_messages(context, question)

    def count_tokens(self, text: str) -> int:
        return len(self.layout.tokenize(text))

    @property
    def namespace(self) -> str:
        """What all caches of this engine share: digest of model, tokenizer, dtype, codec and cache prefix."""
        return self.library.keys.namespace

    def fingerprint(self, text: str) -> str:
        """Digest of a text's tokens alone; equal to `ChunkRecord.fingerprint` where these tokens were cached."""
        return token_fingerprint(self.layout.tokenize(text))

    def content_key(self, chunk: Chunk) -> str:
        """Key that a chunk's plain cache has in this engine, stored or not; see `ChunkRecord.key`."""
        return self._key(chunk)

    # Questions

    def prefill(self, request: Request) -> Prefill:
        """Everything up to the logits of the first output token.

        Raises:
            ContextOverflowError: the prompt is longer than the model's context.
            CacheMissError: a chunk has no cache and `on_miss="error"`.
        """
        prompt = self._admit(request)
        done = self._prefill(request, prompt, num_new=1, arrival=time.perf_counter())
        self._store_misses(request, done)
        return Prefill(done.logits.clone(), prompt.token_ids, done.stats)

    def score(self, request: Request, answer: str) -> Tensor:
        """Log-probability of a given answer behind the request's prompt, teacher-forced.

        Returns:
            float32 `[num_answer_tokens]` on the CPU, in nats, one for each token of `answer` as it is tokenized by
            itself; their sum is the answer's. The end of the sequence is not scored.

        Raises:
            ConfigError: `answer` has no tokens.
            ContextOverflowError: prompt and answer together are longer than the model's context.
            CacheMissError: as for `prefill`.
        """
        prompt, token_ids = self._admit(request), self.layout.tokenize(answer)
        if not token_ids:
            raise ConfigError(f"answer={answer!r} has no tokens; give the text whose probability is wanted")
        length = len(prompt.token_ids) + len(token_ids)
        if length > self.max_context:
            raise ContextOverflowError(
                f"prompt and answer have {length} tokens, the model's context is {self.max_context}; give fewer or "
                f"shorter chunks"
            )
        done = self._prefill(request, prompt, num_new=len(token_ids), arrival=time.perf_counter())
        self._store_misses(request, done)
        return score_answer(self.runner, done, token_ids)

    def generate(self, request: Request) -> Generation:
        """The whole answer; see `prefill` for errors."""
        return _collect(list(self.stream(request)))

    def generate_many(self, requests: Sequence[Request]) -> list[Generation]:
        """The answers of several requests, in order; decoded together, up to `DECODE_TOGETHER` in one forward."""
        answers: list[Generation] = []
        arrival = time.perf_counter()
        for start in range(0, len(requests), DECODE_TOGETHER):
            answers += self._generate_together(requests[start : start + DECODE_TOGETHER], arrival)
        return answers

    def _generate_together(self, requests: Sequence[Request], arrival: float) -> list[Generation]:
        answers = []
        for request in requests:
            answers.append(self._begin_answer(request, arrival))
            self._store_misses(request, answers[-1].done)  # known to the requests behind it, as one after another
        deltas: list[list[TokenDelta]] = [[] for _ in answers]
        for index, delta in decode_together(self.runner, answers):
            deltas[index].append(delta)
        return [_collect(each) for each in deltas]

    def stream(self, request: Request) -> Iterator[TokenDelta]:
        """The answer token by token; the last delta carries the stats. Closing the iterator stops the generation."""
        self._check_open()
        return self._stream(request)

    async def agenerate(self, request: Request) -> Generation:
        """`generate`, without blocking the event loop."""
        return _collect([delta async for delta in self.astream(request)])

    async def astream(self, request: Request) -> AsyncIterator[TokenDelta]:
        """`stream`, without blocking the event loop. Cancelling the task stops the generation."""
        deltas, loop = self.stream(request), asyncio.get_running_loop()
        try:
            while (delta := await loop.run_in_executor(self._async_worker, next, deltas, None)) is not None:
                yield delta
        finally:
            if self._is_closed:  # and no step is running any more
                deltas.close()  # type: ignore[attr-defined]
            else:  # on the same worker, so behind a step that may still be running
                self._async_worker.submit(deltas.close)  # type: ignore[attr-defined]

    def _stream(self, request: Request) -> Iterator[TokenDelta]:
        answer = self._begin_answer(request, time.perf_counter())
        try:
            for _, delta in decode_together(self.runner, [answer]):
                yield delta
        finally:
            self._store_misses(request, answer.done)

    def _begin_answer(self, request: Request, arrival: float) -> Answering:
        prompt = self._admit(request)
        limit = min(request.max_new_tokens or self.config.max_new_tokens, self.max_context - len(prompt.token_ids) + 1)
        done = self._prefill(request, prompt, num_new=limit, arrival=arrival)
        return Answering(request, done, self.tokenizer, self._end_tokens, limit=limit, arrival=arrival)

    def _admit(self, request: Request) -> Prompt:
        """Tokenize a request and check that it fits."""
        self._check_open()
        prompt = self.layout.prompt(request)
        if not prompt.token_ids:
            raise ConfigError("the prompt has no tokens; give a question, a chunk or text around them")
        if len(prompt.token_ids) > self.max_context:
            raise ContextOverflowError(
                f"the prompt has {len(prompt.token_ids)} tokens ({sum(map(len, prompt.chunks))} of them in "
                f"{len(prompt.chunks)} chunks), the model's context {self.max_context}; retrieve fewer or shorter "
                f"chunks"
            )
        return prompt

    def _prefill(self, request: Request, prompt: Prompt, *, num_new: int, arrival: float) -> Prefilled:
        selector = resolve_selector(self.config.selector if request.selector is None else request.selector)
        ratio = request.recompute_ratio
        if ratio is None:
            ratio = self.config.recompute_ratio if request.method == "fusionrag" else 0.0
        self._settle()
        capacity = len(prompt.token_ids) + num_new - 1
        done = self._prefiller.prefill(
            request, prompt, ratio=ratio, selector=selector, capacity=capacity, arrival=arrival
        )
        with self._counts_lock:
            self._counts["num_requests"] += 1
            for scope in {chunk.scope for chunk in as_chunks(request.chunks)}:
                self._scope_counts[scope]["num_requests"] += 1
            if request.method != "full":
                for chunk, status in zip(as_chunks(request.chunks), done.stats.chunk_status, strict=True):
                    self._counts[f"num_{status}"] += 1
                    self._scope_counts[chunk.scope][f"num_{status}"] += 1
        return done

    def _store_misses(self, request: Request, done: Prefilled) -> None:
        """Give chunks met for the first time their plain caches, in the background, computed as if alone behind `P`."""
        if request.method == "full":
            return
        pairs = zip(as_chunks(request.chunks), done.stats.chunk_status, strict=True)
        missing = [chunk for chunk, status in pairs if status == "miss" and chunk.can_store]
        if missing and not self._is_closed:
            self._in_background(lambda: self._precomputer.run(missing, None, None, ProgressBars(False).open))

    def _settle(self) -> None:
        """Wait until the chunks met by earlier requests are in the store."""
        for future in list(self._pending):
            future.exception()

    def _in_background(self, job: Any) -> None:
        def run() -> None:
            try:
                job()
            except Exception:
                logger.exception("background work on chunk caches failed; answers are not affected")

        self._pending = [future for future in self._pending if not future.done()]
        self._pending.append(self._background.submit(run))

    def _key(self, chunk: Chunk) -> str:
        return self.library.keys.plain(self.layout.tokenize(chunk.text), chunk.scope)


def _collect(deltas: Sequence[TokenDelta]) -> Generation:
    last = deltas[-1]
    assert last.stats is not None
    assert last.finish_reason is not None
    token_ids = [delta.token_id for delta in deltas if delta.token_id is not None]
    return Generation("".join(delta.text for delta in deltas), token_ids, last.finish_reason, last.stats)
