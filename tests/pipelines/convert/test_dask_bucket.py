"""A Dask cluster of real processes with buckets at both ends: nothing that matters lies on the launcher's disk."""

import re
from pathlib import Path

import pytest
import tiny_llama
from tensorferry.mappings.plan import work_items as items
from tensorferry.pipelines.cli.main import main

distributed = pytest.importorskip("distributed", reason="needs apache-beam[dask]")
pytest.importorskip("gcsfs", reason="stock Orbax reads buckets with it")


@pytest.fixture(scope="module")
def dask(gcs_server):
    """Beam options of a cluster of two processes that know the emulator from their environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
        cluster = distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None)
    with cluster:
        yield ["--runner=DaskRunner", f"--dask_client_address={cluster.scheduler_address}"]


def test_convert_and_verify(gcs, bucket, dask, monkeypatch, capsys):
    monkeypatch.setattr(items, "MAX_GROUPED_PARTS", 2)
    gcs.put_all(bucket, "m", tiny_llama.files())
    gcs.latency_seconds = 0.1
    places = ["--source", f"gs://{bucket}/m", "--output", f"gs://{bucket}/out"]
    assert main(["convert", *places, "--chunk-bytes", "1000", "--progress-seconds", "0.1", *dask]) == 0
    told = re.findall(r", (\d+) of (\d+) work items", capsys.readouterr().err)
    counts, totals = [int(done) for done, _ in told], {total for _, total in told}
    assert len(totals) == 1
    assert counts == sorted(counts)
    assert any(0 < count < int(told[0][1]) for count in counts), f"no progress was seen: {counts}"
    assert counts[-1] == int(told[0][1])
    before = gcs.names(bucket)
    gcs.requests.clear()
    assert main(["verify", *places, *dask]) == 0
    assert "no difference" in capsys.readouterr().out
    assert len(gcs.seen(r"^POST /upload.*\.tensorferry-verify-.*found")) == int(told[0][1])
    assert gcs.names(bucket) == before, "something was left behind"


def test_verify_tells_what_a_worker_elsewhere_found_and_leaves_nothing(gcs, bucket, dask, capsys):
    gcs.put_all(bucket, "m", tiny_llama.files())
    places = ["--source", f"gs://{bucket}/m", "--output", f"gs://{bucket}/out"]
    assert main(["convert", *places, "--format", "zarr2"]) == 0
    before = gcs.names(bucket)
    name = next(one for one in before if one.startswith("out/0/items/") and "embedding/0" in one)
    damaged = bytearray(gcs.get(bucket, name))
    damaged[7] ^= 1
    gcs.put(bucket, name, bytes(damaged))
    capsys.readouterr()
    assert main(["verify", *places, *dask]) == 3
    assert "token_embedder.embedding index [0, 3]" in capsys.readouterr().err
    assert gcs.names(bucket) == before
