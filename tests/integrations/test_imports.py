"""Each adapter imports where the other frameworks are absent, and importing drags nothing along."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BLOCK = """
import sys
import importlib.abc
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
sys.path[:0] = {roots!r}
"""
LANGCHAIN = ["langchain", "langchain_core", "langchain_classic", "langchain_community"]
LLAMA_INDEX = ["llama_index"]
CHROMA = ["chromadb"]


def run(repository: Path, absent: list[str], program: str) -> None:
    roots = [str(repository), str(repository / "engine"), str(repository / "kernels")]
    script = BLOCK.format(absent=absent, roots=roots) + program
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr


def test_llama_index_adapter_without_langchain_and_chroma(repository: Path) -> None:
    run(
        repository,
        [*LANGCHAIN, *CHROMA],
        """
from fusionrag_integrations.llama_index import (
    FusionRAGCondensePlusContextChatEngine, FusionRAGContextChatEngine, FusionRAGLLM, FusionRAGSynthesizer,
    FusionRAGTransform,
)
from llama_index.core.schema import TextNode
from fusionrag_engine import Engine, EngineConfig
from tests.tiny_models import build_model, build_tokenizer
engine = Engine(build_model("llama"), build_tokenizer(), EngineConfig())
(node,) = FusionRAGTransform.from_engine(engine)([TextNode(text="some text")])
assert node.metadata["fusionrag_kind"] == "plain", node.metadata
engine.close()
try:
    from fusionrag_integrations.llama_index import FusionRAGChromaVectorStore
except ModuleNotFoundError as error:
    assert error.name == "chromadb" or "chroma" in str(error)
else:
    raise AssertionError("the vector store needs Chroma")
""",
    )


def test_a_llama_index_query_without_langchain_and_chroma(repository: Path) -> None:
    """The whole way from documents to an explained answer."""
    run(
        repository,
        [*LANGCHAIN, *CHROMA],
        """
from fusionrag_integrations.explain import explain
from fusionrag_integrations.llama_index import FusionRAGLLM, FusionRAGSynthesizer, FusionRAGTransform
from llama_index.core import VectorStoreIndex
from llama_index.core.schema import TextNode
from fusionrag_engine import Engine, EngineConfig
from tests.tiny_models import build_model, build_tokenizer
from llama_index.core.embeddings import MockEmbedding
engine = Engine(build_model("llama"), build_tokenizer(), EngineConfig(max_new_tokens=4))
nodes = [TextNode(text=text, embedding=[1.0, float(number)]) for number, text in enumerate(["one", "two"])]
index = VectorStoreIndex(FusionRAGTransform.from_engine(engine)(nodes), embed_model=MockEmbedding(embed_dim=2))
llm = FusionRAGLLM.from_engine(engine)
response = index.as_query_engine(llm=llm, response_synthesizer=FusionRAGSynthesizer(llm)).query("which?")
assert sorted(row.status for row in explain(response).rows) == ["enriched", "prefix"], str(explain(response))
engine.close()
""",
    )


def test_explain_and_the_command_without_frameworks(repository: Path) -> None:
    run(
        repository,
        [*LANGCHAIN, *LLAMA_INDEX, *CHROMA],
        """
from fusionrag_integrations.explain import explain
from fusionrag_integrations.misses import why_missed
from fusionrag_integrations.cli.main import app
from fusionrag_engine import Stats
assert "no chunks" in str(explain(Stats()))
""",
    )


def test_langchain_adapter_without_llama_index_and_chroma(repository: Path) -> None:
    run(
        repository,
        [*LLAMA_INDEX, *CHROMA, "langchain", "langchain_classic", "langchain_community", "langchain_chroma"],
        """
from fusionrag_integrations.langchain import (
    CacheReport, ChatFusionRAG, FusionRAGDocumentTransformer, FusionRAGLLM, create_fusion_documents_chain, explain,
)
from langchain_core.documents import Document
from langchain_core.prompts import PromptTemplate
from fusionrag_engine import Engine, EngineConfig
from tests.tiny_models import build_model, build_tokenizer
engine = Engine(build_model("llama"), build_tokenizer(), EngineConfig(max_new_tokens=2))
documents = FusionRAGDocumentTransformer.from_engine(engine).transform_documents([Document("some text")])
message = ChatFusionRAG.from_engine(engine).invoke("What?", documents=list(documents))
assert [row.status for row in explain(message).rows] == ["prefix"]
prompt = PromptTemplate.from_template("{context}")
chain = create_fusion_documents_chain(FusionRAGLLM.from_engine(engine), prompt)
report = CacheReport()
chain.invoke({"context": documents}, {"callbacks": [report]})
assert [row.status for row in explain(report).rows] == ["plain"]
engine.close()
try:
    from fusionrag_integrations.langchain import FusionRAGChroma
except ModuleNotFoundError as error:
    assert error.name == "langchain_chroma"
else:
    raise AssertionError("the vector store needs langchain-chroma")
""",
    )


def test_chroma_adapter_without_frameworks_and_torch(repository: Path) -> None:
    """Records are read and written without the engine: no torch, no transformers."""
    run(
        repository,
        [*LANGCHAIN, *LLAMA_INDEX, "torch", "transformers"],
        """
from fusionrag_integrations.chroma import CacheRecord, ChromaCacheIndex
import chromadb
index = ChromaCacheIndex.open(client=chromadb.EphemeralClient())
index.put({"one": CacheRecord("aa", "plain", 3)})
assert index.get(["one"]) == {"one": CacheRecord("aa", "plain", 3)}
""",
    )


@pytest.mark.parametrize("name", ["fusionrag_integrations", "fusionrag_integrations.chroma"])
def test_importing_is_light(repository: Path, name: str) -> None:
    run(
        repository,
        [*LANGCHAIN, *LLAMA_INDEX, *CHROMA, "torch", "transformers"],
        f"import {name}\nimport fusionrag_integrations\nassert fusionrag_integrations.__version__\n",
    )


def test_the_package_is_typed_and_versioned(repository: Path) -> None:
    assert (repository / "fusionrag_integrations" / "py.typed").is_file()


def test_the_blocker_blocks(repository: Path) -> None:
    """The control of the tests above."""
    with pytest.raises(AssertionError, match="No module named 'chromadb'"):
        run(repository, CHROMA, "import chromadb")
