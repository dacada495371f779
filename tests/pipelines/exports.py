"""Exports run in this process without Beam, and what they wrote, read by other code than wrote it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from oracle_data import read_safetensors
from sample_checkpoint import write_checkpoint as write_orbax
from safetensors.numpy import save_file

from mappings.array_spec import ArraySpec
from mappings.plan import Plan
from pipelines.exporting import run as export_run
from pipelines.exporting.planning import ExportOptions
from pipelines.exporting.run import ExportOutcome, ExportOutput, run_export
from pipelines.tally import Tally

Arrays = Mapping[str, np.ndarray]


def write_repository(folder: Path, config: Mapping[str, Any], tensors: Arrays = {}) -> Path:
    """A Hugging Face repository of one shard, or of config and tokenizer alone."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_bytes(b'{"odd  spaces": "\xc3\xa9"}\n\n')
    if tensors:
        save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})
    return folder


def write_plan(output: Path, plan: Plan, arrays: Arrays, store_format: str = "zarr3") -> None:
    """Arrays in memory as the Orbax checkpoint that a plan describes; keys without the item's first ``params.``."""
    specs = tuple(array.spec for array in plan.arrays)
    values = {f"params.{key}": array for key, array in arrays.items()}
    write_orbax(output, store_format, values, specs, scan_layers=plan.options.scan_layers)


def write_arrays(output: Path, arrays: Arrays, chunks: Mapping[str, tuple[int, ...]] = {}) -> None:
    """Arrays by their full key as an Orbax checkpoint, one chunk each unless told."""
    specs = []
    for key, array in arrays.items():
        chunk = chunks.get(key, tuple(max(1, n) for n in array.shape))
        specs.append(ArraySpec(tuple(key.split(".")), array.dtype.name, array.shape, chunk, chunk))
    write_orbax(output, "zarr3", arrays, tuple(specs))


def here(items_path: str, item_sizes: Any, work: Any, options: Any) -> Tally:
    """Takes the place of the runner: every item in turn, in this thread."""
    work.setup()
    for line in Path(items_path).read_text().splitlines():
        work(json.loads(line))
    return Tally()


def export_here(monkeypatch: Any, source: Path, config: Path, output: Path, **options: Any) -> ExportOutcome:
    """An export without Beam."""
    monkeypatch.setattr(export_run, "run_items", here)
    chosen = ExportOptions(str(source), str(config), **options)
    return run_export(chosen, ExportOutput(str(output)), lambda line: None)


def read_repository(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of every file, without our header parser."""
    found: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= read_safetensors(file.read_bytes())
    return found


def ulps(a: np.ndarray, b: np.ndarray) -> int:
    """The largest distance in units of the last place."""
    if a.dtype.kind in "iu" and a.dtype == b.dtype:
        return int((a != b).any())
    width = {1: np.int8, 2: np.int16, 4: np.int32}[a.itemsize]
    ordered = [_ordered(array.view(width).astype(np.int64), array.itemsize) for array in (a, b)]
    return int(np.abs(ordered[0] - ordered[1]).max(initial=0))


def _ordered(bits: np.ndarray, itemsize: int) -> np.ndarray:
    """Bits as numbers that rise with the value."""
    return np.where(bits < 0, -(bits & ((1 << (8 * itemsize - 1)) - 1)), bits)
