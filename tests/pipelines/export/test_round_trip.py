"""From Hugging Face to MaxText's layout and back, with the commands' own code: every family, spelling and mode."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exports import export_here, here, read_repository, ulps, write_repository
from round_trips import Trip, module_of, rounded_modules, trips
from tensorferry.mappings.families.registry import family_names
from tensorferry.mappings.plan.conversion_plan import PlanOptions
from tensorferry.pipelines.convert import conversion
from tensorferry.pipelines.convert.conversion_planning import ConversionOptions
from tensorferry.pipelines.output.output_options import OutputOptions


def cases() -> list[Any]:
    """Every trip in every mode; in every run each trip in its first mode, and each kind of model in both."""
    found, seen = [], set()
    for name, trip in trips().items():
        for mode in trip.modes:
            kind = trip.config["model_type"], mode
            is_again = kind in seen and mode != trip.modes[0]
            seen.add(kind)
            found.append(pytest.param(name, mode, id=f"{name}-{mode}", marks=pytest.mark.slow if is_again else ()))
    return found


# Below this, 1 + w in float32 is w rounded to a multiple of 2^-23.
SMALLEST_SHIFTED = 2.0**-16


def there_and_back(trip: Trip, mode: str, where: Path, monkeypatch: Any) -> dict[str, np.ndarray]:
    """The exported tensors of a converted checkpoint; its arrays lie in ``orbax``."""
    monkeypatch.setattr(conversion, "run_items", here)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    tensors = trip.make()
    repository = write_repository(where / "hf", trip.config, tensors)
    target = PlanOptions(scan_layers=mode == "scan", dtype=trip.dtype, chunk_bytes=30_000)
    options = ConversionOptions(str(repository), mapping=trip.mapping(mode), target=target)
    conversion.convert(options, OutputOptions(str(where / "orbax")), lambda line: None)
    outcome = export_here(monkeypatch, where / "orbax", repository, where / "out", chunk_bytes=10_000)
    assert outcome.export.plan.options.scan_layers is (mode == "scan")
    assert outcome.export.plan.amplification < 1.6
    return read_repository(where / "out")


@pytest.mark.parametrize(("name", "mode"), cases())
def test_home_again(name: str, mode: str, tmp_path: Path, monkeypatch) -> None:
    """Byte for byte, but for the modules that the README's table names: those to a unit in the last place."""
    trip = trips()[name]
    tensors, found = trip.make(), there_and_back(trip, mode, tmp_path, monkeypatch)
    manifest = json.loads((tmp_path / "orbax" / "0" / "items" / "tensorferry.manifest.json").read_text())
    assert found.keys() == tensors.keys() - manifest["left_out"].keys()
    assert {n: (a.shape, a.dtype) for n, a in found.items()} == {n: (tensors[n].shape, tensors[n].dtype) for n in found}
    scaled, shifted = rounded_modules(trip.family(mode).name)
    for key, array in found.items():
        wanted, module = tensors[key], module_of(key)
        if module in shifted:
            large = np.abs(wanted) >= SMALLEST_SHIFTED
            assert array[large].tobytes() == wanted[large].tobytes(), key
        elif module in scaled:
            assert ulps(array, wanted) <= 1, key
        else:
            assert array.tobytes() == wanted.tobytes(), key


def test_every_family_is_among_them() -> None:
    assert {trip.family(trip.modes[0]).name for trip in trips().values()} == set(family_names())


def test_the_hard_layouts_are_among_them() -> None:
    """Left-over layers beside stacked ones, two stacks, interleaved gate and up, experts fused and one by one."""

    def arrays(name: str) -> str:
        family = trips()[name].family("scan")
        return " ".join(rule.target.pattern(family.dims) for rule in family.plain_rules(True))

    assert "layers_remainder" in arrays("gemma3-4b")
    assert "layers_remainder" in arrays("gemma4")
    assert {"dense_layers", "moe_layers"} <= set(arrays("deepseek3-671b").split("-"))
    assert any("(expert_mlp part)" in str(rule) for rule in trips()["gpt-oss-20b"].family("scan").plain_rules(True))
    for name in ("mixtral", "deepseek3", "qwen3-moe", "qwen3-next"):
        names = {one: set(trip.make()) for one, trip in trips().items() if one.startswith(name)}
        fused = [one for one in names if any(key.endswith("experts.gate_up_proj") for key in names[one])]
        assert 0 < len(fused) < len(names), name
