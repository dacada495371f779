"""Orbax's own files: written by Orbax's own code, and equal to what a real save writes."""

import json
import os
import subprocess
import sys

import pytest
from tensorferry.mappings.plan.array_spec import ArraySpec
from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.orbax.orbax_metadata import scalar_keys, tree_of

WO = ArraySpec(("params", "params", "layers", "wo"), "bfloat16", (6, 3), (6, 3), (6, 3))
NORM = ArraySpec(("params", "params", "norm", "scale"), "float32", (5,), (5,), (5,))
LEAVES = {("step",): 7, ("opt_state",): {}}

# In a process of its own: jax stays out of this one.
SAVE_BOTH_WAYS = """
import json, sys
from pathlib import Path
import numpy as np
import orbax.checkpoint as ocp
from tensorferry.mappings.plan.array_spec import ArraySpec
from tensorferry.pipelines.orbax.orbax_metadata import tree_of, write_item_metadata, write_step_metadata
from test_orbax_metadata import LEAVES, NORM, WO
from tensorferry.transforms.dtypes import numpy_dtype
folder, store_format = Path(sys.argv[1]), sys.argv[2]
ours = folder / "ours" / "items"
ours.mkdir(parents=True)
for attempt in range(2):  # an interrupted commit is simply run again
    write_item_metadata(ours, [WO, NORM], LEAVES, store_format)
    write_step_metadata(ours.parent, "items", {"scan_layers": True, "n": 3}, init_timestamp_nsecs=5)
import jax
arrays = [ArraySpec(s.path, s.dtype, s.shape, s.chunk, s.inner) for s in (WO, NORM)]
real = jax.tree.map(lambda leaf: np.zeros(leaf.shape, numpy_dtype(leaf.dtype)) if isinstance(leaf, ArraySpec) else leaf,
                    tree_of(arrays, LEAVES))
handler = ocp.PyTreeCheckpointHandler(use_ocdbt=store_format == "ocdbt", use_zarr3=store_format != "zarr2")
with ocp.Checkpointer(ocp.CompositeCheckpointHandler(items=handler)) as checkpointer:
    checkpointer.save(folder / "real", args=ocp.args.Composite(items=ocp.args.PyTreeSave(real)))
from tensorferry.mappings.words.problems import FerryError
for write, words in (
    (lambda: write_step_metadata(folder / "absent", "items", {}), "step metadata"),
    (lambda: write_item_metadata(Path("/proc/absent"), [WO], LEAVES, store_format), "metadata written"),
):
    try:
        write()
    except FerryError as error:
        assert words in str(error), error
    else:
        raise AssertionError("a failed write went unnoticed")
metadata = ocp.metadata.metadata_store(enable_write=False).read(folder / "ours" / "_CHECKPOINT_METADATA")
assert metadata["custom_metadata"] == {"scan_layers": True, "n": 3}, metadata
"""


@pytest.fixture(scope="module", params=["zarr3", "ocdbt", "zarr2"])
def both(request, tmp_path_factory):
    """A folder with ``ours`` (no array data) and ``real`` (a save of the same tree)."""
    folder = tmp_path_factory.mktemp(request.param)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.path.dirname(__file__)}
    command = [sys.executable, "-c", SAVE_BOTH_WAYS, str(folder), request.param]
    subprocess.run(command, check=True, env=environment, timeout=120)
    return folder


def test_the_tree_is_told_as_a_real_save_tells_it(both):
    ours, real = (json.loads((both / name / "items" / "_METADATA").read_text()) for name in ("ours", "real"))
    for entry in real["tree_metadata"].values():
        entry["value_metadata"].pop("write_shape", None)  # optional, and a matter of the real save's chunks
    assert ours == real
    assert ours["store_array_data_equal_to_fill_value"] is True
    assert ours["tree_metadata"]["('step',)"]["value_metadata"]["value_type"] == "scalar"
    assert ours["tree_metadata"]["('opt_state',)"]["value_metadata"] == {"value_type": "Dict", "skip_deserialize": True}


def test_the_step_names_the_reader_of_a_real_save(both):
    ours, real = (json.loads((both / name / "_CHECKPOINT_METADATA").read_text()) for name in ("ours", "real"))
    assert ours.keys() == real.keys()
    assert ours["item_handlers"] == real["item_handlers"]
    assert ours["init_timestamp_nsecs"] == 5
    assert ours["commit_timestamp_nsecs"] > 10**18


def test_no_data_is_written_for_arrays_that_are_there_already(both):
    names = {path.name for path in (both / "ours" / "items").iterdir()}
    assert not any(name.startswith("params") for name in names)
    assert names >= {"_METADATA"}


def test_the_tree_is_nested_dicts():
    tree = tree_of([WO, NORM], LEAVES)
    assert tree == {
        "params": {"params": {"layers": {"wo": WO}, "norm": {"scale": NORM}}},
        "step": 7,
        "opt_state": {},
    }
    assert scalar_keys(LEAVES) == ("step",)


@pytest.mark.parametrize(
    "path",
    [("params", "params", "norm", "scale"), ("params", "params", "norm"), ("params", "params", "norm", "scale", "x")],
)
def test_a_name_that_is_taken_is_refused(path):
    with pytest.raises(FerryError, match=r"expected a place of its own in the tree"):
        tree_of([NORM, ArraySpec(path, "float32", (), (), ())], {})


def test_importing_the_module_imports_neither_orbax_nor_jax():
    check = "assert not {'jax', 'orbax', 'tensorstore'} & set(sys.modules)"
    code = f"import sys, tensorferry.pipelines.orbax.orbax_metadata; {check}"
    subprocess.run([sys.executable, "-c", code], check=True)
