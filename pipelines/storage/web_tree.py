"""Folders of a web server that shows what lies in them: the pages of Apache, nginx, Caddy or Python's own server."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from html.parser import HTMLParser
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit

from tensorferry.mappings.words.problems import Problem
from tensorferry.pipelines.storage.byte_source import SourceError
from tensorferry.pipelines.storage.remote_faults import final_fault, given_up, is_passing
from tensorferry.pipelines.storage.remote_source import at_once
from tensorferry.pipelines.storage.remote_tree import RemoteTree, os_errors
from tensorferry.pipelines.storage.retries import PassingFault, retried
from tensorferry.pipelines.storage.tree_store import Listed
from tensorferry.pipelines.storage.web_source import WebSource, open_web

_TIMEOUT_SECONDS = 60.0
_LISTING = "a page that lists the folder's files and folders"
# nginx lists no names that begin with a dot, nor does Apache as Debian sets it up; Orbax's only one is asked for.
_HIDDEN = ".zarray"
_KEPT = "%/:?#[]@!$&'()*+,;=~"
_FIX = (
    "Give a server that lists its folders (nginx: autoindex on; Apache: Options +Indexes; Caddy: file_server browse), "
    "or copy the runs to a bucket and give that."
)


@dataclass(frozen=True)
class WebTree(RemoteTree):
    """A folder of a web server; the source's root is the tree's."""

    source: WebSource
    _known: dict[str, dict[str, int]] = field(default_factory=dict, compare=False, repr=False)
    _lock: Any = field(default_factory=threading.Lock, compare=False, repr=False)

    def list(self, folder: str) -> Listed:
        with os_errors(folder):
            return self._listed(folder)

    def sizes(self, folder: str) -> dict[str, int]:
        with self._lock:
            if folder not in self._known:
                with os_errors(folder):
                    self._known[folder] = self._sizes(folder)
            return dict(self._known[folder])

    def _listed(self, folder: str) -> Listed:
        address, page = _page(self.source, folder)
        names = set(page.names())
        # An empty folder is none of runs: a page without links is rather one of another kind.
        if not page.is_html or not (folder or names):
            found = "a page without links to anything in it" if page.is_html else "something that is no page"
            raise SourceError(Problem(address, _LISTING, found, _FIX))
        folders = tuple(sorted(name.rstrip("/") for name in names if name.endswith("/")))
        return Listed(folders, tuple(sorted(name for name in names if not name.endswith("/"))))

    def _sizes(self, folder: str) -> dict[str, int]:
        files: list[str] = []
        hidden: list[str] = []
        waiting = [""]
        while waiting:
            listings = at_once(lambda path: self._listed(_join(folder, path)), waiting)
            found = list(zip(waiting, listings, strict=True))
            files += [_join(path, name) for path, listed in found for name in listed.files]
            hidden += [_join(path, _HIDDEN) for path, listed in found if _may_hide(listed)]
            waiting = [_join(path, name) for path, listed in found for name in listed.folders]
        sizes = dict(zip(files, at_once(lambda file: self.source.size(_join(folder, file)), files), strict=True))
        there = self.source.sizes(_join(folder, file) for file in hidden)
        return sizes | {file: there[_join(folder, file)] for file in hidden if _join(folder, file) in there}


def open_web_tree(url: str) -> WebTree:
    """The folders below an address.

    Raises:
      FerryError: the address has a query or a password.
    """
    return WebTree(open_web(url))


class _Page(HTMLParser):
    """What a page links to.

    Attributes:
      is_html: whether it is a page at all.
      links: the addresses, as they are spelt.
    """

    def __init__(self, address: str, text: str, is_html: bool) -> None:
        super().__init__()
        self.address, self.is_html = address, is_html
        self.links: list[str] = []
        if is_html:
            self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        target = next((value for name, value in attrs if name == "href" and value), None)
        if tag == "a" and target is not None:
            self.links.append(target)

    def names(self) -> Iterator[str]:
        """Names directly below the page; those of folders end in a slash."""
        here = urlsplit(self.address)
        prefix = unquote(here.path)
        for link in self.links:
            try:
                there = urlsplit(urljoin(self.address, link))
            except ValueError:
                continue
            # Links with a query sort the page anew; names have theirs escaped.
            foreign = (there.scheme, there.netloc) != (here.scheme, here.netloc) or there.query
            name = unquote(there.path).removeprefix(prefix)
            below = unquote(there.path).startswith(prefix) and name.rstrip("/") not in ("", ".", "..")
            if below and not foreign and "/" not in name.removesuffix("/"):
                yield name


def _page(source: WebSource, folder: str) -> tuple[str, _Page]:
    """The page of a folder, and its address."""
    address = source.url + (f"{quote(folder)}/" if folder else "")
    try:
        return address, retried(partial(_fetch, source, folder, address))
    except PassingFault as fault:
        raise given_up(source.url, address, fault) from None


def _fetch(source: WebSource, folder: str, address: str) -> _Page:
    # Not obstore: it drops the last slash, and refuses pages whose length the server does not tell beforehand.
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import urlopen

    try:
        with urlopen(quote(address, safe=_KEPT), timeout=_TIMEOUT_SECONDS) as answer:
            is_html = answer.headers.get_content_type() in ("text/html", "application/xhtml+xml")
            charset = answer.headers.get_content_charset() or "utf-8"
            return _Page(answer.url, answer.read().decode(charset, "replace") if is_html else "", is_html)
    except HTTPError as error:
        if is_passing(error.code):
            raise PassingFault(f"status {error.code}", rate_limited=error.code == 429) from None
        # How servers say that they do not list; below the root, 404 means that there is no such folder.
        if error.code == 403 or (error.code == 404 and not folder):
            raise SourceError(Problem(address, _LISTING, f"status {error.code}", _FIX)) from None
        raise final_fault(source.url, address, error.code, source.refused) from None
    except (OSError, HTTPException):
        raise PassingFault("no answer (connection refused, cut or timed out)") from None


def _may_hide(listed: Listed) -> bool:
    return bool(listed.files) and not any(name.startswith(".") for name in listed.files)


def _join(folder: str, name: str) -> str:
    return "/".join(filter(None, (folder, name)))
