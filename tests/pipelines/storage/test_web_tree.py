"""Folders of a web server, as its pages list them: other servers' habits, odd names, and servers that do not list."""

from pathlib import Path

import pytest
import tensorstore as ts
from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.orbax.step_discovery import discover
from tensorferry.pipelines.storage import retries
from tensorferry.pipelines.storage.tree_store import Listed, LocalTree, open_tree
from web_server import serve_web

NAMES = ("a b", "run #1", "50%", "x?y", "ü+,;=&'~", "%2C", 'q"<>')


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three levels of names, each with something that needs an escape somewhere."""
    root = tmp_path_factory.mktemp("web")
    for number, name in enumerate(NAMES):
        inner = root / name / f"in {name}"
        inner.mkdir(parents=True)
        (inner / f"{name}.bin").write_bytes(bytes(range(number + 1)))
        (inner / ".zarray").write_text("{}")
        (root / name / "_file").write_text(name)
    (root / "empty").mkdir()
    return root


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    asked: list[float] = []
    monkeypatch.setattr(retries, "sleep", asked.append)
    return asked


@pytest.mark.parametrize("style", ["python", "nginx", "apache", "caddy", "caddy-absolute"])
def test_it_lists_what_a_local_tree_lists(folder: Path, style: str) -> None:
    with serve_web(folder, style) as web:
        found, wanted = open_tree(web.url), LocalTree(str(folder))
        assert found.list("") == wanted.list("")
        assert found.list("empty") == Listed((), ())
        for name in NAMES:
            assert found.list(name) == wanted.list(name)
            assert found.sizes(name) == wanted.sizes(name)
            path = f"{name}/in {name}/{name}.bin"
            assert found.read(path) == wanted.read(path)
        assert open_tree(f"{web.url}/a%20b/").list("") == wanted.list("a b")
        assert not any("?C=" in request or "elsewhere" in request for request in web.requests)


def test_tensorstore_reads_odd_names_through_the_relay(folder: Path) -> None:
    with serve_web(folder) as web:
        tree = open_tree(web.url)
        for name in NAMES:
            store = ts.KvStore.open(tree.kvstore_url(f"{name}/in {name}")).result()
            assert (
                store.read(f"{name}.bin").result().value == (folder / name / f"in {name}" / f"{name}.bin").read_bytes()
            )
            assert store.read("none").result().state == "missing"


def test_what_is_not_there(folder: Path) -> None:
    with serve_web(folder) as web:
        with pytest.raises(FileNotFoundError):
            open_tree(web.url).list("none")
        with pytest.raises(FileNotFoundError):
            open_tree(web.url).read("none")


def refusal(url: str) -> str:
    with pytest.raises(FerryError) as caught:
        discover(open_tree(url))
    return str(caught.value)


def test_a_server_that_does_not_list_is_a_sentence(folder: Path) -> None:
    with serve_web(folder, "none") as web:
        told = refusal(f"{web.url}/a%20b")
        assert f"{web.url}/a%20b/: expected a page that lists the folder's files and folders; found status 403" in told
        assert "nginx: autoindex on" in told
        assert "copy the runs to a bucket" in told


def test_a_page_of_another_kind_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<html><a href='../'>up</a><a href='https://other.example/x'>x</a></html>")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "x").touch()
    with serve_web(tmp_path) as web:
        assert "found a page without links to anything in it" in refusal(web.url)
        assert "found something that is no page" in refusal(f"{web.url}/sub/x")
        assert "found status 404" in refusal(f"{web.url}/none")


@pytest.mark.parametrize("status", [429, 503])
def test_faults_that_pass(folder: Path, status: int, waits: list[float]) -> None:
    with serve_web(folder) as web:
        web.fail("GET /a b/", status, times=3)
        assert open_tree(web.url).list("a b") == LocalTree(str(folder)).list("a b")
    assert len(waits) == 3


def test_a_fault_that_stays(folder: Path, waits: list[float]) -> None:
    with serve_web(folder) as web:
        web.fail("GET /", 500, times=99)
        assert "found status 500, again and again" in refusal(web.url)
    assert len(waits) == retries.TRIES - 1


def test_addresses_that_are_none(folder: Path) -> None:
    assert "found one with a query" in refusal("https://host/runs?x=1")
    told = refusal("https://me:secret@host/runs")
    assert "host: expected an address without a login" in told
    assert "secret" not in told
