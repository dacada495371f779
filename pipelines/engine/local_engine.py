"""Beam's in-process engine, pinned, with worker processes whose death is noticed.

Beam's own handler of worker processes waits for ever when one dies in a last step, goes through a shell and
lets the workers write on the user's terminal. Imports Beam, so import this only to run a pipeline.
"""

import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

from apache_beam.portability import python_urns
from apache_beam.portability.api import beam_provision_api_pb2, endpoints_pb2
from apache_beam.runners.portability.fn_api_runner import fn_runner, worker_handlers
from apache_beam.runners.portability.portable_runner import JobServiceHandle
from google.protobuf import json_format, text_format

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import PipelineOptions
    from apache_beam.transforms.environments import Environment

_WORKER_COMMAND = (sys.executable, "-m", "apache_beam.runners.worker.sdk_worker_main")
_CLOSE_SECONDS = 10.0


class Crew:
    """The worker processes of one run.

    Attributes:
      exit_codes: how workers died that should not have, in `subprocess`'s convention.
      missing: what to say when a worker never came.
    """

    def __init__(self, log_path: str) -> None:
        self.exit_codes: list[int] = []
        self.missing = ""
        self._log_path = log_path
        self._processes: list[subprocess.Popen[bytes]] = []
        self._dismissed = False

    @property
    def is_dismissed(self) -> bool:
        """Whether the run is over."""
        return self._dismissed

    def register(self) -> None:
        """Makes Beam's engine take its worker processes from here."""
        worker_handlers.WorkerHandler.register_environment(python_urns.SUBPROCESS_SDK, bytes)(
            lambda _command, state, info, server: WorkerProcess(state, info, server, self)
        )

    def start(self, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
        """Starts one worker; its output goes to the log."""
        with open(self._log_path, "ab") as log:
            # A session of its own: Ctrl-C reaches the launcher alone, which lets items in flight finish.
            process = subprocess.Popen(
                _WORKER_COMMAND,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def mourn(self, exit_code: int) -> bool:
        """Notes the end of a worker; whether it was a death."""
        if exit_code == 0 or self._dismissed:
            return False
        self.exit_codes.append(exit_code)
        return True

    def dismiss(self) -> None:
        """Ends the workers that are still there."""
        self._dismissed = True
        for process in self._processes:
            if process.poll() is None:
                process.kill()


class WorkerProcess(worker_handlers.GrpcWorkerHandler):
    """Beam's handle of one worker process."""

    def __init__(self, state: Any, info: Any, server: Any, crew: Crew) -> None:
        super().__init__(state, info, server)
        self._crew = crew

    def start_worker(self) -> None:
        self._process = self._crew.start(self._environment())
        threading.Thread(target=self._watch, name="watch worker", daemon=True).start()

    def stop_worker(self) -> None:
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _watch(self) -> None:
        exit_code = self._process.wait()
        if self._crew.mourn(exit_code):
            self.control_conn.abort(RuntimeError(death_sentence(exit_code)))

    def _environment(self) -> dict[str, str]:
        control = endpoints_pb2.ApiServiceDescriptor(url=self.control_address)
        options = self.provision_info.provision_info.pipeline_options
        return {
            **os.environ,
            "CONTROL_API_SERVICE_DESCRIPTOR": text_format.MessageToString(control),
            "PIPELINE_OPTIONS": json_format.MessageToJson(options),
            # Workers import what the launcher can import, from the same places.
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "WORKER_ID": self.worker_id,
        }


def death_sentence(exit_code: int) -> str:
    """What to tell about a worker process that died.

    Args:
      exit_code: negative for a signal, as `subprocess` has it.
    """
    if exit_code == -signal.SIGKILL:
        return "A worker process died (exit code -9: out of memory?)"
    return f"A worker process died (exit code {exit_code})"


def local_engine(options: "PipelineOptions", workers: "Environment | None" = None) -> fn_runner.FnApiRunner:
    """The engine inside Beam's Python package, which gives its workers the pipeline's options.

    Args:
      options: Beam's options.
      workers: where they are, when not in this process or its children.
    """
    encoded = JobServiceHandle.encode_pipeline_options(options.get_all_options())
    info = beam_provision_api_pb2.ProvisionInfo(pipeline_options=encoded)
    return fn_runner.FnApiRunner(workers, provision_info=fn_runner.ExtendedProvisionInfo(info))
