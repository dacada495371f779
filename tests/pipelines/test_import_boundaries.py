"""Who imports what: layers point one way, light commands stay light, workers never import jax or torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import llama_config, llama_tensors, write_checkpoint
from commands import ROOT, environment, python
from pace import pace

HEAVY = ("apache_beam", "jax", "orbax", "tensorstore", "torch")
LAYERS = ("transforms", "mappings", "pipelines")
RUN = """
import contextlib, io, resource, sys
from pipelines.cli import main
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
from pipelines import convert
seen = []
real = convert.run_items
def watched(*args, **kwargs):
    tally = real(*args, **kwargs)
    seen.append(sorted({name.split(".")[0] for name in sys.modules}))
    return tally
convert.run_items = watched
# What the launcher imports for the commit while workers work is no worker's.
convert.load_orbax = lambda: None
from pipelines.cli import main
code = main(["convert", "--source", sys.argv[1], "--output", sys.argv[2], *sys.argv[3:]])
assert code == 0 and len(seen) == 1
print("modules", *seen[0])
"""


def test_ferrying_imports_neither_jax_nor_torch(llama, tmp_path):
    said = python(WORKER, llama, tmp_path, "--direct_running_mode=in_memory")
    modules = said.rsplit("\nmodules ", 1)[-1].removeprefix("modules ").split()
    assert {"apache_beam", "tensorstore"} <= set(modules)
    assert not {"jax", "jaxlib", "orbax", "torch"} & set(modules)


@pytest.mark.parametrize("package", LAYERS)
def test_imports_point_one_way(package):
    above = LAYERS[LAYERS.index(package) + 1 :]
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for name in imported(path)
        if name.split(".")[0] in above
    ]
    assert not wrong


def test_transforms_and_mappings_need_only_numpy_and_ml_dtypes():
    allowed = {*sys.stdlib_module_names, "numpy", "ml_dtypes", "transforms", "mappings", "xxhash"}
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
    return names


@pytest.mark.parametrize("module", ["mappings.plan", "mappings.families", "transforms.ops"])
def test_lower_layers_import_in_a_moment(module):
    clock = "time.process_time()"
    code = f"import time, numpy, ml_dtypes; start = {clock}; import {module}; print({clock} - start)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), cwd=ROOT)
    assert float(done.stdout) < 0.3 * pace(), done.stderr
