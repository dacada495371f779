"""What is deployed is what is tested: versions, the template's form, names. Nothing here was run on Google Cloud."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from tensorferry.mappings.plan.resources import recommend
from tensorferry.pipelines.cli.main import build_parser

from deploy import make_metadata
from deploy.main import arguments

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TERRAFORM = sorted((DEPLOY / "terraform").rglob("*.tf")) + sorted((DEPLOY / "terraform").rglob("*.hcl"))


def default_of(argument: str) -> str:
    found = re.search(rf"^ARG {argument}=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert found, f"no ARG {argument}"
    return found[1]


def test_the_image_has_the_versions_of_the_project():
    beam = next(line for line in PROJECT["dependencies"] if line.startswith("apache-beam"))
    assert beam.startswith(f"apache-beam>={default_of('BEAM_VERSION').rsplit('.', 1)[0]},")
    assert f"apache-beam=={default_of('BEAM_VERSION')}" in (ROOT / "requirements" / "lock.txt").read_text().split()
    assert PROJECT["requires-python"] == f">={default_of('PYTHON_VERSION')}"
    assert f"python{default_of('PYTHON_VERSION').replace('.', '')}-template-launcher" in DOCKERFILE
    assert f"tensorferry:{PROJECT['version']}" in DOCKERFILE
    assert f"tensorferry:{PROJECT['version']}" in (DEPLOY / "README.md").read_text()


def test_the_launcher_is_pinned_too():
    assert re.search(r"/python311-template-launcher-base(:\d{8}-rc\d\d|@sha256:[0-9a-f]{64})$", default_of("LAUNCHER"))
    assert "\nFROM ${LAUNCHER} AS launcher\n" in DOCKERFILE


def test_the_extras_pin_the_same_beam():
    beam = next(line for line in PROJECT["dependencies"] if line.startswith("apache-beam")).removeprefix("apache-beam")
    for extra in ("gcp", "dask"):
        assert f"apache-beam[{extra}]{beam}" in PROJECT["optional-dependencies"][extra]


def test_the_image_copies_what_the_wheel_is_made_of():
    for package in ("transforms", "mappings", "pipelines"):
        assert f"\nCOPY {package} {package}\n" in DOCKERFILE
    for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE):
        *sources, _ = line.split()
        assert all((ROOT / source).exists() for source in sources), line


def test_metadata_is_generated():
    assert make_metadata.FILE.read_text() == make_metadata.text(), "run python -m deploy.make_metadata"


def test_metadata_fits_the_schema():
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((DEPLOY / "metadata.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(make_metadata.metadata())
    broken = make_metadata.metadata()
    del broken["parameters"][0]["helpText"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate(broken)


def test_every_parameter_reaches_its_option():
    values = {"BOOLEAN": "true", "TEXT": "gs://bucket/x", "GCS_WRITE_FOLDER": "gs://bucket/x"}
    numbers = {"vocab_size": "7", "chunk_bytes": "8MiB", "worker_memory_bytes": "1GiB", "progress_seconds": "3"}
    for one in make_metadata.metadata()["parameters"]:
        value = one["enumOptions"][-1]["value"] if "enumOptions" in one else values[one["paramType"]]
        value = numbers.get(one["name"], value)
        given = ["--source=gs://b/m", "--output=gs://b/o", f"--{one['name']}={value}", "--project=p"]
        args, rest = build_parser().parse_known_args(["convert", *arguments(given)])
        beams = [f"--{one['name']}={value}"] if one in make_metadata.BEAM_PARAMETERS else []
        assert rest == [*beams, "--project=p"], one["name"]
        assert args.command == "convert"


def test_beam_knows_its_parameters():
    from apache_beam.options.pipeline_options import WorkerOptions

    given = [f"--{one['name']}=x" for one in make_metadata.BEAM_PARAMETERS]
    assert WorkerOptions(given).sdk_container_image == "x"


def test_switches_of_the_template():
    assert arguments(["--overwrite=true", "--no_scan_layers=false"]) == ["--overwrite"]
    assert arguments(["--temp_location=gs://b/t", "--lm_head=tied"]) == ["--temp_location=gs://b/t", "--lm-head=tied"]


def test_terraform_parses():
    hcl2 = pytest.importorskip("hcl2")
    assert len(TERRAFORM) == 5
    parsed = {path.name + path.parent.name: hcl2.loads(path.read_text()) for path in TERRAFORM}
    resources = [kind.strip('"') for block in parsed["main.tfterraform"]["resource"] for kind in block]
    assert "google_storage_bucket" in resources
    roles = re.findall(r'"(roles/[\w.]+)"', (DEPLOY / "terraform" / "main.tf").read_text())
    assert sorted(roles) == ["roles/artifactregistry.reader", "roles/dataflow.worker", "roles/iam.serviceAccountUser",
                             "roles/storage.objectUser", "roles/storage.objectViewer"]  # fmt: skip


@pytest.mark.skipif(not shutil.which("terraform"), reason="terraform is not installed")
def test_terraform_is_formatted_and_its_names_are_tested(tmp_path):
    subprocess.run(["terraform", "fmt", "-check", "-recursive", str(DEPLOY / "terraform")], check=True)
    module = tmp_path / "naming"
    shutil.copytree(DEPLOY / "terraform" / "naming", module, ignore=shutil.ignore_patterns(".terraform*"))
    subprocess.run(["terraform", "init", "-backend=false"], cwd=module, check=True, capture_output=True)
    done = subprocess.run(["terraform", "test", "-no-color"], cwd=module, capture_output=True, text=True)
    assert "6 passed, 0 failed" in done.stdout, done.stdout + done.stderr


# Bytes read, bytes written, work items; as in the README's table.
CASES = {
    "Llama-3.1-8B": (16_060_522_496, 16_060_522_496, 256),
    "DeepSeek-V3": (688_586_727_753, 1_342_000_000_000, 21_000),
}


@pytest.mark.parametrize("name", CASES)
def test_the_worked_cases_are_what_plan_recommends(name):
    found = recommend(*CASES[name], 144 << 20, 1 << 30)
    row = next(line for line in (DEPLOY / "README.md").read_text().splitlines() if line.startswith(f"| {name}"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[3:7] == [found.machine_type, str(found.workers), str(found.threads), f"{found.seconds / 60:.0f}"]
