"""Workers on other hosts for Beam's in-process engine: each host runs Beam's worker pool, and the engine asks the pools
in turn. Imports Beam, so import this only to run a pipeline.

    python -m apache_beam.runners.worker.worker_pool_main --service_port 50000

A pool starts its workers as ``python``: the environment that has Tensorferry must be first on its ``PATH``.
"""

import itertools
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import grpc
from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.runners.portability.fn_api_runner import worker_handlers
from apache_beam.transforms.environments import ExternalEnvironment
from tensorferry.mappings.words.problems import FerryError, Problem

if TYPE_CHECKING:
    from apache_beam.transforms.environments import Environment
    from tensorferry.pipelines.engine.local_engine import Crew

# Starting Python and importing Beam takes a few seconds; on a busy host many.
_START_SECONDS = 120.0
_POLL_SECONDS = 0.2


def first_environment(pools: Sequence[str], crew: "Crew") -> "Environment":
    """Makes Beam's engine take its workers from the pools, each in turn.

    Args:
      pools: ``host:port`` of each.
      crew: is told of workers that never come.

    Returns:
      What the engine has to be given.
    """
    turns = itertools.cycle(pools)

    def make(payload: beam_runner_api_pb2.ExternalPayload, state: Any, info: Any, server: Any) -> PoolWorker:
        # A copy: the engine has one payload for all of its workers.
        own = beam_runner_api_pb2.ExternalPayload()
        own.CopyFrom(payload)
        own.endpoint.url = next(turns)
        return PoolWorker(own, state, info, server, crew)

    urn, payload_type = common_urns.environments.EXTERNAL.urn, beam_runner_api_pb2.ExternalPayload
    worker_handlers.WorkerHandler.register_environment(urn, payload_type)(make)
    return ExternalEnvironment(pools[0])  # pyright: ignore[reportCallIssue]


class PoolWorker(worker_handlers.ExternalWorkerHandler):  # pyright: ignore[reportGeneralTypeIssues]
    """Beam's handle of one worker that a pool starts."""

    def __init__(self, payload: Any, state: Any, info: Any, server: Any, crew: "Crew") -> None:
        super().__init__(payload, state, info, server)
        self._crew = crew
        self._pool = payload.endpoint.url

    def start_worker(self) -> None:
        try:
            super().start_worker()
        except grpc.RpcError as error:
            module = "apache_beam.runners.worker.worker_pool_main"
            fix = f"Start it there: python -m {module} --service_port {self._pool.rpartition(':')[2]}"
            code = error.code()  # pyright: ignore[reportAttributeAccessIssue]
            found = "no answer" if code is grpc.StatusCode.UNAVAILABLE else code.name
            raise FerryError(str(Problem(self._pool, "a worker pool", found, fix))) from None
        threading.Thread(target=self._await, name="await worker", daemon=True).start()

    def _await(self) -> None:
        """Beam itself would wait for ever for a worker whose ``python`` has no Beam."""
        latest = time.monotonic() + _START_SECONDS
        while self.control_conn._input is None and not self._crew.is_dismissed:
            if time.monotonic() > latest:
                fix = "Put the environment that has Tensorferry first on the pool's PATH"
                found = f"none within {_START_SECONDS:.0f} s"
                self._crew.missing = str(Problem(self._pool, "a worker of that pool", found, fix))
                self._crew.exit_codes.append(1)
                return
            time.sleep(_POLL_SECONDS)
