"""Jobs that a launcher stages for Dataflow and leaves, run by another process."""

# What Dataflow does with a job: it reads the staged graph and runs it. The launcher's process is long gone.
SERVICE = """
import sys
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.portability import python_urns
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
graph = beam_runner_api_pb2.Pipeline.FromString(open(sys.argv[1], "rb").read())
for environment in graph.components.environments.values():
    environment.urn, environment.payload = python_urns.EMBEDDED_PYTHON, b""
    del environment.dependencies[:]
state = FnApiRunner().run_via_runner_api(graph, PipelineOptions([])).wait_until_finish()
print(state, *sorted({"jax", "orbax", "torch", "tensorstore"} & sys.modules.keys()))
"""


def dataflow_args(bucket: str) -> list[str]:
    """Beam's options of a job that is staged in a bucket of the emulator."""
    return ["--runner=DataflowRunner", "--project=my-project", "--region=europe-west4",
            f"--temp_location=gs://{bucket}/tmp", "--sdk_container_image=image:1"]  # fmt: skip
