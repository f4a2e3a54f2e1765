"""What the store saves and costs: the paper's storage simulation, cold reads, and look-ups in a large index.

    python engine/bench/storage.py [--queries 1000] [--entries 50000] [--dir DIR] [--out results.json]

1. Simulation (FusionRAG, arXiv 2601.12904, section 4.1) on a real engine with a tiny random model: of each query's
   chunks 60 % are known, 30 % are new but shared with other queries, 10 % are its own, in random order. Beside it
   stands a standard prefix cache: a chunk once for every path that led to it, in files of the same size as ours.
2. Ten 500-token chunks of SmolLM2-135M's shape, each read from disk behind an emptied page cache, against plain
   sequential reading of as many bytes in the same run.
3. The look-ups of a request of 20 chunks with many chunks in the catalog.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import machine, write_json
from tqdm.auto import tqdm

from fusionrag_engine import Chunk, Engine, EngineConfig, Request
from fusionrag_engine.catalog import Catalog, ChunkRow
from fusionrag_engine.keys import CacheKeys
from fusionrag_engine.opening import open_library
from fusionrag_engine.store import ChunkStore, DiskTier, Entry
from fusionrag_engine.store.codecs import encode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

SHARES = (0.6, 0.3, 0.1)
"""Known, new but shared, unique."""


def main() -> None:
    args = parse_args()
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        root = Path(name)
        result: dict[str, Any] = {
            "benchmark": "storage",
            "machine": machine(),
            "settings": {key: str(value) for key, value in vars(args).items()},
        }
        if "read" in args.parts:
            result["cold_read"] = [cold_read(root / codec, codec, args.repeats) for codec in ("none", "int8", "int4")]
            print_cold_read(result["cold_read"])
        if "index" in args.parts:
            result["index"] = look_up(root / "index", args.entries)
            print_index(result["index"])
        if "simulation" in args.parts:
            result["simulation"] = simulate(root / "simulation", args.queries, args.top_k)
            print_simulation(result["simulation"])
    write_json(args.out, result)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["simulation", "read", "index"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="which of the three to run")
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--top-k", type=int, default=10, help="chunks of a query")
    parser.add_argument("--entries", type=int, default=50_000, help="chunks in the large catalog")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="on the disk to measure; default: the system's temporary directory")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


# Simulation


@dataclass
class PrefixCache:
    """A standard prefix cache: one copy of a chunk for every path of chunks that leads to it."""

    paths: set[tuple[str, ...]]
    num_bytes: int = 0
    num_hits: int = 0

    def serve(self, texts: list[str], size_of: Callable[[str], int]) -> None:
        for length in range(1, len(texts) + 1):
            path = tuple(texts[:length])
            if path in self.paths:
                self.num_hits += 1
            else:
                self.paths.add(path)
                self.num_bytes += size_of(texts[length - 1])


def draw_queries(num_queries: int, top_k: int, draw: random.Random) -> tuple[list[str], list[list[str]]]:
    """The known texts, and each query's texts. A shared text occurs about three times."""
    known = [f"Known report {number} about the harbour." for number in range(300)]
    shared = [f"Shared note {number} on pumps." for number in range(max(1, num_queries * top_k * 3 // 30))]
    queries = []
    for query in range(num_queries):
        texts: list[str] = []
        while len(texts) < top_k:
            kind = draw.choices((known, shared, None), SHARES)[0]
            text = f"Own text {query} {len(texts)}." if kind is None else draw.choice(kind)
            if text not in texts:
                texts.append(text)
        queries.append(texts)
    return known, queries


def simulate(directory: Path, num_queries: int, top_k: int) -> dict[str, Any]:
    from tests.tiny_models import build_model, build_tokenizer

    known, queries = draw_queries(num_queries, top_k, random.Random(0))
    config = EngineConfig(cache_dir=directory, system_prompt="Be brief.", max_new_tokens=1)
    with Engine(build_model("llama"), build_tokenizer(), config) as engine:
        engine.precompute(known)
        standard = PrefixCache(set())
        sizes: dict[str, int] = {}
        seen = set(known)
        num_hits = num_repeated = num_repeated_hits = standard_repeated_hits = 0
        for texts in tqdm(queries, desc="queries"):
            status = engine.prefill(Request("Who?", [Chunk(text) for text in texts], method="reuse")).stats.chunk_status
            before = standard.num_hits
            standard.serve(texts, lambda text: sizes.setdefault(text, _file_bytes(engine, text)))
            standard_repeated_hits += standard.num_hits - before
            for text, found in zip(texts, status, strict=True):
                num_hits += found != "miss"
                num_repeated += text in seen
                num_repeated_hits += text in seen and found != "miss"
            seen.update(texts)
        engine.prefill(Request("Who?", [], method="full"))  # what was met last is stored now
        assert engine.verify() == []
        ours = engine.stats()["disk_bytes"]
        num_entries = engine.stats()["tiers"]["disk"]["num_entries"]
        index = engine.stats()["prefix_index"]
    total = num_queries * top_k
    return {
        "num_queries": num_queries,
        "top_k": top_k,
        "num_entries": num_entries,
        "bytes": ours,
        "prefix_index_bytes_in_memory": index["num_bytes"],
        "standard_entries": len(standard.paths),
        "standard_bytes": standard.num_bytes,
        "storage_reduced": 1 - ours / standard.num_bytes,
        "hit_rate": num_hits / total,
        "standard_hit_rate": standard.num_hits / total,
        "repeated_computation_removed": num_repeated_hits / num_repeated,
        "standard_repeated_computation_removed": standard_repeated_hits / num_repeated,
    }


def _file_bytes(engine: Engine, text: str) -> int:
    """Bytes that one copy of a text's cache takes; it is stored in the background."""
    engine._settle()
    disk = engine.library.store.disk
    assert disk is not None
    size = disk.size(engine.library.keys.plain(engine.layout.tokenize(text), ""))
    assert size > 0, f"no cache of {text!r}"
    return size


# Cold reads


def cold_read(directory: Path, codec: str, repeats: int) -> dict[str, Any]:
    """Ten chunks of 500 tokens through the store, against plain reading of the same files."""
    catalog = Catalog(None)
    tier = DiskTier(directory)
    generator = torch.Generator().manual_seed(0)
    keys = []
    for number in range(10):
        rows = torch.randn(2, 30, 3, 500, 64, generator=generator)
        entry = Entry(f"{number:02d}" * 32, tuple(range(500)), 30, rows[0], rows[1])
        tier.write(encode(entry, codec))
        keys.append(entry.key)
    paths = [tier.path(key) for key in keys]
    num_bytes = sum(path.stat().st_size for path in paths)
    ours, plain = [], []
    for _ in range(repeats):
        _empty_page_cache(paths)
        plain.append(_timed(lambda: [_read_plainly(path) for path in paths]))
        store = ChunkStore(catalog, 2 << 30, disk=tier)
        _empty_page_cache(paths)
        ours.append(_timed(lambda store=store: _load(store, keys)))  # type: ignore[misc]
        assert len(store.host) == 10
    ratio = statistics.median(plain) / statistics.median(ours)
    return {
        "codec": codec,
        "bytes": num_bytes,
        "plain_mb_s": num_bytes / statistics.median(plain) / 1e6,
        "store_mb_s": num_bytes / statistics.median(ours) / 1e6,
        "share_of_plain_speed": ratio,
    }


def _load(store: ChunkStore, keys: list[str]) -> None:
    store.expect(keys)
    for key in keys:
        store.load(key)


def _empty_page_cache(paths: list[Path]) -> None:
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_plainly(path: Path) -> None:
    buffer = bytearray(1 << 20)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _timed(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


# Index


def look_up(directory: Path, num_entries: int) -> dict[str, Any]:
    """A request of 20 chunks of 500 tokens, all of them in host memory, among many chunks."""
    keys = CacheKeys(model="m", tokenizer="t", dtype="float32", codec="none", prefix_ids=[1])
    library = open_library(keys, EngineConfig(cache_dir=directory))
    draw = random.Random(0)
    rows = torch.zeros(1, 1, 500, 2)
    wanted = []
    for number in tqdm(range(num_entries), desc="entries"):
        ids = [draw.randrange(50_000) for _ in range(500)]
        key = keys.plain(ids, "")
        library.catalog.add(ChunkRow(key, "", str(number), tuple(ids)), None)
        library.catalog.set_enriched(key, digest_of(number), 10, [])
        library.catalog.note_stored(key, "disk", 1)
        if number % (num_entries // 20) == 0 and len(wanted) < 20:
            wanted.append(ids)
            library.store.put_in_memory(Entry(digest_of(number), tuple(ids), 0, rows, rows))
    times = []
    for _ in range(50):
        begin = time.perf_counter()
        found = [library.enriched(ids, "", 10) for ids in wanted]
        times.append(time.perf_counter() - begin)
    assert all(entry is not None for entry in found)
    hashing = _timed(lambda: [keys.plain(ids, "") for ids in wanted])
    library.close()
    return {
        "num_entries": num_entries,
        "num_chunks": len(wanted),
        "median_ms": 1e3 * statistics.median(times),
        "largest_ms": 1e3 * max(times),
        "of_which_hashing_ms": 1e3 * hashing,
    }


def digest_of(number: int) -> str:
    return f"{number:064x}"


def print_simulation(ours: dict[str, Any]) -> None:
    print(f"\n{ours['num_queries']} queries of {ours['top_k']} chunks: 60 % known, 30 % new but shared, 10 % unique")
    print(f"{'':40}{'ours':>12}{'prefix cache':>14}")
    print(f"{'entries':40}{ours['num_entries']:12}{ours['standard_entries']:14}")
    print(f"{'bytes':40}{ours['bytes']:12}{ours['standard_bytes']:14}")
    print(f"{'hit rate':40}{ours['hit_rate']:12.1%}{ours['standard_hit_rate']:14.1%}")
    removed = "repeated_computation_removed"
    print(f"{'repeated chunk computation removed':40}{ours[removed]:12.1%}{ours['standard_' + removed]:14.1%}")
    print(f"{'storage reduced':40}{ours['storage_reduced']:12.1%}")


def print_cold_read(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print(
            f"cold read, codec {row['codec']}: {row['bytes'] / 1e6:.0f} MB at {row['store_mb_s']:.0f} MB/s, plain "
            f"{row['plain_mb_s']:.0f} MB/s: {row['share_of_plain_speed']:.0%}"
        )


def print_index(index: dict[str, Any]) -> None:
    print(
        f"index of {index['num_entries']} chunks: {index['num_chunks']} look-ups in {index['median_ms']:.2f} ms "
        f"(largest {index['largest_ms']:.2f}; {index['of_which_hashing_ms']:.2f} of them hashing)"
    )


if __name__ == "__main__":
    main()
