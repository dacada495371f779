"""The relay between TensorStore and a source: ranges, memory, faults as the source tells them, forks and proxies."""

import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tensorstore as ts
from hub_server import serve_hub
from tensorferry.pipelines.storage import relay, remote_source, retries
from tensorferry.pipelines.storage.byte_budget import ByteBudget
from tensorferry.pipelines.storage.hub import open_hub
from tensorferry.pipelines.storage.kvstores import store_words
from tensorferry.pipelines.storage.relay import relay_url, relayed_problem
from tensorferry.pipelines.storage.web_source import open_web
from web_server import serve_web

DATA = bytes(range(251)) * 31


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(retries, "sleep", lambda _: None)
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "a").write_bytes(DATA)
    (tmp_path / "f" / "none").write_bytes(b"")
    with serve_web(tmp_path) as web:
        yield web


def store(web: Any) -> ts.KvStore:
    return ts.KvStore.open(relay_url(open_web(web.url), "f")).result()


def get(url: str, **headers: str) -> Any:
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers))


def test_whole_files_and_ranges(web: Any) -> None:
    url = f"{relay_url(open_web(web.url), 'f')}a"
    for span, wanted in (("0-0", DATA[:1]), ("5-700", DATA[5:701]), ("7000-", DATA[7000:]), ("-9", DATA[-9:])):
        answer = get(url, Range=f"bytes={span}")
        assert (answer.status, answer.read()) == (206, wanted)
        start = len(DATA) - 9 if span[0] == "-" else int(span.split("-")[0])
        assert answer.headers["Content-Range"].startswith(f"bytes {start}-{start + len(wanted) - 1}/")
    assert get(url).read() == DATA
    assert store(web).read("a").result().value == DATA
    assert store(web).read("none").result().value == b""
    assert store(web).read("other").result().state == "missing"


def test_large_files_come_in_windows_within_the_room(web: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    room = ByteBudget(2000)
    monkeypatch.setattr(remote_source, "PIECE_BYTES", 300)
    monkeypatch.setattr(relay, "WINDOW_BYTES", 1000)
    opened = store(web)
    assert relay._relay
    monkeypatch.setattr(relay._relay, "room", room)
    reads = [opened.read("a") for _ in range(7)]
    assert all(read.result().value == DATA for read in reads)
    assert (room.peak_bytes, room.used_bytes) == (2000, 0)
    # The first window may be shared by those who ask for it at the same time.
    assert len([one for one in web.requests if one == "GET /f/a"]) <= 7 * (7 * 4 + 3)


def test_what_is_known_is_not_asked_for_again(web: Any) -> None:
    opened = store(web)
    assert opened.read("a").result().value == DATA
    asked = len(web.requests)
    url = f"{relay_url(open_web(web.url), 'f')}a"
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(url, **{"If-None-Match": get(url, Range="bytes=0-4").headers["ETag"]})
    assert caught.value.code == 304
    assert len(web.requests) == asked + 1


def test_who_asks_again_meanwhile_shares_the_answer(web: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorStore asks again after a minute, when the source may be waiting still."""
    monkeypatch.setattr(retries, "sleep", lambda _: time.sleep(0.2))
    web.fail("GET /f/a", 429, times=3)
    url = f"{relay_url(open_web(web.url), 'f')}a"
    with ThreadPoolExecutor(5) as pool:
        assert set(pool.map(lambda _: get(url, Range="bytes=3-700").read(), range(5))) == {DATA[3:701]}
    assert len(web.requests) == 4


def test_nobody_else_reads_from_it(web: Any) -> None:
    url = relay_url(open_web(web.url), "f")
    host, secret = re.fullmatch(r"(http://127\.0\.0\.1:\d+)/([\w-]{20,})/\d+/f/", url).groups()  # pyright: ignore
    for other in (f"{host}/f/a", f"{host}/{secret[:-1]}/0/f/a", f"{host}/"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(other)


def failure(reading: Any) -> Exception:
    with pytest.raises(Exception) as caught:
        reading.result(timeout=30)
    return caught.value


def test_a_refusal_is_the_sources_own_sentence(web: Any) -> None:
    web.fail("GET /f/a", 403)
    error = failure(store(web).read("a"))
    assert store_words(error) == "permission denied (403) (f/a)"
    problem = relayed_problem(error)
    assert problem
    assert "copy the checkpoint to a bucket" in problem.fix


def test_a_fault_that_stays_is_told_and_not_tried_for_ever(web: Any) -> None:
    web.fail("GET /f/a", 503, times=99)
    assert store_words(failure(store(web).read("a"))) == "503 Service Unavailable, again and again (f/a)"
    assert len([one for one in web.requests if one == "GET /f/a"]) == retries.TRIES


def test_faults_that_pass_are_not_seen(web: Any) -> None:
    for status in (429, 503, 0):
        web.fail("GET /f/a", status, times=2)
    assert store(web).read("a").result().value == DATA


def test_a_fault_in_the_middle_of_an_answer(web: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer has begun, so TensorStore asks again, and is told then."""
    monkeypatch.setattr(relay, "WINDOW_BYTES", 1000)
    web.fail("GET /f/a", 403, after=3)
    assert store_words(failure(store(web).read("a"))) == "permission denied (403) (f/a)"
    assert store(web).read("a").result().value == DATA


def test_what_a_commit_holds_is_never_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a missing chunk it would read as zeros."""
    with serve_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_TOKEN", hub.token)
        remote_source.web_store.cache_clear()
        hub.add("org/m", {"f/a": DATA})
        opened = ts.KvStore.open(relay_url(open_hub("hf://org/m"), "f")).result()
        hub.fail("api GET .*/f/a", 404)
        assert store_words(failure(opened.read("a"))) == "no such file (404) (f/a)"
        asked = len(hub.requests)
        assert opened.read("other").result().state == "missing"
        assert len(hub.requests) == asked


def script(code: str, *args: str, **env: str) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env}
    command = [sys.executable, "-c", code, *args]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


FORK = """
import os, sys, urllib.request
from tensorferry.pipelines.storage.relay import relay_url
from tensorferry.pipelines.storage.web_source import open_web
def url():
    return relay_url(open_web(sys.argv[1]), "f")
first = url()
child = os.fork()
if not child:
    # obstore, once used, does not survive a fork; here nobody has used it before.
    os._exit(0 if url() != first and len(urllib.request.urlopen(url() + "a").read()) == int(sys.argv[2]) else 1)
assert os.waitpid(child, 0)[1] == 0
assert url() == first
print(len(urllib.request.urlopen(first + "a").read()))
"""


def test_a_forked_process_has_a_relay_of_its_own(web: Any) -> None:
    assert script(FORK, web.url, str(len(DATA))).strip() == str(len(DATA))


PROXY = """
import sys, tensorstore as ts
from tensorferry.pipelines.storage.relay import relay_url
from tensorferry.pipelines.storage.web_source import open_web
print(len(ts.KvStore.open(relay_url(open_web(sys.argv[1]), "f")).result().read("a").result().value))
"""


def test_a_proxy_is_not_asked_for_this_machine(web: Any) -> None:
    assert script(PROXY, web.url, http_proxy="http://127.0.0.1:9", NO_PROXY="x.example").strip() == str(len(DATA))
