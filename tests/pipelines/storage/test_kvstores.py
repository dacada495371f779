"""Specs of TensorStore's stores, parsed by TensorStore itself; nothing connects."""

import pickle
from typing import Any

import pytest
import tensorstore as ts
from tensorferry.mappings.plan.array_spec import ArraySpec
from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.engine.beam_job import Ferry
from tensorferry.pipelines.engine.stop_flag import StopFlag
from tensorferry.pipelines.orbax.orbax_view import OrbaxItem
from tensorferry.pipelines.sinks.plain_zarr import Zarr3Sink
from tensorferry.pipelines.storage.kvstores import GCS_DRIVER, below, kvstore

URL = "gs://some-bucket/runs/a"


class Nothing:
    def setup(self) -> None:
        pass

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        return {}


@pytest.fixture(params=["", "gcs", "gcs_grpc"])
def driver(request, monkeypatch):
    monkeypatch.setenv(GCS_DRIVER, request.param)
    return request.param or "gcs"


def test_a_bucket_has_the_driver_that_was_asked_for(driver):
    assert kvstore(URL) == {"driver": driver, "bucket": "some-bucket", "path": "runs/a/"}
    parsed = ts.KvStore.Spec(below(kvstore(URL), "b", "c")).to_json()
    assert (parsed["driver"], parsed["bucket"], parsed["path"]) == (driver, "some-bucket", "runs/a/b/c/")


@pytest.mark.parametrize("store_format", ["zarr3", "ocdbt"])
def test_arrays_are_read_by_it(driver, store_format):
    spec = OrbaxItem(URL, store_format == "ocdbt", True).spec("params.x")
    store = ts.Spec(spec).to_json()["kvstore"]
    assert store.get("base", store)["driver"] == driver


def test_arrays_are_written_by_it(driver):
    array = ArraySpec(("params", "x"), "float32", (5, 7), (5, 7), (5, 7))
    spec = Zarr3Sink(URL).spec(array)
    assert ts.Spec(spec).to_json()["kvstore"]["driver"] == driver


def test_it_travels_to_workers_that_have_another_environment(driver, tmp_path, monkeypatch):
    frozen = pickle.dumps(Ferry(Nothing(), StopFlag("t", str(tmp_path)), engine_retries=True))
    monkeypatch.setenv(GCS_DRIVER, "")
    pickle.loads(frozen).setup()
    assert kvstore(URL)["driver"] == driver


def test_another_driver_is_a_sentence(monkeypatch):
    monkeypatch.setenv(GCS_DRIVER, "s3")
    with pytest.raises(FerryError, match=r"^TENSORFERRY_GCS_DRIVER: expected gcs or gcs_grpc; found s3\. Correct"):
        kvstore(URL)
