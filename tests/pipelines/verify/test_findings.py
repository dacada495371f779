"""Folders that verifications with workers elsewhere leave when they are killed."""

import os
import time

import pytest
from tensorferry.pipelines.verify import findings
from tensorferry.pipelines.verify.findings import open_findings


@pytest.fixture
def later(monkeypatch):
    """Two hours pass."""
    real = time.time

    def pass_hours() -> None:
        monkeypatch.setattr(findings.time, "time", lambda: real() + 7200)

    return pass_hours


def test_in_a_bucket(gcs, bucket, later):
    gcs.put(bucket, "out/.tensorferry-verify-dead/found/1.json", b"{}")
    gcs.put(bucket, "out/.tensorferry-verify-dead/items.jsonl", b"")
    gcs.put(bucket, "out/0/items/_METADATA", b"{}")
    before = gcs.names(bucket)
    with open_findings(f"gs://{bucket}/out/0/items", are_elsewhere=True):
        pass
    assert gcs.names(bucket) == before, "it may be at work still"
    later()
    with open_findings(f"gs://{bucket}/out/0/items", are_elsewhere=True) as found:
        found.receipts.add("1", {})
    assert gcs.names(bucket) == ["out/0/items/_METADATA"]


def test_in_a_directory(tmp_path, later):
    dead = tmp_path / ".tensorferry-verify-dead" / "found"
    dead.mkdir(parents=True)
    (tmp_path / "0" / "items").mkdir(parents=True)
    with open_findings(str(tmp_path / "0" / "items"), are_elsewhere=True):
        assert dead.exists()
    later()
    with open_findings(str(tmp_path / "0" / "items"), are_elsewhere=True):
        assert sorted(os.listdir(tmp_path))[0].startswith(".tensorferry-verify-")
    assert os.listdir(tmp_path) == ["0"]


def test_a_place_that_cannot_be_listed_is_no_reason_to_fail(gcs, bucket):
    gcs.fail("^GET .*delimiter", 403, times=99)
    with open_findings(f"gs://{bucket}/out/0/items", are_elsewhere=True) as found:
        assert found.shared.startswith(f"gs://{bucket}/out/.tensorferry-verify-")
