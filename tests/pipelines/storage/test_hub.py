"""Reading from a hub over HTTP, with the real huggingface_hub as the client and a real server process of our own."""

import hashlib
import os
import pickle
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import deepseek_headers
import pytest
import tiny_llama
from hub_server import serve_hub
from in_flight import InFlight
from pace import pace
from tensorferry.mappings.plan.conversion_plan import PlanOptions
from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.cli.main import main
from tensorferry.pipelines.convert.conversion import OutputOptions, convert
from tensorferry.pipelines.convert.conversion_planning import ConversionOptions, plan_conversion
from tensorferry.pipelines.orbax.orbax_view import read_manifest
from tensorferry.pipelines.storage import hub as hub_module
from tensorferry.pipelines.storage import remote_source, retries
from tensorferry.pipelines.storage.byte_source import MissingFileError, SourceError, open_source
from tensorferry.pipelines.verify.verify_conversion import verify

DATA = bytes(range(251)) * 9
PATIENT = PlanOptions(chunk_bytes=1500)


@pytest.fixture
def hub(monkeypatch):
    with serve_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_TOKEN", hub.token)
        # The token is looked up once for each connection pool, and other tests have other tokens.
        remote_source.web_store.cache_clear()
        yield hub


@pytest.fixture
def waits(monkeypatch):
    """Waits that were asked for, in seconds; nobody waits."""
    asked: list[float] = []
    monkeypatch.setattr(retries, "sleep", asked.append)
    return asked


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_branch_becomes_a_commit_once(hub):
    old = hub.add("org/m", {"w.safetensors": DATA}, revision="v1")
    new = hub.add("org/m", {"w.safetensors": DATA[:7], "sub/x.json": b"{}"})
    assert open_source("hf://org/m").url == f"hf://org/m@{new}"
    assert open_source("hf://org/m@v1").url == f"hf://org/m@{old}"
    pinned = open_source(f"hf://org/m@{old}")
    asked = len(hub.requests)
    assert pinned.revision() == old
    assert len(hub.requests) == asked
    assert pinned.list() == {"w.safetensors": len(DATA)}
    source = open_source("hf://org/m")
    assert source.folders() == ("sub",)
    assert source.files_in("sub") == {"sub/x.json": 2}  # pyright: ignore[reportAttributeAccessIssue]
    assert source.read("sub/x.json", 0, 2) == b"{}"


def test_reads_exactly_the_range(hub):
    hub.add("org/m", {"a b.safetensors": DATA, "config.json": b'{"a": 1}'})
    source = open_source("hf://org/m")
    assert source.read("a b.safetensors", 5, 700) == DATA[5:705]
    assert source.read("config.json", 1, 3) == b'"a"'
    buffer = bytearray(b"\xff" * 102)
    source.readinto("a b.safetensors", 11, memoryview(buffer)[1:-1])
    assert bytes(buffer) == b"\xff" + DATA[11:111] + b"\xff"


def test_long_reads_go_in_pieces(hub, monkeypatch):
    monkeypatch.setattr(remote_source, "PIECE_BYTES", 100)
    hub.add("org/m", {"w.safetensors": DATA})
    assert open_source("hf://org/m").read("w.safetensors", 3, 1050) == DATA[3:1053]
    assert len(hub.seen("cdn GET")) == 11


def test_where_a_shard_lies_is_asked_once(hub):
    hub.add("org/m", {"w.safetensors": DATA})
    source = open_source("hf://org/m")
    for start in range(20):
        source.read("w.safetensors", start, 10)
    assert len(hub.seen("api HEAD")) == 1
    assert len(hub.seen("cdn GET")) == 20


def test_an_expired_address_is_looked_up_anew(hub, waits, monkeypatch):
    hub.add("org/m", {"w.safetensors": DATA})
    source = open_source("hf://org/m")
    source.read("w.safetensors", 0, 9)
    hub.signature = "s2"
    with pytest.raises(SourceError, match=re.escape("permission denied (403)")):
        source.read("w.safetensors", 0, 9)
    monkeypatch.setattr(hub_module, "_TRUST_SECONDS", 0.0)
    assert source.read("w.safetensors", 0, 9) == DATA[:9]


