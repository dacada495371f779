"""Jobs for Dataflow, described offline: Beam translates, checks and stages them; nothing is submitted."""

import json
import logging

import pytest
import tiny_llama
from tensorferry.mappings.plan.resources import recommend
from tensorferry.pipelines.cli.main import main
from tensorferry.pipelines.convert.conversion_planning import ConversionOptions, plan_conversion
from tensorferry.pipelines.engine.cluster_args import complete_args, pinned, plan_resources
from tensorferry.pipelines.engine.runner import OnlyBuilt, RunOptions, run_items

pytest.importorskip("google.cloud.dataflow_v1beta3", reason="needs apache-beam[gcp]")

IMAGE = "europe-docker.pkg.dev/my-project/images/tensorferry:0.1.0"
RESOURCES = recommend(688 * 10**9, 1342 * 10**9, 250_000, 144 << 20, 1 << 30)


@pytest.fixture(autouse=True)
def anonymous(monkeypatch):
    """Beam asks for credentials four times, with growing waits; there are none here."""
    from apache_beam.internal.gcp import auth

    monkeypatch.setattr(auth._Credentials, "_credentials_init", True)
    logging.getLogger("apache_beam").setLevel(logging.ERROR)


def dataflow_args(bucket: str, *more: str) -> tuple[str, ...]:
    return ("--runner=DataflowRunner", "--project=my-project", "--region=europe-west4",
            f"--temp_location=gs://{bucket}/tmp", *more)  # fmt: skip


def parsed(graph: bytes):
    from apache_beam.portability.api import beam_runner_api_pb2

    return beam_runner_api_pb2.Pipeline.FromString(graph)


def memory_hints(pipeline) -> set[bytes]:
    """Bytes of memory that the environments of a graph ask for."""
    environments = pipeline.components.environments.values()
    hints = (hint for environment in environments for hint in environment.resource_hints.items())
    return {value for urn, value in hints if urn.endswith("min_ram_bytes:v1")}


class Nothing:
    def setup(self) -> None:
        pass

    def __call__(self, item):
        return {"bytes": 1}


def test_a_plan_of_250_000_tensors_is_a_small_job(gcs, bucket, tmp_path):
    count = 250_000
    lines = tmp_path / "items.jsonl"
    lines.write_text("".join(f'{{"id":"{number:07d}"}}\n' for number in range(count)))
    gcs.put(bucket, "plan/items.jsonl", lines.read_bytes())
    job_file = tmp_path / "job.json"
    args = dataflow_args(bucket, f"--template_location={job_file}", f"--sdk_container_image={IMAGE}")
    options = RunOptions(complete_args(args, RESOURCES, tmp_path, True), str(tmp_path), local_items=str(lines),
                         show_progress=False)  # fmt: skip
    with pytest.raises(OnlyBuilt, match="built and not run"):
        run_items(f"gs://{bucket}/plan/items.jsonl", [1] * count, Nothing(), options)
    assert job_file.stat().st_size < 200_000
    (graph,) = (gcs.get(bucket, name) for name in gcs.names(bucket, "tmp") if name.endswith("pipeline.pb"))
    assert len(graph) < 200_000
    assert memory_hints(parsed(graph)) == {b"3221225472"}
    environment = json.loads(job_file.read_text())["environment"]
    (pool,) = environment["workerPools"]
    assert pool["machineType"] == RESOURCES.machine_type == "n2-standard-8"
    assert pool["numThreadsPerWorker"] == RESOURCES.threads == 7
    assert pool["autoscalingSettings"] == {"algorithm": "AUTOSCALING_ALGORITHM_BASIC", "maxNumWorkers": 2}
    assert pool["sdkHarnessContainerImages"][0]["containerImage"] == IMAGE
    assert "no_use_multiple_sdk_containers" in environment["experiments"]


def test_the_user_has_the_last_word(tmp_path):
    given = dataflow_args("b", f"--sdk_container_image={IMAGE}", "--machine_type=c3-highmem-22", "--max_num_workers=40")
    args = complete_args(given, RESOURCES, tmp_path, True)
    assert args[: len(given)] == given
    assert [one for one in args if "machine_type" in one or "max_num_workers" in one] == [
        "--machine_type=c3-highmem-22", "--max_num_workers=40",
    ]  # fmt: skip
    assert "--number_of_worker_harness_threads=7" in args
    assert not any("extra_package" in one for one in args)


def test_threads_of_the_local_engine(tmp_path):
    assert "--direct_num_workers=8" in complete_args((), RESOURCES, tmp_path, True)
    assert complete_args(("--direct_num_workers=3",), RESOURCES, tmp_path, True) == ("--direct_num_workers=3",)
    assert "--direct_num_workers=8" not in complete_args((), RESOURCES, tmp_path, False)
    in_memory = ("--direct_running_mode=in_memory",)
    assert complete_args(in_memory, RESOURCES, tmp_path, True) == in_memory


