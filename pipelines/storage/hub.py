"""Model repositories of the Hugging Face hub: a revision becomes a commit once, and weights come by ranges."""

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote, unquote

from tensorferry.mappings.words.problems import FerryError, Problem
from tensorferry.pipelines.storage.byte_source import MissingFileError, SourceError, is_inside
from tensorferry.pipelines.storage.remote_faults import is_passing
from tensorferry.pipelines.storage.remote_source import Place, RangedSource, web_store
from tensorferry.pipelines.storage.retries import PassingFault, retried

T = TypeVar("T")

_URL = re.compile(r"hf://(?P<repo>[^/@\s]+(?:/[^/@\s]+)?)(?:@(?P<revision>[^\s]+))?/?")
# Of a folder, where a slash ends the revision; those of pull requests have two of their own.
_FOLDER_URL = re.compile(
    r"hf://(?P<repo>[^/@\s]+(?:/[^/@\s]+)?)(?:@(?P<revision>refs/(?:pr|convert)/[^/\s]+|[^/\s]+))?(?P<folder>/.*)?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHARD = re.compile(r".+\.(?:safetensors|bin)")
# A signed address is good for an hour or so; younger ones are not suspected when they are refused.
_TRUST_SECONDS = 60.0
_TIMEOUT_SECONDS = 30.0
_SHA256_DIGITS = 64
_LOG_IN = "Set HF_TOKEN or run `hf auth login` with an account that may read it, or correct the name."


@dataclass(frozen=True)
class HubSource(RangedSource):
    """One commit of a model repository. Holds no token: every process looks it up for itself.

    Attributes:
      repo: ``org/name``.
      commit: 40 hexadecimal digits.
      endpoint: address of the hub.
    """

    repo: str
    commit: str
    endpoint: str
    refused: ClassVar[dict[int, str]] = {401: _LOG_IN, 403: _LOG_IN, 404: "Correct the name or the revision."}

    @property
    def url(self) -> str:
        return f"hf://{self.repo}@{self.commit}"

    def list(self) -> dict[str, int]:
        return {name: size for name, (size, _) in self._files.items() if "/" not in name}

    def folders(self) -> tuple[str, ...]:
        return tuple(sorted({name.split("/", 1)[0] for name in self._files if "/" in name}))

    def files_in(self, folder: str) -> dict[str, int]:
        """Files directly in a folder of the root: path relative to the root, to size in bytes."""
        return {name: size for name, size in self.sizes().items() if name.rpartition("/")[0] == folder}

    def sizes(self) -> dict[str, int]:
        """Every file at any depth: path to size in bytes."""
        return {name: size for name, (size, _) in self._files.items()}

    def size(self, path: str) -> int:
        return self._files[path][0] if path in self._files else super().size(path)

    def is_listed(self, path: str) -> bool:
        return path in self._files

    def revision(self) -> str:
        return self.commit

    def etags(self) -> dict[str, str]:
        return {name: etag for name, (_, etag) in self._files.items()}

    def place(self, path: str) -> Place:
        folder = f"{self.endpoint}/{self.repo}/resolve/{self.commit}"
        if not (_SHARD.fullmatch(path) or self._is_elsewhere(path)):
            return Place(web_store(folder, token_for=self.endpoint), path)
        # Asking the hub where a shard lies counts against its rate limit, so it is asked once and not for each
        # of a shard's thousand ranges.
        location = _locations.find(f"{folder}/{quote(path)}", self.endpoint)
        address, _, query = location.partition("?")
        folder, _, name = address.rpartition("/")
        own = location.startswith(f"{self.endpoint}/")
        store = web_store(f"{folder}?{query}" if query else folder, token_for=self.endpoint if own else "")
        return Place(store, unquote(name))

    def has_expired(self, path: str, status: int | None) -> bool:
        return _locations.forget_old(f"{self.endpoint}/{self.repo}/resolve/{self.commit}/{quote(path)}")

    def _is_elsewhere(self, path: str) -> bool:
        """Whether git LFS holds a file, as far as is known: its etag is then a SHA-256."""
        known = _known_files.get((self.endpoint, self.repo, self.commit), {})
        return len(known.get(path, (0, ""))[1]) == _SHA256_DIGITS

    @property
    def _files(self) -> "Files":
        return _files(self.endpoint, self.repo, self.commit)


def open_hub(url: str) -> HubSource:
    """The source for ``hf://org/repo[@revision]``. Asks the hub for the commit unless the revision is one.

    Raises:
      FerryError: the URL is malformed, or the hub has no such repository or revision, or does not show it.
    """
    match = _URL.fullmatch(url)
    if match is None:
        raise FerryError(f"{url}: expected hf://org/repo or hf://org/repo@revision. Folders inside a repository "
                         "cannot be given.")  # fmt: skip
    return _open(match["repo"], match["revision"] or "main")


def open_hub_folder(url: str) -> tuple[HubSource, str]:
    """The source and the folder in it for ``hf://org/repo[@revision][/folder]``; the folder is empty for all of it.

    Raises:
      FerryError: as `open_hub`.
    """
    match = _FOLDER_URL.fullmatch(url)
    folder = (match["folder"] or "").strip("/") if match else ""
    if match is None or (folder and not is_inside(folder)):
        raise FerryError(f"{url}: expected hf://org/repo, hf://org/repo@revision or one of these and /folder. A slash "
                         "in the name of a branch is written %2F.")  # fmt: skip
    return _open(match["repo"], unquote(match["revision"] or "main")), folder


def _open(repo: str, revision: str) -> HubSource:
    endpoint = hub_endpoint()
    return HubSource(repo, revision if _COMMIT.fullmatch(revision) else _commit_of(endpoint, repo, revision), endpoint)


def hub_endpoint() -> str:
    """Address of the hub: ``HF_ENDPOINT``, or the public one."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def authorization() -> dict[str, str]:
    """The header that carries the user's token, from ``HF_TOKEN`` or the login of ``huggingface_hub``; or none."""
    from huggingface_hub import get_token

    token = get_token()
    return {"authorization": f"Bearer {token}"} if token else {}


# Path to size in bytes and etag.
Files = Mapping[str, tuple[int, str]]
# What a commit holds never changes, so it is asked for once.
_known_files: dict[tuple[str, str, str], Files] = {}


def _files(endpoint: str, repo: str, commit: str) -> Files:
    """Every file of a commit with its size in bytes and its etag."""
    if (endpoint, repo, commit) not in _known_files:
        _commit_of(endpoint, repo, commit)
    return _known_files[endpoint, repo, commit]


def _commit_of(endpoint: str, repo: str, revision: str) -> str:
    """The commit of a branch, tag or commit; its files are known afterwards."""
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint)
    try:
        info = retried(lambda: _asked(repo, revision, lambda: api.model_info(
            repo, revision=revision, files_metadata=True, timeout=_TIMEOUT_SECONDS)))  # fmt: skip
    except PassingFault as fault:
        again = "Run the same command again when it answers."
        problem = Problem(f"hf://{repo}", f"an answer from {endpoint}", f"{fault.found}, again and again", again)
        raise SourceError(problem) from None
    commit = str(info.sha)
    _known_files[endpoint, repo, commit] = {
        file.rfilename: (file.size or 0, _etag(file)) for file in info.siblings or ()
    }
    return commit


