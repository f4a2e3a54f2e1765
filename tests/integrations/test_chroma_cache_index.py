"""`ChromaCacheIndex`: records keyed by node ID, in a collection of its own or beside the nodes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chromadb
import pytest

from fusionrag_engine import ChunkRecord
from fusionrag_integrations.chroma import CacheRecord, ChromaCacheIndex
from fusionrag_integrations.chroma.record import KEYS, PREFIX
from tests.integrations.support import new_collection, tiny_engine

PLAIN = CacheRecord(key="aa", kind="plain", num_tokens=12)
ENRICHED = CacheRecord(
    key="bb", kind="enriched", num_tokens=7, scope="team", enriched_key="cc", neighbours=("aa", "dd"), fingerprint="ff"
)


def own_index(**settings: Any) -> ChromaCacheIndex:
    return ChromaCacheIndex.open(client=chromadb.EphemeralClient(), name=new_collection("unused").name + "-records")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[int]:
    """Port of a Chroma server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [str(Path(sys.executable).with_name("chroma")), "run", "--path", str(tmp_path), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield port
    finally:
        process.terminate()
        process.wait(timeout=20)


def test_records_come_back_as_they_were() -> None:
    index = own_index()
    assert index.put({"one": PLAIN, "two": ENRICHED}) == 2
    assert index.get(["two", "one", "nobody"]) == {"one": PLAIN, "two": ENRICHED}


def test_a_record_is_replaced_whole() -> None:
    index = own_index()
    index.put({"node": ENRICHED})
    index.put({"node": PLAIN})
    assert index.get(["node"]) == {"node": PLAIN}, "Chroma merges: keys of the record before must go"


def test_deleted_records_are_gone_with_their_rows() -> None:
    index = own_index()
    index.put({"one": PLAIN, "two": ENRICHED})
    index.delete(["one", "nobody"])
    assert index.get(["one", "two"]) == {"two": ENRICHED}
    assert index.collection.count() == 1


def test_nothing_to_do_is_fine() -> None:
    index = own_index()
    assert index.put({}) == 0
    assert index.get([]) == {}
    index.delete([])


def test_metadata_is_flat_and_under_our_prefix() -> None:
    for record in (PLAIN, ENRICHED):
        metadata = record.metadata()
        assert all(type(value) in (str, int) for value in metadata.values())
        assert all(name.startswith("fusionrag_") for name in metadata)
        assert set(metadata) <= set(KEYS)
    assert json.loads(str(ENRICHED.metadata()[PREFIX + "neighbours"])) == ["aa", "dd"]
    assert PREFIX + "neighbours" not in PLAIN.metadata(), "Chroma refuses None and empty lists"


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {},
        {"file": "a.md"},
        {PREFIX + "key": ""},
        {PREFIX + "key": "aa"},
        {PREFIX + "key": "aa", PREFIX + "kind": "plain", PREFIX + "num_tokens": "many"},
        {PREFIX + "key": "aa", PREFIX + "kind": "plain", PREFIX + "num_tokens": float("nan")},
    ],
)
def test_metadata_without_a_sound_record_is_no_record(metadata: dict[str, Any] | None) -> None:
    assert CacheRecord.from_metadata(metadata) is None


@pytest.mark.parametrize("neighbours", ["aa,bb", "3", "", None, 7])
def test_unreadable_neighbours_do_not_lose_the_record(neighbours: Any) -> None:
    """Without the record, deleting the node would leave its caches behind."""
    assert CacheRecord.from_metadata({**PLAIN.metadata(), PREFIX + "neighbours": neighbours}) == PLAIN


def test_chunk_records_without_a_cache_make_no_record() -> None:
    assert CacheRecord.from_chunk(ChunkRecord("node", None, reason="no tokens")) is None
    assert CacheRecord.from_chunk(ChunkRecord("node", "aa", num_tokens=12)) == PLAIN
    assert (
        CacheRecord.from_chunk(ChunkRecord("node", "bb", "cc", 7, ("aa", "dd"), "team", fingerprint="ff")) == ENRICHED
    )


