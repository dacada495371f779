"""Beam's runner on a Dask cluster of real processes, one of which dies."""

import os
from pathlib import Path

import pytest
import tiny_llama
from tensorferry.mappings.plan import work_items as items
from tensorferry.mappings.plan.conversion_plan import PlanOptions
from tensorferry.pipelines.convert.conversion import OutputOptions, convert
from tensorferry.pipelines.convert.conversion_planning import ConversionOptions

distributed = pytest.importorskip("distributed", reason="needs apache-beam[dask]")
_VARY = ("commit_success.txt", "tensorferry.manifest.json", "_CHECKPOINT_METADATA")


def tree(folder: Path) -> dict[str, bytes]:
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if not name.endswith(_VARY)}


def test_a_worker_that_dies_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    monkeypatch.setattr(items, "MAX_GROUPED_PARTS", 4)
    source = str(tiny_llama.write(tmp_path / "source"))
    options = ConversionOptions(source, target=PlanOptions(chunk_bytes=1000))
    outcome = convert(options, OutputOptions(str(tmp_path / "local")), print)
    assert outcome.redone_items > 8
    died = tmp_path / "died"

    def die_once(path: str) -> None:
        """In each worker: the second item of whoever comes first is its last."""
        from tensorferry.pipelines.convert.ferry import FerryWork

        real, seen = FerryWork.__call__, []

        def call(self, item):
            seen.append(item["id"])
            if len(seen) == 2:
                try:
                    os.close(os.open(path, os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    return real(self, item)
                os._exit(137)
            return real(self, item)

        FerryWork.__call__ = call

    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        client.run(die_once, str(died))
        beam_args = ("--runner=DaskRunner", f"--dask_client_address={cluster.scheduler_address}")
        convert(options, OutputOptions(str(tmp_path / "dask"), beam_args=beam_args), print)
    assert died.exists(), "no worker died"
    there, here = tree(tmp_path / "dask"), tree(tmp_path / "local")
    assert there.keys() == here.keys()
    assert there == here