def test_the_token_goes_to_the_hub_only(hub):
    hub.add("org/m", {"w.safetensors": DATA, "config.json": b"{}"}, private=True)
    source = open_source("hf://org/m")
    source.read("w.safetensors", 0, 9)
    source.read("config.json", 0, 2)
    assert {one.authorization for one in hub.seen("api (GET|HEAD) /org|api GET /api/models")} == {f"Bearer {hub.token}"}
    assert {one.authorization for one in hub.seen("cdn")} == {""}


def test_pickles_hold_no_token_and_no_client(hub):
    hub.add("org/m", {"w.safetensors": DATA}, private=True)
    source = open_source("hf://org/m")
    source.read("w.safetensors", 0, 9)
    frozen = pickle.dumps(source)
    assert hub.token.encode() not in frozen
    assert hub.token not in repr(source)
    assert len(frozen) < 300
    assert pickle.loads(frozen).read("w.safetensors", 7, 9) == DATA[7:16]


@pytest.mark.parametrize(("status", "pattern"), [(429, "cdn GET"), (503, "cdn GET"), (0, "cdn GET"), (500, "api HEAD")])
def test_faults_that_pass(hub, waits, status, pattern):
    hub.add("org/m", {"w.safetensors": DATA})
    hub.fail(pattern, status, times=4)
    assert open_source("hf://org/m").read("w.safetensors", 3, 500) == DATA[3:503]
    assert len(waits) == 4
    assert all(0.5 * low <= wait <= low for wait, low in zip(waits, (0.5, 1, 2, 4), strict=True))


def test_a_rate_limit_at_the_first_question(hub, waits):
    commit = hub.add("org/m", {"config.json": b"{}"})
    hub.fail("api GET /api/models", 429, times=11)
    assert open_source("hf://org/m").url.endswith(commit)
    assert sum(waits) > 150


def test_a_fault_that_stays(hub, waits):
    hub.add("org/m", {"w.safetensors": DATA})
    hub.fail("cdn GET", 503, times=99)
    with pytest.raises(SourceError, match=r"w\.safetensors: expected an answer from hf://org/m@.*; found 503 Service"):
        open_source("hf://org/m").read("w.safetensors", 0, 5)
    assert len(waits) == retries.TRIES - 1


def test_a_server_that_is_gone(hub, waits, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SourceError, match=r"hf://org/m: expected an answer from http://127.*; found no answer"):
        open_source("hf://org/m")


def test_a_file_that_is_too_short(hub, waits):
    hub.add("org/m", {"w.safetensors": DATA})
    with pytest.raises(SourceError, match="found only 5 of 9 bytes"):
        open_source("hf://org/m").read("w.safetensors", len(DATA) - 5, 9)
    with pytest.raises(SourceError, match=r"found a file that ends before it \(416\)"):
        open_source("hf://org/m").read("w.safetensors", len(DATA) + 5, 9)
    assert not waits


def test_files_that_are_not_there(hub):
    hub.add("org/m", {"w.safetensors": DATA})
    for file in ("v.safetensors", "config.json"):
        with pytest.raises(MissingFileError, match=f"{file}: expected a .*file.*; found no such file"):
            open_source("hf://org/m").read(file, 0, 5)
    with pytest.raises(SourceError, match="found one that leads out of it"):
        open_source("hf://org/m").read("../x", 0, 5)


def test_a_folder_of_a_web_server(hub):
    """A server that cannot list, and sends those who ask for weights to another host."""
    files = tiny_llama.files()
    commit = hub.add("org/m", files)
    source = open_source(f"{hub.endpoint}/org/m/resolve/{commit}")
    assert source.list() == {name: len(data) for name, data in files.items()}
    assert len(plan_conversion(ConversionOptions(source.url)).checkpoint.tensors) == len(tiny_llama.tensors())
    with pytest.raises(FerryError, match="expected the address of a folder; found one with a query"):
        open_source(f"{source.url}?download=true")


def refusal(url: str) -> str:
    with pytest.raises(FerryError) as caught:
        open_source(url)
    return str(caught.value)


