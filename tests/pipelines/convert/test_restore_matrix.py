"""What the sink writes is restored bit for bit by stock Orbax: both APIs, all formats, several device counts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROBE = Path(__file__).parents[2] / "helpers" / "restore_probe.py"
FORMATS = ("zarr3", "ocdbt", "zarr2")
READERS = 8  # in restore_probe.py
WRITE = """
import sys
from pathlib import Path
from sample_checkpoint import sample_values, save_expected, write_checkpoint
folder = Path(sys.argv[1])
save_expected(folder / "expected", sample_values())
for store_format in sys.argv[2:]:
    write_checkpoint(folder / store_format, store_format)
write_checkpoint(folder / "zarr3-zstd1", "zarr3", compression="zstd1")
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    """Written in a process of its own: this one stays free of jax."""
    folder = tmp_path_factory.mktemp("checkpoints")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(PROBE.parent)}
    subprocess.run([sys.executable, "-c", WRITE, str(folder), *FORMATS], check=True, env=environment, timeout=120)
    return folder


def probe(python: str, folder: Path, devices: int, names=FORMATS) -> list[str]:
    """The probe's lines; fails with all of them when a reader failed."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": ""}
    command = [python, str(PROBE), str(folder / "expected"), *(str(folder / name) for name in names)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if " devices | " in line]
    failed = [line for line in lines if not line.endswith("| equal")]
    assert done.returncode == 0, "\n".join(failed) or done.stderr[-3000:]
    assert len(lines) == READERS * len(names)
    return lines


@pytest.mark.parametrize("devices", [1, 8])
def test_stock_orbax_restores_every_bit(checkpoints, devices):
    probe(sys.executable, checkpoints, devices)


@pytest.mark.slow
def test_stock_orbax_restores_every_bit_on_two_devices_and_compressed(checkpoints):
    probe(sys.executable, checkpoints, 2, (*FORMATS, "zarr3-zstd1"))


@pytest.mark.slow
@pytest.mark.skipif(
    "TENSORFERRY_ORBAX_011_PYTHON" not in os.environ,
    reason="TENSORFERRY_ORBAX_011_PYTHON names no interpreter with orbax-checkpoint 0.11",
)
@pytest.mark.parametrize("devices", [1, 8])
def test_orbax_011_restores_every_bit(checkpoints, devices):
    probe(os.environ["TENSORFERRY_ORBAX_011_PYTHON"], checkpoints, devices)