def test_more_records_than_one_batch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    index = own_index()
    monkeypatch.setattr(index.collection._client, "get_max_batch_size", lambda: 3)
    records = {f"node-{number}": CacheRecord("aa", "plain", number) for number in range(10)}
    assert index.put(records) == 10
    assert index.get(list(records)) == records
    index.delete(list(records))
    assert index.collection.count() == 0


def test_repeated_ids_are_asked_once() -> None:
    index = own_index()
    index.put({"one": PLAIN})
    assert index.get(["one", "one"]) == {"one": PLAIN}
    index.delete(["one", "one"])


def test_beside_nodes_only_the_metadata_is_touched() -> None:
    collection = new_collection()
    collection.add(ids=["one"], embeddings=[[1.0, 2.0]], documents=["text"], metadatas=[{"file": "a.md"}])
    index = ChromaCacheIndex(collection)
    assert index.put({"one": ENRICHED}) == 1
    assert index.get(["one"]) == {"one": ENRICHED}
    index.delete(["one"])
    row = collection.get(ids=["one"], include=["embeddings", "documents", "metadatas"])
    assert row["metadatas"] == [{"file": "a.md"}]
    assert row["documents"] == ["text"]
    assert row["embeddings"].tolist() == [[1.0, 2.0]]


def test_a_collection_of_nodes_gets_no_rows_from_us() -> None:
    """A row needs an embedding, and the first one fixes the dimension of the whole collection."""
    collection = new_collection()
    index = ChromaCacheIndex(collection)
    assert index.put({"not-yet": PLAIN}) == 0
    assert collection.count() == 0
    collection.add(ids=["one"], embeddings=[[1.0, 2.0]], documents=["text"])


def test_an_opened_collection_of_nodes_gets_no_rows_either() -> None:
    client = chromadb.EphemeralClient()
    collection = new_collection()
    assert ChromaCacheIndex.open(client=client, name=collection.name).put({"not-yet": PLAIN}) == 0


def test_records_survive_in_a_directory(tmp_path: Path) -> None:
    ChromaCacheIndex.open(tmp_path).put({"one": ENRICHED})
    chromadb.api.shared_system_client.SharedSystemClient.clear_system_cache()
    assert ChromaCacheIndex.open(tmp_path).get(["one"]) == {"one": ENRICHED}


def test_telemetry_is_off(tmp_path: Path) -> None:
    index = ChromaCacheIndex.open(tmp_path)
    assert index.collection._client.get_settings().anonymized_telemetry is False  # type: ignore[attr-defined]


def test_from_engine_stands_beside_the_caches(tmp_path: Path) -> None:
    engine = tiny_engine(cache_dir=tmp_path)
    try:
        ChromaCacheIndex.from_engine(engine).put({"one": PLAIN})
        assert (tmp_path / "chroma" / "chroma.sqlite3").is_file()
        client = chromadb.EphemeralClient()
        elsewhere = ChromaCacheIndex.from_engine(engine, client=client, name=new_collection("unused").name + "-records")
        assert elsewhere.get(["one"]) == {}
    finally:
        engine.close()


def test_a_server_serves_as_well(server: int) -> None:
    settings = chromadb.Settings(anonymized_telemetry=False)
    for attempt in range(100):
        try:
            client = chromadb.HttpClient(host="127.0.0.1", port=server, settings=settings)
            break
        except ValueError:  # not listening yet
            assert attempt < 99, "the server did not start"
            time.sleep(0.2)
    index = ChromaCacheIndex.open(client=client)
    index.put({"one": PLAIN, "two": ENRICHED})
    index.delete(["one"])
    assert ChromaCacheIndex.open(client=client).get(["one", "two"]) == {"two": ENRICHED}