def _etag(file: Any) -> str:
    """SHA-256 of a file's content where git LFS holds it, else git's own name of it."""
    return str(file.lfs.sha256) if file.lfs else str(file.blob_id or "")


def _asked(repo: str, revision: str, call: Callable[[], T]) -> T:
    """A call to the hub's API, its faults as passing ones or sentences."""
    from huggingface_hub import errors

    name = f"hf://{repo}@{revision}" if revision else repo
    try:
        return call()
    except errors.GatedRepoError:
        fix = f"Accept its terms at {hub_endpoint()}/{repo}, then set HF_TOKEN or run `hf auth login`."
        raise SourceError(Problem(name, "a repository that this account may read", "a gated one", fix)) from None
    except errors.RepositoryNotFoundError:
        found = "none (it does not exist, or is private)"
        raise SourceError(Problem(name, "a model repository", found, _LOG_IN)) from None
    except errors.RemoteEntryNotFoundError:
        problem = Problem(name, "a file of the repository", "no such file", "Correct the name.")
        raise MissingFileError(problem) from None
    except errors.RevisionNotFoundError:
        fix = "Give a branch, a tag or a commit of it."
        raise SourceError(Problem(name, "a revision of the repository", "no such revision", fix)) from None
    except errors.HFValidationError:
        raise SourceError(Problem(name, "the name of a repository: org/name", repo, "Correct it.")) from None
    except errors.OfflineModeIsEnabled:
        problem = Problem(name, "the hub within reach", "HF_HUB_OFFLINE set", "Unset it, or give a local folder.")
        raise SourceError(problem) from None
    except errors.HfHubHTTPError as error:
        raise _http_fault(name, error.response) from None
    except (errors.HTTPError, OSError):  # pyright: ignore[reportPrivateImportUsage]
        raise PassingFault("no answer (connection refused, cut or timed out)") from None


def _http_fault(name: str, response: Any) -> Exception:
    status = getattr(response, "status_code", None)
    if is_passing(status):
        return PassingFault(f"status {status}" if status else "no answer", rate_limited=status == 429)
    refused = {401: "no valid token (401)", 403: "permission denied (403)"}
    found = refused.get(status or 0, f"status {status}")
    return SourceError(Problem(name, "a repository that this account may read", found, _LOG_IN))


def _location(address: str, endpoint: str) -> str:
    """Where the hub sends those who ask for a file; its own address for a file that it holds itself."""
    from huggingface_hub import get_hf_file_metadata, get_token

    name = unquote(address.rpartition("/")[2])
    metadata = _asked(name, "", lambda: get_hf_file_metadata(
        address, token=get_token() or False, timeout=_TIMEOUT_SECONDS, endpoint=endpoint))  # fmt: skip
    return metadata.location


class _Locations:
    """Where shards really lie, as the hub said; of this process only."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, float]] = {}

    def find(self, address: str, endpoint: str) -> str:
        """The address that a shard's address leads to."""
        if address not in self._known:
            self._known[address] = (_location(address, endpoint), time.monotonic())
        return self._known[address][0]

    def forget_old(self, address: str) -> bool:
        """Forgets a location that may have expired; whether it was one."""
        location, since = self._known.get(address, ("", 0.0))
        if not location or time.monotonic() - since < _TRUST_SECONDS:
            return False
        self._known.pop(address, None)
        return True


_locations = _Locations()
