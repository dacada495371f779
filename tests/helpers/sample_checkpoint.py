"""A small checkpoint in MaxText's layout, written through the real sink; every array has awkward sizes."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from tensorferry.mappings.plan.array_spec import ArraySpec
from tensorferry.pipelines.orbax.orbax_metadata import scalar_keys, write_item_metadata, write_step_metadata
from tensorferry.pipelines.output.run_dir import RunDir
from tensorferry.pipelines.sinks.listing import MANIFEST_NAME
from tensorferry.pipelines.sinks.sink import open_sink
from tensorferry.transforms.dtypes import numpy_dtype

DECODER = ("params", "params", "decoder")
# The first axis of the big ones is divisible by 8, so that eight devices can share them.
SPECS = (
    ArraySpec((*DECODER, "layers", "mlp", "wi_0", "kernel"), "bfloat16", (16, 3, 24), (16, 1, 24), (4, 1, 12)),
    ArraySpec((*DECODER, "layers", "mlp", "wo", "kernel"), "bfloat16", (24, 3, 10), (9, 1, 10), (3, 1, 5)),
    ArraySpec((*DECODER, "layers", "moe", "wi_0"), "float8_e4m3fn", (4, 3, 6, 7), (1, 1, 6, 7), (1, 1, 3, 7)),
    ArraySpec((*DECODER, "layers", "moe", "wi_0_scale"), "float32", (4, 3, 1, 1), (4, 3, 1, 1), (4, 3, 1, 1)),
    ArraySpec((*DECODER, "layers", "pre_norm", "scale"), "float32", (5, 3), (5, 3), (5, 3)),
    ArraySpec((*DECODER, "logits_dense", "kernel_scale"), "float32", (), (), ()),
    ArraySpec(("params", "params", "token_embedder", "embedding"), "bfloat16", (40, 16), (16, 16), (8, 8)),
    ArraySpec(("params", "params", "zeros", "bias"), "bfloat16", (8,), (8,), (8,)),
)
LEAVES = {("step",): 0, ("opt_state",): {}}


def values_of(spec: ArraySpec, number: int) -> np.ndarray:
    """Random bits, NaN patterns included; one array is all zeros, which a careless sink would not store."""
    dtype = numpy_dtype(spec.dtype)
    noise = np.random.default_rng(number).integers(0, 256, max(spec.nbytes, 1), np.uint8)
    values = noise.view(dtype).reshape(spec.shape)
    return np.zeros_like(values) if "zeros" in spec.path else values


def sample_values(specs=SPECS) -> dict[str, np.ndarray]:
    return {spec.key: values_of(spec, number) for number, spec in enumerate(specs)}


def write_checkpoint(
    output: Path,
    store_format: str,
    values: Mapping[str, np.ndarray] | None = None,
    specs=SPECS,
    compression: str = "none",
    scan_layers: bool = True,
) -> None:
    """A whole conversion, without its pipeline: one part for each array."""
    values = sample_values() if values is None else values
    run = RunDir(output, "sample")
    run.open()
    sink = open_sink(str(run.item_dir), store_format, compression)
    sink.prepare(specs)
    for spec in specs:
        with sink.open_part(f"part-{spec.key}") as part:
            for index in spec.indices():
                region = values[spec.key][tuple(slice(*bounds) for bounds in spec.box(index))]
                part.write(spec, index, np.array(region, order="C"))
    sink.finalize(specs, [f"part-{spec.key}" for spec in specs], scalar_keys(LEAVES))
    write_item_metadata(run.item_dir, specs, LEAVES, store_format)
    write_step_metadata(run.building, "items", {"scan_layers": scan_layers})
    (run.item_dir / MANIFEST_NAME).write_text("{}")
    run.commit()


def save_expected(folder: Path, values: Mapping[str, np.ndarray]) -> None:
    """The expected values as raw bytes, for a reader that has none of our code."""
    folder.mkdir()
    index = {key: {"dtype": str(array.dtype), "shape": array.shape} for key, array in values.items()}
    (folder / "index.json").write_text(json.dumps(index))
    for key, array in values.items():
        (folder / key).write_bytes(array.tobytes())