def test_convert_builds_a_job_from_a_clone(gcs, bucket, tmp_path, capsys, monkeypatch):
    """The command as a user gives it: wheel and pins are staged, no secret is in anything that is."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    gcs.put_all(bucket, "m", tiny_llama.files())
    job_file = tmp_path / "job.json"
    arguments = ["convert", "--source", f"gs://{bucket}/m", "--output", f"gs://{bucket}/out"]
    assert main([*arguments, *dataflow_args(bucket, f"--template_location={job_file}")]) == 0
    assert "The job was built and not run" in capsys.readouterr().err
    job = json.loads(job_file.read_text())
    names = [name.rsplit("/", 1)[-1] for name in gcs.names(bucket, "tmp/")]
    assert any(name.startswith("tensorferry-0.1.0-py3") for name in names)
    requirements = next(name for name in gcs.names(bucket, "tmp/") if name.endswith("requirements.txt"))
    pins = gcs.get(bucket, requirements).decode().split()
    assert pins == pinned()
    assert {"tensorstore", "google-cloud-storage"} <= {one.split("==")[0] for one in pins}
    assert not any(one.startswith("apache-beam") for one in pins)
    assert "hf_secret" not in json.dumps(job)
    assert not any(b"hf_secret" in gcs.get(bucket, name) for name in gcs.names(bucket))
    assert gcs.names(bucket, "out/.tensorferry-0/queue/") == ["out/.tensorferry-0/queue/items.jsonl"]
    # Nothing was run; the same place can be taken by a real run of the same plan.
    assert main([*arguments, "--take-over"]) == 0


@pytest.fixture
def jobs(monkeypatch) -> list:
    """What Beam makes of each job: its options and its graph."""
    from apache_beam.runners.dataflow.internal import apiclient

    made, real = [], apiclient.Job.__init__

    def init(self, options, graph):
        made.append((options.get_all_options(), graph))
        real(self, options, graph)

    monkeypatch.setattr(apiclient.Job, "__init__", init)
    return made


def test_dry_run(gcs, bucket, capsys, jobs):
    """Nothing is submitted, and the job is the one that the plan asks for."""
    gcs.put_all(bucket, "m", tiny_llama.files())
    args = dataflow_args(bucket, "--dry_run=True", f"--sdk_container_image={IMAGE}")
    assert main(["convert", "--source", f"gs://{bucket}/m", "--output", f"gs://{bucket}/out", *args]) == 0
    assert "The job was built and not run" in capsys.readouterr().err
    ((options, graph),) = jobs
    wanted = plan_resources(plan_conversion(ConversionOptions(f"gs://{bucket}/m")).plan)
    assert (options["machine_type"], options["num_workers"]) == (wanted.machine_type, wanted.workers)
    assert options["number_of_worker_harness_threads"] == wanted.threads
    assert (options["autoscaling_algorithm"], options["max_num_workers"]) == ("THROUGHPUT_BASED", wanted.workers)
    assert options["sdk_container_image"] == IMAGE
    assert memory_hints(graph) == {b"%d" % (-(-wanted.memory_bytes // 2**30) * 2**30)}
    assert graph.ByteSize() < 200_000


def test_a_missing_option_is_a_sentence(gcs, bucket, capsys):
    gcs.put_all(bucket, "m", tiny_llama.files())
    command = ["convert", "--source", f"gs://{bucket}/m", "--output", f"gs://{bucket}/out"]
    args = ("--runner=DataflowRunner", "--region=r", f"--temp_location=gs://{bucket}/tmp")
    assert main([*command, *args, f"--sdk_container_image={IMAGE}"]) == 1
    error = capsys.readouterr().err
    assert "--runner DataflowRunner cannot start: Missing required option: project" in error
    assert "Traceback" not in error


def test_a_local_output_is_out_of_reach_of_dataflow(gcs, bucket, tmp_path, capsys):
    gcs.put_all(bucket, "m", tiny_llama.files())
    args = dataflow_args(bucket, "--dry_run=True", f"--sdk_container_image={IMAGE}")
    assert main(["convert", "--source", f"gs://{bucket}/m", "--output", str(tmp_path / "o"), *args]) == 1
    assert "expected gs://bucket/path: Dataflow's workers cannot write here" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
    folder = tiny_llama.write(tmp_path / "m")
    assert main(["convert", "--source", str(folder), "--output", f"gs://{bucket}/out", *args]) == 1
    assert "Dataflow's workers cannot read it here" in capsys.readouterr().err


def test_plan_recommends(gcs, bucket, capsys):
    gcs.put_all(bucket, "m", tiny_llama.files())
    assert main(["plan", "--source", f"gs://{bucket}/m"]) == 0
    told = capsys.readouterr().out
    assert "on Dataflow    --machine_type=n2-standard-4 --num_workers=1" in told
    assert " --number_of_worker_harness_threads=" in told