def test_repositories_that_cannot_be_opened(hub, monkeypatch):
    hub.add("org/secret", {"config.json": b"{}"}, private=True)
    hub.add("org/terms", {"config.json": b"{}"}, gated=True)
    assert "found none (it does not exist, or is private). Set HF_TOKEN" in refusal("hf://org/nothing")
    assert "hf://org/terms@main: expected a repository that this account may read; found a gated one" in refusal(
        "hf://org/terms"
    )
    assert "found no such revision. Give a branch" in refusal("hf://org/secret@v9")
    assert "expected hf://org/repo or" in refusal("hf://org/repo/folder")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    told = refusal("hf://org/secret")
    assert "found no valid token (401). Set HF_TOKEN" in told
    assert "hf_wrong" not in told


def test_plan_takes_one_header_request_per_shard(hub):
    files = tiny_llama.files(shards=5)
    hub.add("org/m", files)
    conversion = plan_conversion(ConversionOptions("hf://org/m", target=PATIENT))
    conversion.plan.require()
    shards = [name for name in files if name.endswith(".safetensors")]
    for kind in ("api HEAD", "cdn GET"):
        assert sorted(one.path.split("/")[-1].split("?")[0] for one in hub.seen(kind)) == shards
    assert len(hub.seen("api GET /api/models")) == 1
    assert len(hub.seen("api GET /org/m/resolve")) == 2  # config and index


def test_convert_from_the_hub_equals_convert_from_a_folder(hub, tmp_path, capsys):
    commit = hub.add("org/m", tiny_llama.files(), private=True)
    folder = tiny_llama.write(tmp_path / "source")
    said: list[str] = []
    for source, output in (("hf://org/m", "remote"), (str(folder), "local")):
        convert(ConversionOptions(source, target=PATIENT), OutputOptions(str(tmp_path / output)), said.append)
    remote, local = (tree(tmp_path / name / "0" / "items") for name in ("remote", "local"))
    assert remote.keys() == local.keys()
    same = [name for name in local if name not in ("tensorferry.manifest.json", "commit_success.txt")]
    assert {name: remote[name] for name in same} == {name: local[name] for name in same}
    manifest = read_manifest(str(tmp_path / "remote" / "0" / "items"))
    assert manifest["source"] == f"hf://org/m@{commit}"
    told = {name: info["etag"] for name, info in manifest["source_files"].items()}
    files = tiny_llama.files()
    assert told == {name: hashlib.sha256(files[name]).hexdigest() for name in files if name.endswith(".safetensors")}
    assert {info["etag"] for info in read_manifest(str(tmp_path / "local/0/items"))["source_files"].values()} == {""}
    assert not verify("hf://org/m", str(tmp_path / "remote")).differences
    shown = "".join(capsys.readouterr()) + "".join(said)
    assert hub.token not in shown
    assert not any(hub.token.encode() in data for data in tree(tmp_path / "remote").values())


def test_from_the_hub_straight_into_a_bucket(hub, gcs, bucket, tmp_path, monkeypatch, capsys):
    """No copy of the weights on this machine: neither in the hub's cache nor in temporary files."""
    pytest.importorskip("gcsfs", reason="stock Orbax reads buckets with it")
    commit = hub.add("org/m", tiny_llama.files())
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    monkeypatch.setenv("HF_HOME", str(scratch / "hf"))
    places = ["--source", "hf://org/m", "--output", f"gs://{bucket}/out"]
    assert main(["convert", *places]) == 0
    largest = max((path.stat().st_size for path in scratch.rglob("*") if path.is_file()), default=0)
    assert largest < min(tensor.nbytes for tensor in tiny_llama.tensors().values() if tensor.ndim > 1)
    assert f"org/m@{commit}" in gcs.get(bucket, "out/0/items/tensorferry.manifest.json").decode()
    assert main(["verify", *places]) == 0
    assert main(["inspect", "hf://org/m"]) == 0
    assert "30 tensors, 31,824 bytes" in capsys.readouterr().out


def test_a_web_server_at_every_command(hub, tmp_path, capsys):
    commit = hub.add("org/m", tiny_llama.files())
    source = f"{hub.endpoint}/org/m/resolve/{commit}"
    places = ["--source", source, "--output", str(tmp_path / "out")]
    assert [main(args) for args in (["plan", *places[:2]], ["convert", *places], ["verify", *places])] == [0, 0, 0]
    assert main(["inspect", source]) == 0
    assert "30 tensors, 31,824 bytes" in capsys.readouterr().out


