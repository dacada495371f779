"""An array bigger than the address space that is left: the export must not need more than it said."""

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import Sizes, llama_config
from commands import ROOT, environment
from exports import write_repository
from oracle_data import read_safetensors
from sample_checkpoint import write_checkpoint as write_orbax
from tensorferry.mappings.plan.array_spec import ArraySpec

SIZES = Sizes(layers=2, vocab=150_000, embed=1024, heads=2, kv_heads=2, head_dim=8, mlp=14)
BOUND_BYTES = 48 << 20
# For everything that is no tensor: threads, file buffers, Beam.
BESIDE_BYTES = 96 << 20

_RUN = """
import resource, sys
from tensorferry.pipelines.cli.main import main
source, config, output, small, limit, bound = sys.argv[1:]
words = ["--config", config, "--worker-memory-bytes", bound]
assert main(["export", "--source", source, "--output", small, *words, "--plan-only"]) == 0
from tensorferry.pipelines.engine import beam_job
from tensorferry.pipelines.engine import local_engine
import apache_beam, orbax.checkpoint, tensorstore, tensorferry.pipelines.export.export_run
size = int(next(line for line in open("/proc/self/status") if line.startswith("VmSize")).split()[1]) << 10
resource.setrlimit(resource.RLIMIT_AS, (size + int(limit), size + int(limit)))
sys.exit(main(["export", "--source", source, "--output", output, *words, "--direct_num_workers", "2"]))
"""


def write_big(where: Path) -> None:
    """A model that is nearly all embedding, in chunks of 8 MB; row numbers as values, so that places show."""
    s = SIZES
    shapes = {
        "token_embedder.embedding": (s.vocab, s.embed), "decoder.decoder_norm.scale": (s.embed,),
        "decoder.layers.pre_self_attention_layer_norm.scale": (s.embed, 2),
        "decoder.layers.post_self_attention_layer_norm.scale": (s.embed, 2),
        "decoder.layers.self_attention.query.kernel": (s.embed, 2, 2, 8),
        "decoder.layers.self_attention.key.kernel": (s.embed, 2, 2, 8),
        "decoder.layers.self_attention.value.kernel": (s.embed, 2, 2, 8),
        "decoder.layers.self_attention.out.kernel": (2, 2, 8, s.embed),
        "decoder.layers.mlp.wi_0.kernel": (s.embed, 2, 14), "decoder.layers.mlp.wi_1.kernel": (s.embed, 2, 14),
        "decoder.layers.mlp.wo.kernel": (14, 2, s.embed),
    }  # fmt: skip
    arrays = {f"params.params.{key}": np.zeros(shape, ml_dtypes.bfloat16) for key, shape in shapes.items()}
    rows = np.arange(s.vocab, dtype=np.uint32).astype(np.uint16)
    arrays["params.params.token_embedder.embedding"].view(np.uint16)[:] = rows[:, None]
    chunks = {key: (4096, 1024) if "embedding" in key else array.shape for key, array in arrays.items()}
    specs = [ArraySpec(tuple(k.split(".")), "bfloat16", a.shape, chunks[k], chunks[k]) for k, a in arrays.items()]
    write_orbax(where, "zarr3", arrays, tuple(specs))


@pytest.mark.slow
def test_an_array_bigger_than_the_memory_that_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    write_big(tmp_path / "orbax")
    repository = write_repository(tmp_path / "hf", llama_config(SIZES, tie_word_embeddings=True))
    array_bytes = SIZES.vocab * SIZES.embed * 2
    assert array_bytes > BOUND_BYTES + BESIDE_BYTES + (128 << 20)
    words = (tmp_path / "orbax", repository, tmp_path / "out", tmp_path / "none", str(BOUND_BYTES + BESIDE_BYTES),
             str(BOUND_BYTES))  # fmt: skip
    # Threads take little address space each, as they take little memory.
    program = ["sh", "-c", 'ulimit -s 512; exec "$@"', "sh", sys.executable, "-c", _RUN, *map(str, words)]
    done = subprocess.run(program, capture_output=True, text=True, env=environment(), cwd=ROOT, timeout=100)
    assert done.returncode == 0, done.stderr
    found = read_safetensors((tmp_path / "out" / "model.safetensors").read_bytes())["model.embed_tokens.weight"]
    wanted = np.arange(SIZES.vocab, dtype=np.uint32).astype(np.uint16)
    assert (found.view(np.uint16) == wanted[:, None]).all()
    manifest = json.loads((tmp_path / "out" / "tensorferry.manifest.json").read_text())
    assert len(manifest["arrays"]["model.embed_tokens.weight"]["chunk_digests"]) > 10
