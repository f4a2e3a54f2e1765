"""Imports go one way, and importing has no effect."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = {
    "fusionrag_kernels": "kernels/fusionrag_kernels",
    "fusionrag_engine": "engine/fusionrag_engine",
    "fusionrag_integrations": "fusionrag_integrations",
}
MAY_IMPORT = {
    "fusionrag_kernels": {"fusionrag_kernels"},
    "fusionrag_engine": {"fusionrag_engine", "fusionrag_kernels"},
    "fusionrag_integrations": {"fusionrag_integrations", "fusionrag_engine"},
}
FRAMEWORKS = {"llama_index", "langchain", "langchain_core", "langchain_classic", "langchain_community", "chromadb"}
KERNELS_NEED = {"torch", "triton"}


def _files(repository: Path, package: str) -> list[Path]:
    return sorted((repository / PACKAGES[package]).rglob("*.py"))


def _imported(source: str, is_top_level_only: bool = False) -> Iterator[str]:
    """Full names imported anywhere in a module: inside functions too, and under `TYPE_CHECKING`."""
    tree = ast.parse(source)
    for node in tree.body if is_top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield str(node.args[0].value)


def _violations(package: str, source: str) -> list[str]:
    allowed = MAY_IMPORT[package]
    forbidden = (set(PACKAGES) - allowed) | (FRAMEWORKS if package != "fusionrag_integrations" else set())
    return [name for name in _imported(source) if name.split(".")[0] in forbidden]


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(repository: Path, package: str) -> None:
    files = _files(repository, package)
    assert files or package == "fusionrag_integrations"
    found = {str(path): names for path in files if (names := _violations(package, path.read_text()))}
    assert not found


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("fusionrag_kernels", "import fusionrag_engine"),
        ("fusionrag_kernels", "def f():\n    from fusionrag_integrations.cli import main"),
        ("fusionrag_engine", "from fusionrag_integrations import x"),
        ("fusionrag_engine", "if TYPE_CHECKING:\n    from llama_index.core import Document"),
        ("fusionrag_engine", "import chromadb.api"),
        ("fusionrag_engine", "importlib.import_module('langchain_core.documents')"),
        ("fusionrag_integrations", "from fusionrag_kernels import q_sparse_attention"),
    ],
)
def test_an_upward_import_would_be_noticed(package: str, line: str) -> None:
    assert _violations(package, line)


def test_the_kernels_need_only_torch(repository: Path) -> None:
    names = {
        name.split(".")[0] for path in _files(repository, "fusionrag_kernels") for name in _imported(path.read_text())
    }
    assert names <= {"fusionrag_kernels"} | KERNELS_NEED | set(sys.stdlib_module_names)


def test_source_roots_are_no_packages(repository: Path) -> None:
    """An importable top-level `kernels` breaks transformers."""
    for folder in ("engine", "kernels", "tests"):
        assert not list((repository / folder).glob("__init__.py"))
    assert not list((repository / "tests").rglob("__init__.py"))


def test_importing_the_engine_has_no_effect(repository: Path) -> None:
    """Nothing is registered, patched or loaded; torch keeps its settings. The first engine registers."""
    script = f"""
import sys
sys.path[:0] = [{str(repository)!r}, {str(repository / "engine")!r}, {str(repository / "kernels")!r}]
import logging, random, torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
def state():
    return (
        sorted(AttentionInterface().valid_keys()), sorted(AttentionMaskInterface().valid_keys()),
        torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_rng_state().tolist(),
        random.getstate(), logging.getLogger().handlers, logging.getLogger().level, torch.cuda.is_initialized(),
    )
before = state()
import fusionrag_engine, fusionrag_engine.engine, fusionrag_engine.runner, fusionrag_kernels
assert state() == before, "importing changed something"
assert not [name for name in AttentionInterface().valid_keys() if "fusionrag" in name]
frameworks = {sorted(FRAMEWORKS)!r}
assert not [name for name in frameworks if name in sys.modules], "a framework was imported"
from tests.engine.support import tiny_engine
tiny_engine().close()
tiny_engine().close()
assert [name for name in AttentionInterface().valid_keys() if "fusionrag" in name] == ["fusionrag_packed"]
assert [name for name in AttentionMaskInterface().valid_keys() if "fusionrag" in name] == ["fusionrag_packed"]
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_importing_the_engine_does_not_import_transformers(repository: Path) -> None:
    """`import fusionrag_engine` must stay quick: a command's `--help` waits for it."""
    paths = [str(repository / "engine"), str(repository / "kernels")]
    script = f"import sys; sys.path[:0] = {paths!r}; import fusionrag_engine; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr[-2000:]
