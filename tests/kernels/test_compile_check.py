"""compile_check: every kernel compiles for every target without a GPU, and what it finds fails it."""

import inspect
import os
import subprocess
import sys
from typing import Any

import pytest

from fusionrag_kernels import compile_check, tuning
from fusionrag_kernels.compile_check import TARGETS, Usage, problem, usage


@pytest.mark.usefixtures("triton")
def test_quick_check_passes() -> None:
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    del environment["TRITON_INTERPRET"]
    command = [sys.executable, "-m", "fusionrag_kernels.compile_check", "--quick"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for target in TARGETS:
        for kernel in ("attention", "paged_attention", "merge", "row_sums", "key_scores", "assemble"):
            assert f"{target} {kernel}_kernel-bf16" in done.stdout or f"{target} {kernel}_kernel-i8" in done.stdout


def test_it_refuses_to_pass_without_compiling() -> None:
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "fusionrag_kernels.compile_check", "--quick"]
    assert subprocess.run(command, env=environment, capture_output=True).returncode == 2


def test_problems_are_named() -> None:
    assert problem(Usage(255, 1000, 0), TARGETS["cuda:80"]) is None
    assert problem(Usage(255, 1000, 8), TARGETS["cuda:80"]) == "spills 8"
    assert "shared memory" in str(problem(Usage(255, 170_000, 0), TARGETS["cuda:80"]))
    assert problem(Usage(255, 170_000, 0), TARGETS["cuda:90"]) is None


def test_reports_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    log = "ptxas info : 0 bytes stack frame, 16 bytes spill stores, 8 bytes spill loads\nptxas info : Used 97 registers"
    monkeypatch.setattr(compile_check, "_ptxas_log", lambda _ptx: log)
    assert usage(TARGETS["cuda:90"], 12, {"ptx": ""}) == Usage(97, 12, 24)
    amd = ".sgpr_spill_count: 1\n.vgpr_count:     88\n.vgpr_spill_count: 2"
    assert usage(TARGETS["hip:gfx942"], 12, {"amdgcn": amd}) == Usage(88, 12, 3)
    with pytest.raises(RuntimeError, match="report has no"):
        usage(TARGETS["hip:gfx942"], 12, {"amdgcn": "nothing"})


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("backend", ["cuda", "hip"])
def test_every_argument_and_table_entry_is_covered(backend: Any) -> None:
    from fusionrag_kernels.specialisations import specialisations

    tiles = {entry[3] for entry in tuning.tables(backend)}
    seen = set()
    for item in specialisations(backend, is_quick=False):
        parameters = inspect.signature(item.kernel.fn).parameters
        assert list(item.signature) == list(parameters)
        constants = {name for name, kind in item.signature.items() if kind == "constexpr"}
        assert constants == set(item.constants)
        required = {name for name, parameter in parameters.items() if parameter.annotation is not parameter.empty}
        assert required <= constants
        if item.kernel.__name__ == "attention_kernel":
            sizes = item.constants["BLOCK_M"], item.constants["BLOCK_N"]
            seen.add(tuning.Tiles(*sizes, item.num_warps, item.num_stages))
    assert seen == tiles
