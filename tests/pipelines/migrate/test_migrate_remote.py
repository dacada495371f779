"""Migrating runs straight from the hub and from a web server: real servers over HTTP, and what goes wrong with them."""

import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hub_server import Hub, serve_hub
from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.cli.main import main
from tensorferry.pipelines.migrate import copy_work
from tensorferry.pipelines.migrate import step_reader as reader
from tensorferry.pipelines.storage import hub as hub_module
from tensorferry.pipelines.storage import remote_source, retries
from tensorferry.pipelines.storage.tree_store import Listed, open_tree
from test_migrate import migrate, outcomes
from test_migrate_runs import SLOWLY, started
from tunix_samples import unpack
from web_server import serve_web

PLAIN, OCDBT, GRAIN = "pathways_no_ocdbt", "sft_sgd", "distill_grain_iter"
STEPS = {PLAIN: f"{PLAIN}/checkpoints/2", OCDBT: f"{OCDBT}/checkpoints/2"}
# Of a new step these tell when it was made, and from where.
ABOUT = ("commit_success.txt", "_CHECKPOINT_METADATA", "tensorferry.manifest.json")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("remote"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve_hub() as hub:
        hub.lfs = re.compile(r".*/d/[^/]+|.*/\d+(\.\d+)*")
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_TOKEN", hub.token)
        remote_source.web_store.cache_clear()
        reader._tree.cache_clear()
        yield hub


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    asked: list[float] = []
    monkeypatch.setattr(retries, "sleep", asked.append)
    return asked


def files(folder: Path, *runs: str) -> dict[str, bytes]:
    found = [path for run in runs for path in sorted((folder / run).rglob("*")) if path.is_file()]
    return {f"some runs/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in found}


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run(source: str, output: Path, *args: str) -> tuple[int, dict[str, Any]]:
    told = output.with_name(f"{output.name}.json")
    code = main(["migrate", "--source", source, "--output", str(output), "--json", str(told), "--structural", *args])
    return code, json.loads(told.read_text()) if told.exists() else {}


def verify(source: str, output: Path, *args: str) -> int:
    return main(["verify", "--source", source, "--output", str(output), *args])


def manifest(output: Path, step: str) -> dict[str, Any]:
    return json.loads((output / step / "items" / ABOUT[2]).read_bytes())


@pytest.fixture(scope="module")
def here(samples: Path) -> Path:
    """The same runs migrated from this disk."""
    output = samples.parent / "here"
    args = [arg for name in (PLAIN, OCDBT, GRAIN) for arg in ("--include", name)]
    assert migrate(samples, output, "--structural", "--rng-impl", "keep", *args)[0] == 0
    return output


def same(here: Path, there: Mapping[str, bytes], *runs: str) -> bool:
    """Whether two outputs of runs are alike to the byte in all that does not tell of the source."""
    wanted = {name: data for name, data in tree(here).items() if name.startswith(runs)}
    assert wanted.keys() == there.keys()
    return all(there[name] == wanted[name] for name in wanted if not name.endswith(ABOUT))


def test_from_the_hub_as_from_this_disk(hub: Hub, samples: Path, here: Path, tmp_path: Path, capsys: Any) -> None:
    runs, there = (OCDBT, GRAIN), tmp_path / "there"
    commit = hub.add("org/tuned", files(samples, *runs), private=True)
    code, report = run("hf://org/tuned/some runs", there, "--rng-impl", "keep")
    assert (code, set(outcomes(report).values())) == (0, {"migrated"})
    assert same(here, tree(there), *runs)
    for step in (f"{name}/checkpoints/2" for name in runs):
        new, old = manifest(there, step), manifest(here, step)
        assert new["source"] == f"hf://org/tuned@{commit}/some runs/{step}"
        assert new.keys() == old.keys() | {"source_content"}
        assert {key for key in old if new[key] != old[key]} == {"source", "plan_digest"}
    assert verify("hf://org/tuned/some runs", there) == 0
    shown = "".join(capsys.readouterr())
    assert hub.token not in shown
    assert "127.0.0.1" not in shown
    assert not any(hub.token.encode() in data or b"127.0.0.1" in data for data in tree(tmp_path).values())
    assert {one.authorization for one in hub.seen("cdn")} == {""}
    assert len(hub.seen("api GET /api/models")) == 2, "more than the branch once by migrate and once by verify"


def test_trouble_on_the_way_does_not_show(
    hub: Hub, samples: Path, here: Path, tmp_path: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rate limits, a server that is down for a moment, bodies that break off, and addresses that expire."""
    monkeypatch.setattr(hub_module, "_TRUST_SECONDS", 0.0)
    hub.add("org/tuned", files(samples, PLAIN))
    for pattern in ("cdn GET .*wi_0", "cdn GET .*embedding", "api (GET|HEAD) /org/tuned/resolve"):
        for status in (429, 503, 0):
            hub.fail(pattern, status, times=2, after=1)
    real = copy_work.copy_item

    def late(*args: Any) -> Any:
        hub.signature = "s2"
        return real(*args)

    monkeypatch.setattr(copy_work, "copy_item", late)
    assert run("hf://org/tuned/some runs", tmp_path / "there", "--rng-impl", "keep")[0] == 0
    assert same(here, tree(tmp_path / "there"), PLAIN)
    assert len(waits) > 9
    assert hub.seen("cdn GET .*X-Sig=s2")


def test_a_lost_or_denied_file_refuses_its_step_alone(
    hub: Hub, samples: Path, tmp_path: Path, waits: list[float]
) -> None:
    found = files(samples, PLAIN, OCDBT, "sft_grad_accum")
    lost = next(name for name in found if f"{STEPS[OCDBT]}/model_params/d/" in name)
    hub.add("org/tuned", {name: data for name, data in found.items() if name != lost})
    hub.fail(f"cdn GET .*{PLAIN}.*embedding", 403, times=99)
    code, report = run("hf://org/tuned/some runs", tmp_path / "o")
    told = {step["run"]: (step["outcome"], step["reason"]) for step in report["steps"]}
    assert code == 4
    assert told[OCDBT][0] == told[PLAIN][0] == "refused"
    assert re.search(r"found something unreadable \(NOT_FOUND: .* of hf://org/tuned@.*/some%20runs/", told[OCDBT][1])
    assert "token_embedder.embedding" in told[PLAIN][1]
    assert re.search(r"found permission denied \(403\) \(some runs/.*\)\. Set HF_TOKEN", told[PLAIN][1])
    assert "This step is left out." in told[PLAIN][1]
    assert told["sft_grad_accum"][0] == "migrated"


def refusal(source: str, output: Path, capsys: Any) -> str:
    assert run(source, output)[0] == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert not output.exists()
    return told


def test_what_cannot_be_opened_is_one_sentence(
    hub: Hub, samples: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "o"
    hub.add("org/tuned", files(samples, OCDBT), private=True)
    assert "hf://org/none@main: expected a model repository; found none" in refusal("hf://org/none", output, capsys)
    told = refusal("hf://org/tuned@v9/some runs", output, capsys)
    assert "hf://org/tuned@v9: expected a revision of the repository; found no such revision" in told
    assert "expected a folder of runs; found no such folder" in refusal("hf://org/tuned/elsewhere", output, capsys)
    assert "expected hf://org/repo, hf://org/repo@revision or" in refusal("hf://org/tuned/../x", output, capsys)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    told = refusal("hf://org/tuned", output, capsys)
    assert "found no valid token (401). Set HF_TOKEN" in told
    assert "hf_wrong" not in told


def test_a_slash_in_a_revision(hub: Hub, samples: Path) -> None:
    found = files(samples, OCDBT)
    for spelt, revision in (("refs/pr/1", "refs/pr/1"), ("feature%2Fx", "feature/x"), ("v1", "v1")):
        commit = hub.add("org/tuned", {**found, "README.md": revision.encode()}, revision)
        opened = open_tree(f"hf://org/tuned@{spelt}/some runs/")
        assert opened.url == f"hf://org/tuned@{commit}/some runs"
        assert opened.list("") == Listed((OCDBT,), ())
        assert open_tree(f"hf://org/tuned@{spelt}").read("README.md") == revision.encode()
    with pytest.raises(FerryError, match="@v9: expected a revision"):
        open_tree("hf://org/tuned@v9/x")


@pytest.mark.slow
def test_a_branch_that_moves(
    hub: Hub, samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Of another commit nothing goes on, unless the step's files are the same."""
    old = files(samples, PLAIN, OCDBT)
    first = hub.add("org/tuned", old)
    real = copy_work.copy_item

    def failing(item: Any, *rest: Any) -> Any:
        if item.number == 0:
            real(item, *rest)
            raise RuntimeError("pulled the plug")
        return real(item, *rest)

    monkeypatch.setattr(copy_work, "copy_item", failing)
    source, output = "hf://org/tuned/some runs", tmp_path / "o"
    assert run(source, output)[0] == 1
    monkeypatch.setattr(copy_work, "copy_item", real)
    chunk = next(name for name in old if STEPS[PLAIN] in name and name.endswith("embedding.value/0.0"))
    hub.add("org/tuned", {**old, chunk: old[chunk][:-1] + bytes([old[chunk][-1] ^ 1])})
    code, report = run(source, output)
    told = {step["run"]: step for step in report["steps"]}
    assert (code, told[OCDBT]["outcome"]) == (4, "migrated")
    assert told[PLAIN]["outcome"] == "refused"
    assert "found one of another plan" in told[PLAIN]["reason"]
    code, report = run(f"hf://org/tuned@{first}/some runs", output)
    assert (code, sorted(outcomes(report).values())) == (0, ["migrated", "skipped"])
    assert manifest(output, STEPS[PLAIN])["source"].startswith(f"hf://org/tuned@{first}/")
    assert verify(f"hf://org/tuned@{first}/some runs", output) == 0
    capsys.readouterr()
    assert verify(source, output) == 3
    assert f"{STEPS[PLAIN]} source: expected files as migrated; found other bytes" in capsys.readouterr().err
    assert run(source, output)[0] == 4


def test_inspect_reads_items_there(hub: Hub, samples: Path, capsys: Any) -> None:
    hub.add("org/tuned", files(samples, PLAIN))
    step = f"hf://org/tuned/some runs/{STEPS[PLAIN]}"
    assert main(["inspect", f"{step}/model_params"]) == 0
    there = capsys.readouterr().out
    assert main(["inspect", str(samples / STEPS[PLAIN] / "model_params")]) == 0
    here = capsys.readouterr().out
    assert there.replace(f"{step}/model_params", "X") == here.replace(f"{samples}/{STEPS[PLAIN]}/model_params", "X")
    assert main(["inspect", step]) == 1
    assert f"is a step with model_params and optimizer_state: give one of them, such as {step}/model_params" in (
        capsys.readouterr().err
    )
    assert main(["inspect", "hf://org/tuned/some runs"]) == 1
    assert f"expected an Orbax item with _METADATA; found {PLAIN}/" in capsys.readouterr().err


@pytest.mark.parametrize("name", [OCDBT, pytest.param(PLAIN, marks=pytest.mark.slow)])
def test_from_a_web_server_as_from_this_disk(
    name: str, samples: Path, here: Path, tmp_path: Path, waits: list[float]
) -> None:
    there, served = tmp_path / "there", tmp_path / "served"
    served.mkdir()
    (served / name).symlink_to(samples / name)
    with serve_web(served, "nginx") as web:
        for status in (429, 503, 0):
            web.fail("GET .*(/d/|wi_0)", status, times=2, after=1)
        assert run(f"{web.url}/", there, "--dry-run")[0] == 0
        assert not there.exists()
        assert run(f"{web.url}/", there, "--rng-impl", "keep")[0] == 0
        assert same(here, tree(there), name)
        assert manifest(there, STEPS[name])["source"] == f"{web.url}/{STEPS[name]}"
        assert verify(web.url, there) == 0
        assert main(["inspect", f"{web.url}/{STEPS[name]}/model_params"]) == 0
        assert run(f"{web.url}/{STEPS[name]}", tmp_path / "o")[0] == 1
    assert waits


def test_a_server_that_does_not_list_is_one_sentence(samples: Path, tmp_path: Path, capsys: Any) -> None:
    with serve_web(samples, "none") as web:
        assert "expected a page that lists the folder's files and folders" in refusal(web.url, tmp_path / "o", capsys)


@pytest.mark.slow
def test_killed_it_goes_on_with_the_rest(
    hub: Hub, samples: Path, here: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    runs, there = (PLAIN, OCDBT, GRAIN), tmp_path / "there"
    hub.add("org/tuned", files(samples, *runs))
    places = ("--source", "hf://org/tuned/some runs", "--output", str(there))
    args = ("migrate", *places, "--structural", "--rng-impl", "keep")
    process = started(SLOWLY, *args, "--direct_num_workers", "1")
    deadline = time.monotonic() + 60
    while not (receipts := list(there.glob("*/checkpoints/.tensorferry-*/receipts/*.json"))):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert len(receipts) < len(runs)
    assert main(args) == 0
    assert f"resuming: {len(receipts)} work items" in capsys.readouterr().out
    assert same(here, tree(there), *runs)


@pytest.mark.slow
def test_worker_processes_have_relays_and_tokens_of_their_own(
    hub: Hub, samples: Path, here: Path, tmp_path: Path
) -> None:
    hub.add("org/tuned", files(samples, PLAIN, OCDBT), private=True)
    workers = ("--direct_running_mode", "multi_processing", "--direct_num_workers", "2")
    assert run("hf://org/tuned/some runs", tmp_path / "there", "--rng-impl", "keep", *workers)[0] == 0
    assert same(here, tree(tmp_path / "there"), PLAIN, OCDBT)


@pytest.mark.slow
def test_from_the_hub_straight_into_a_bucket(
    hub: Hub, gcs: Any, bucket: str, samples: Path, here: Path, tmp_path: Path
) -> None:
    commit = hub.add("org/tuned", files(samples, PLAIN, OCDBT))
    places = ["--source", "hf://org/tuned/some runs", "--output", f"gs://{bucket}/new"]
    assert main(["migrate", *places, "--structural", "--rng-impl", "keep"]) == 0
    assert same(here, gcs.tree(bucket, "new/"), PLAIN, OCDBT)
    told = gcs.get(bucket, f"new/{STEPS[OCDBT]}/items/tensorferry.manifest.json").decode()
    assert f"hf://org/tuned@{commit}/some runs/{STEPS[OCDBT]}" in told
    assert main(["verify", *places]) == 0
