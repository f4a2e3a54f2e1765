"""Which implementation runs: "auto" falls back, a name that is not available raises with the choices."""

import subprocess
import sys

import pytest
import torch

from fusionrag_kernels import ImplementationError, runtime
from fusionrag_kernels.dispatch import resolve

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "has_triton", lambda: True)


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "has_triton", lambda: False)


@pytest.mark.usefixtures("with_triton")
def test_auto_is_plain_torch_everywhere() -> None:
    assert resolve("auto", CUDA, 256) == resolve("auto", CPU) == "cpu"


@pytest.mark.usefixtures("without_triton")
def test_auto_falls_back_where_triton_is_missing() -> None:
    assert resolve("auto", CUDA) == "cpu"
    with pytest.raises(ImplementationError, match=r"not installed.*'auto', 'triton', 'cpu', 'reference'"):
        resolve("triton", CUDA)


@pytest.mark.usefixtures("with_triton")
def test_triton_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("triton", CUDA) == resolve("triton", CPU) == "triton"
    with pytest.raises(ImplementationError, match="at most 256, not 300"):
        resolve("triton", CUDA, 300)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ImplementationError, match="CUDA tensors, not on cpu"):
        resolve("triton", CPU)


def test_importing_the_package_does_not_import_triton() -> None:
    code = "import sys, fusionrag_kernels; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0