def test_a_branch_that_moves_during_the_run_does_not_matter(hub, tmp_path, monkeypatch):
    commit = hub.add("org/m", tiny_llama.files())
    real = hub_module.HubSource.place

    def moving(self, path):
        if path.endswith(".safetensors"):
            hub.add("org/m", tiny_llama.files(seed=1))
        return real(self, path)

    monkeypatch.setattr(hub_module.HubSource, "place", moving)
    convert(ConversionOptions("hf://org/m", target=PATIENT), OutputOptions(str(tmp_path / "o")), print)
    assert read_manifest(str(tmp_path / "o" / "0" / "items"))["source"] == f"hf://org/m@{commit}"
    assert not verify(f"hf://org/m@{commit}", str(tmp_path / "o")).differences


def test_another_commit_does_not_continue_a_run(hub, tmp_path):
    first = hub.add("org/m", tiny_llama.files())
    hub.fail("cdn GET .*00002", 403, times=9, after=1)
    options, output = ConversionOptions("hf://org/m", target=PATIENT), OutputOptions(str(tmp_path / "o"))
    with pytest.raises(FerryError, match=r"model-00002.*found permission denied"):
        convert(options, output, print)
    hub.faults.clear()
    # The same names and sizes, other values: the headers alone would not tell.
    hub.add("org/m", tiny_llama.files(seed=1))
    with pytest.raises(FerryError, match="found one of another plan"):
        convert(options, output, print)
    pinned = f"hf://org/m@{first}"
    convert(ConversionOptions(pinned, target=PATIENT), output, print)
    assert not verify(pinned, str(tmp_path / "o")).differences


def test_worker_processes_find_the_token_themselves(hub, tmp_path):
    hub.add("org/m", tiny_llama.files(), private=True)
    beam_args = ("--direct_running_mode=multi_processing", "--direct_num_workers=1")
    output = OutputOptions(str(tmp_path / "o"), beam_args=beam_args)
    convert(ConversionOptions("hf://org/m", target=PATIENT), output, print)
    assert not verify("hf://org/m", str(tmp_path / "o")).differences


def test_the_command_line_tells_a_refusal_in_one_sentence(hub, tmp_path, capsys):
    hub.add("org/secret", {"config.json": b"{}"}, private=True)
    assert main(["plan", "--source", "hf://org/none"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("tensorferry: hf://org/none@main: expected a model repository; found none")
    assert "Traceback" not in error
    assert error.count("\n") == 1


def test_help_and_planning_a_folder_do_not_import_the_hub(tmp_path):
    folder = tiny_llama.write(tmp_path / "source")
    code = (
        "import sys; from tensorferry.pipelines.convert.conversion_planning import *;"
        "plan_conversion(ConversionOptions(sys.argv[1]));"
        "print([name for name in ('huggingface_hub', 'obstore', 'apache_beam') if name in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    shown = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, env=env)
    assert shown.stdout.strip() == "[]", shown.stderr


def test_deepseek_v3_is_planned_within_15_seconds(hub):
    """91,991 tensors, one request for each of the 163 headers, several at once. The best of three, for the machine may
    be busy with other tests, and by the pace of an ordinary one; it takes six seconds of CPU, those of the server among
    them."""
    in_flight = InFlight()
    files = {name: in_flight.counted(content) for name, content in deepseek_headers.repository().items()}
    commit = hub.add_contents("deepseek-ai/DeepSeek-V3", files, "a" * 40)
    shards = sorted(name for name in files if name.endswith(".safetensors"))
    seconds: list[float] = []
    while len(seconds) < 3 and min(seconds, default=15.0) >= 15.0:
        hub.requests.clear()
        before, started = pace(time.perf_counter), time.perf_counter()
        conversion = plan_conversion(ConversionOptions("hf://deepseek-ai/DeepSeek-V3"))
        taken = time.perf_counter() - started
        seconds.append(taken / statistics.mean((before, pace(time.perf_counter))))
        assert not conversion.plan.problems
        assert len(conversion.checkpoint.tensors) == 91_991
        assert conversion.source.url == f"hf://deepseek-ai/DeepSeek-V3@{commit}"
        asked = sorted(one.path.split("/")[-1].split("?")[0] for one in hub.seen("cdn GET"))
        assert asked == shards, "not one header request for each of the 163 shards"
    assert len(shards) == 163
    assert in_flight.most >= 4
    assert min(seconds) < 15, seconds
