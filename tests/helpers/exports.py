"""Exports run in this process without Beam, and what they wrote, read by other code than wrote it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from oracle_data import read_safetensors
from safetensors.numpy import save_file
from sample_checkpoint import write_checkpoint as write_orbax
from tensorferry.mappings.plan.conversion_plan import Plan
from tensorferry.pipelines.engine.tally import Tally
from tensorferry.pipelines.export import export_run
from tensorferry.pipelines.export.export_output import ExportOutcome, ExportOutput
from tensorferry.pipelines.export.export_planning import ExportOptions
from tensorferry.pipelines.export.export_run import run_export

Arrays = Mapping[str, np.ndarray]


def write_repository(folder: Path, config: Mapping[str, Any], tensors: Arrays | None = None) -> Path:
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


def stock(output: Path, arrays: dict[str, np.ndarray], under: str = "params/params", **more: Any) -> Path:
    """Saves arrays with stock Orbax as an item; keys are dotted paths.

    Args:
      under: levels to put in place of the first two; none for the root.
      more: further leaves or branches of the tree.
    """
    import orbax.checkpoint as ocp

    tree: dict[str, Any] = dict(more)
    for key, array in arrays.items():
        levels = under.split("/") if under else []
        path = [*levels, *key.split(".")[2:]]
        node = tree
        for level in path[:-1]:
            node = node.setdefault(level, {})
        node[path[-1]] = np.ascontiguousarray(array)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(output, tree)
    return output


def here(items_path: str, item_sizes: Any, work: Any, options: Any) -> Tally:
    """Takes the place of the runner: every item in turn, in this thread."""
    work.setup()
    for line in Path(items_path).read_text().splitlines():
        work(json.loads(line))
    return Tally()


def export_here(
    monkeypatch: Any, source: Path | str, config: Path, output: Path | str, staging: Path | str = "", **options: Any
) -> ExportOutcome:
    """An export without Beam."""
    monkeypatch.setattr(export_run, "run_items", here)
    chosen = ExportOptions(str(source), str(config), **options)
    return run_export(chosen, ExportOutput(str(output), str(staging)), lambda line: None)


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
