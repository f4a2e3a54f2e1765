"""gpu_check: its code paths, on small shapes; and that it refuses to time what is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path


def run(repository: Path, *arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    script = str(repository / "kernels" / "bench" / "gpu_check.py")
    folder = str(repository / "kernels" / "bench")
    command = [sys.executable, "-c", code, *arguments] if code else [sys.executable, script, *arguments]
    environment = {**os.environ, "PYTHONPATH": ":".join([folder, *sys.path]), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_dry_run(repository: Path, tmp_path: Path) -> None:
    done = run(repository, "--dry-run", "--out", str(tmp_path / "gpu.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert all(row["is_right"] for row in result["correctness"].values())
    assert [row["method"] for row in result["ttft"]] == ["full", "r=0", "r=0.15"]
    assert result["ttft"][1]["num_reused_tokens"] > 200
    assert result["ttft"][2]["num_reused_tokens"] < result["ttft"][1]["num_reused_tokens"]
    assert {row["ratio"] for row in result["attention"]} == {0.15, 0.0}
    assert all("masked_sdpa_ms" in row for row in result["attention"])


def test_a_wrong_op_is_not_timed(repository: Path) -> None:
    code = (
        "import sys, gpu_check, gpu_correctness\n"
        "gpu_correctness.relative_rms = lambda got, expected: 0.5\n"
        "sys.argv[1:] = ['--dry-run']\n"
        "sys.exit(gpu_check.main())"
    )
    done = run(repository, code=code)
    assert done.returncode == 1
    assert "not timed: wrong are" in done.stdout
    assert "== attention" not in done.stdout
