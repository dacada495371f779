"""Who imports what: layers point one way, light commands stay light, workers never import jax or torch."""

import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from checkpoints import llama_config, llama_tensors, write_checkpoint
from commands import ROOT, environment, python
from pace import pace

HEAVY = ("apache_beam", "jax", "orbax", "tensorstore", "torch")
LAYERS = ("transforms", "mappings", "pipelines")
RUN = """
import contextlib, io, resource, sys
from tensorferry.pipelines.cli.main import main
code = 0
with contextlib.redirect_stdout(io.StringIO()):
    try:
        code = main(sys.argv[1:])
    except SystemExit as end:
        code = end.code
used = resource.getrusage(resource.RUSAGE_SELF)
print(code, used.ru_utime + used.ru_stime, *sorted({name.split(".")[0] for name in sys.modules}))
"""


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), llama_config(), llama_tensors())


@pytest.mark.parametrize("args", [
    ("--help",), ("convert", "--help"), ("verify", "--help"), ("plan", "--source", "SOURCE"), ("inspect", "SOURCE"),
], ids=" ".join)  # fmt: skip
def test_light_commands_import_nothing_heavy_and_answer_at_once(args, llama):
    words = [str(llama) if word == "SOURCE" else word for word in args]
    code, cpu_seconds, *modules = python(RUN, *words).split()
    assert code == "0"
    assert not set(HEAVY) & set(modules)
    assert float(cpu_seconds) < 1.0 * pace()


def test_inspect_of_an_orbax_checkpoint_needs_no_beam_and_no_jax(llama, tmp_path):
    python(RUN, "convert", "--source", llama, "--output", tmp_path)
    code, _, *modules = python(RUN, "inspect", tmp_path).split()
    assert code == "0"
    assert not {"apache_beam", "jax", "orbax", "torch"} & set(modules)


WORKER = """
import sys
from tensorferry.pipelines.convert import conversion as convert
seen = []
real = convert.run_items
def watched(*args, **kwargs):
    tally = real(*args, **kwargs)
    seen.append(sorted({name.split(".")[0] for name in sys.modules}))
    return tally
convert.run_items = watched
# What the launcher imports for the commit while workers work is no worker's.
convert.load_orbax = lambda: None
from tensorferry.pipelines.cli.main import main
code = main(["convert", "--source", sys.argv[1], "--output", sys.argv[2], *sys.argv[3:]])
assert code == 0 and len(seen) == 1
print("modules", *seen[0])
"""


def test_ferrying_imports_neither_jax_nor_torch(llama, tmp_path):
    said = python(WORKER, llama, tmp_path, "--direct_running_mode=in_memory")
    modules = said.rsplit("\nmodules ", 1)[-1].removeprefix("modules ").split()
    assert {"apache_beam", "tensorstore"} <= set(modules)
    assert not {"jax", "jaxlib", "orbax", "torch"} & set(modules)


ROOMS = (
    "cli", "verify", "migrate", "export", "convert", "output", "orbax", "huggingface", "sinks", "engine", "regions",
    "storage",
)  # fmt: skip
SHELVES = ("lora", "export", "tunix", "plan", "families", "lowbit", "rules", "words")


@pytest.mark.xfail(strict=True, reason="some arrows still run back")
def test_imports_point_one_way():
    """Packages above packages, rooms above rooms; an import inside a function or for types alone counts as well."""
    wrong = [f"{name} imports {other}" for name, others in imports().items() for other in others if up(name, other)]
    assert not wrong


def up(name: str, other: str) -> bool:
    (layer, *room), (other_layer, *other_room) = name.split("."), other.split(".")
    if layer != other_layer:
        return LAYERS.index(layer) < LAYERS.index(other_layer)
    order = {"pipelines": ROOMS, "mappings": SHELVES}.get(layer)
    return bool(order and room and other_room) and order.index(room[0]) > order.index(other_room[0])


@pytest.mark.xfail(strict=True, reason="some arrows still run back")
def test_the_three_directions_know_nothing_of_each_other():
    directions = {"convert", "export", "migrate"}
    wrong = [
        f"{name} imports {other}"
        for name, others in imports().items()
        for other in others
        if name.startswith("pipelines.") and other.startswith("pipelines.")
        and name.split(".")[1] in directions and other.split(".")[1] in directions - {name.split(".")[1]}
    ]  # fmt: skip
    assert not wrong


@pytest.mark.xfail(strict=True, reason="some arrows still run back")
def test_no_module_imports_itself_by_way_of_others():
    left = imports()
    while True:
        free = {name for name, others in left.items() if not others & left.keys()}
        if not free:
            break
        left = {name: others for name, others in left.items() if name not in free}
    assert not left, f"on a circle, or above one: {sorted(left)}"


def test_no_two_modules_have_one_name():
    names = Counter(name.rsplit(".", 1)[-1] for name in modules() if name.count(".") > 1)
    assert not [name for name, count in names.items() if count > 1]


def modules() -> dict[str, Path]:
    """Every module below the three packages, by its name without ``tensorferry``."""
    files = (path for package in LAYERS for path in sorted((ROOT / package).rglob("*.py")))
    dotted = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files}
    return {name.removesuffix(".__init__"): path for name, path in dotted.items()}


@cache
def imports() -> dict[str, set[str]]:
    """What each module imports of the others, at any depth of its code."""
    known = modules()
    return {
        name: {other for each in imported(path) if (other := each.removeprefix("tensorferry.")) in known} - {name}
        for name, path in known.items()
    }


def test_transforms_and_mappings_need_only_numpy_and_ml_dtypes():
    allowed = {*sys.stdlib_module_names, "numpy", "ml_dtypes", "tensorferry", "xxhash"}
    for package in ("transforms", "mappings"):
        for path in sorted((ROOT / package).rglob("*.py")):
            names = {name.split(".")[0] for name in imported(path)}
            assert names <= allowed, f"{path.relative_to(ROOT)} imports {sorted(names - allowed)}"


def test_mappings_do_no_input_or_output():
    for path in sorted((ROOT / "mappings").rglob("*.py")):
        names = {name.split(".")[0] for name in imported(path)}
        assert not {"os", "io", "pathlib", "shutil", "subprocess", "socket"} & names, path.relative_to(ROOT)


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize(
    "module",
    ["tensorferry.mappings.plan.conversion_plan", "tensorferry.mappings.families", "tensorferry.transforms.ops"],
)
def test_lower_layers_import_in_a_moment(module):
    clock = "time.process_time()"
    code = f"import time, numpy, ml_dtypes; start = {clock}; import {module}; print({clock} - start)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), cwd=ROOT)
    assert float(done.stdout) < 0.3 * pace(), done.stderr
