"""A job for Dataflow whose source is on the hub: what is staged names the commit and holds no token."""

import base64
import bz2
import re

import pytest
import tiny_llama
from hub_server import serve_hub
from staged_jobs import dataflow_args
from tensorferry.pipelines.cli.main import main
from tensorferry.pipelines.storage import remote_source

pytest.importorskip("google.cloud.dataflow_v1beta3", reason="needs apache-beam[gcp]")
_BASE64 = re.compile(rb"[A-Za-z0-9+/]{40,}={0,2}")


def unpacked(data: bytes) -> bytes:
    """The bytes, and what Beam has compressed and encoded in them: its pickles of our work."""
    found = [data]
    for match in _BASE64.finditer(data):
        try:
            found.append(bz2.decompress(base64.b64decode(match[0], validate=True)))
        except (ValueError, OSError, EOFError):
            continue
    return b"\n".join(found)


def test_what_is_hidden_is_found():
    assert b"hf_secret" in unpacked(b"\x0a\x10" + base64.b64encode(bz2.compress(b"a hf_secret in a pickle")) + b"\x00")


def test_a_job_names_the_commit_and_holds_no_token(gcs, bucket, tmp_path, monkeypatch, capsys):
    from apache_beam.internal.gcp import auth

    monkeypatch.setattr(auth._Credentials, "_credentials_init", True)
    with serve_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_TOKEN", hub.token)
        remote_source.web_store.cache_clear()
        commit = hub.add("org/m", tiny_llama.files(), private=True)
        args = [*dataflow_args(bucket), f"--template_location={tmp_path / 'job.json'}"]
        assert main(["convert", "--source", "hf://org/m", "--output", f"gs://{bucket}/out", *args]) == 0
    staged = {name: unpacked(gcs.get(bucket, name)) for name in gcs.names(bucket)}
    graph = next(data for name, data in staged.items() if name.endswith("pipeline.pb"))
    assert f"hf://org/m@{commit}".encode() in graph, "the work's pickle was not looked into"
    token = hub.token.encode()
    assert [name for name, data in staged.items() if token in data] == []
    assert token not in unpacked((tmp_path / "job.json").read_bytes())
    assert hub.token not in "".join(capsys.readouterr())
