"""What the sink writes is loaded by MaxText's own loader into MaxText's own model, bit for bit.

Runs where TENSORFERRY_MAXTEXT_PYTHON names an interpreter that can import maxtext 0.2.5.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tensorferry.mappings.plan.array_spec import ArraySpec

PROBE = Path(__file__).parents[2] / "helpers" / "maxtext_probe.py"
WRITE = """
import json, sys
from pathlib import Path
from tensorferry.mappings.plan.array_spec import ArraySpec
from sample_checkpoint import sample_values, save_expected, write_checkpoint
from test_maxtext_loader import specs_of
folder = Path(sys.argv[1])
specs = specs_of(json.loads(sys.argv[2]))
save_expected(folder / "expected", sample_values(specs))
for store_format in ("zarr3", "ocdbt", "zarr2"):
    write_checkpoint(folder / store_format, store_format, sample_values(specs), specs)
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "TENSORFERRY_MAXTEXT_PYTHON" not in os.environ,
        reason="TENSORFERRY_MAXTEXT_PYTHON names no interpreter with maxtext",
    ),
]


def specs_of(tree: dict[str, dict]) -> tuple[ArraySpec, ...]:
    """The model's parameters, stacked axes in chunks of length 1, as a plan would have them."""
    specs = []
    for key, leaf in tree.items():
        shape = tuple(leaf["shape"])
        chunk = (shape[0], 1, *shape[2:]) if ".layers." in key else shape
        inner = (chunk[0] // 2, *chunk[1:])
        specs.append(ArraySpec(("params", "params", *key.split(".")), leaf["dtype"], shape, chunk, inner))
    return tuple(specs)


def run(python: str, *command: str, cwd: Path) -> str:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(PROBE.parent)}
    done = subprocess.run([python, *command], env=environment, cwd=cwd, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_maxtext_loads_all_three_formats(tmp_path):
    maxtext = os.environ["TENSORFERRY_MAXTEXT_PYTHON"]
    tree = run(maxtext, str(PROBE), "tree", cwd=tmp_path).splitlines()[-1]
    assert len(json.loads(tree)) == 12
    run(sys.executable, "-c", WRITE, str(tmp_path), tree, cwd=tmp_path)
    for store_format in ("zarr3", "ocdbt", "zarr2"):
        step = tmp_path / store_format / "0"
        told = run(maxtext, str(PROBE), "load", str(tmp_path / "expected"), str(step), cwd=tmp_path)
        assert told.splitlines()[-1] == "12 arrays equal", store_format
