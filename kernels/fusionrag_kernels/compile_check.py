"""Compile every Triton kernel ahead of time, without a GPU, and look at what it needs.

python -m fusionrag_kernels.compile_check [--quick] [--target cuda:80 ...]
Prints registers, shared memory and spills; exits non-zero on a failure, a spill, or more shared memory than there is.
--quick compiles every kernel for every target, but only in bfloat16 at head size 128: what `make test` runs.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusionrag_kernels.runtime import has_triton
from fusionrag_kernels.tuning import Backend


@dataclass(frozen=True)
class Target:
    backend: Backend
    arch: int | str
    warp_size: int
    max_shared: int


TARGETS = {
    "cuda:80": Target("cuda", 80, 32, 163 * 1024),
    "cuda:90": Target("cuda", 90, 32, 227 * 1024),
    "cuda:100": Target("cuda", 100, 32, 227 * 1024),
    "hip:gfx942": Target("hip", "gfx942", 64, 64 * 1024),
}


@dataclass(frozen=True)
class Usage:
    """Of one compiled kernel: registers a thread, bytes of shared memory a block, bytes or registers spilled."""

    registers: int
    shared: int
    spills: int


def usage(target: Target, shared: int, asm: dict[str, Any]) -> Usage:
    """What the assembler says of a compiled kernel."""
    if target.backend == "hip":
        text = str(asm["amdgcn"])
        spills = _number(r"\.vgpr_spill_count:\s*(\d+)", text) + _number(r"\.sgpr_spill_count:\s*(\d+)", text)
        return Usage(_number(r"\.vgpr_count:\s*(\d+)", text), shared, spills)
    log = _ptxas_log(str(asm["ptx"]))
    spills = _number(r"(\d+) bytes spill stores", log) + _number(r"(\d+) bytes spill loads", log)
    return Usage(_number(r"Used (\d+) registers", log), shared, spills)


def problem(found: Usage, target: Target) -> str | None:
    if found.spills:
        return f"spills {found.spills}"
    if found.shared > target.max_shared:
        return f"needs {found.shared} bytes of shared memory of {target.max_shared}"
    return None


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"the assembler's report has no {pattern!r}:\n{text[-2000:]}")
    return int(match[1])


def _ptxas_log(ptx: str) -> str:
    """Assemble once more, verbosely: triton keeps no log of it."""
    arch = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    assert arch is not None, "PTX without a .target line"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [_ptxas(arch[1]), "-v", f"--gpu-name={arch[1]}", str(source), "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _ptxas(arch: str) -> str:
    """Triton's own assembler; the one for Blackwell has a name of its own."""
    import triton.backends.nvidia

    folder = Path(triton.backends.nvidia.__file__).parent / "bin"
    blackwell = folder / "ptxas-blackwell"
    is_blackwell = int(re.sub(r"\D", "", arch)) >= 100
    return str(blackwell if is_blackwell and blackwell.exists() else folder / "ptxas")


def check(target: Target, *, is_quick: bool) -> list[str]:
    """Compile all for one target, print a line each, and return the names of those that fail."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fusionrag_kernels.specialisations import specialisations

    failed = []
    for item in specialisations(target.backend, is_quick=is_quick):
        begin = time.perf_counter()
        label = f"{target.backend}:{target.arch} {item.name}"
        aligned = {
            (index,): [["tt.divisibility", 16]]
            for index, (name, kind) in enumerate(item.signature.items())
            if kind.startswith("*") or (kind == "i32" and "_stride_" in name)
        }
        source = ASTSource(item.kernel, item.signature, constexprs=item.constants, attrs=aligned)
        try:
            compiled = triton.compile(
                source,
                target=GPUTarget(target.backend, target.arch, target.warp_size),
                options={"num_warps": item.num_warps, "num_stages": item.num_stages},
            )
            found = usage(target, compiled.metadata.shared, compiled.asm)
        except Exception as error:  # whatever a compiler can raise is this tool's finding
            failed.append(label)
            print(f"{label}: FAILED {type(error).__name__}: {error}", flush=True)
            continue
        wrong = problem(found, target)
        failed += [label] if wrong else []
        print(
            f"{label}: {found.registers} registers, {found.shared} bytes shared, {found.spills} spilled, "
            f"{time.perf_counter() - begin:.1f} s{f' - WRONG: {wrong}' if wrong else ''}",
            flush=True,
        )
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="only these; default all")
    args = parser.parse_args()
    if not has_triton():
        print("triton is not installed: nothing can be compiled (pip install triton)")
        return 2
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("TRITON_INTERPRET=1 is set: nothing would be compiled; unset it")
        return 2
    failed: list[str] = []
    for name in args.target or TARGETS:
        failed += check(TARGETS[name], is_quick=args.quick)
    print(f"{len(failed)} failed" + "".join(f"\n  {label}" for label in failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
