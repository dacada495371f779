"""What went wrong with a request to an object store or web server: a passing fault, or a sentence."""

import re

from tensorferry.mappings.words.problems import Problem
from tensorferry.pipelines.storage.byte_source import MissingFileError, SourceError
from tensorferry.pipelines.storage.retries import PassingFault

_STATUS = re.compile(r"status code: (\d{3})([^:\n]*)")
_AGAIN = "Run the same command again when it answers: what is finished stays finished."
_NAMES = {429: "429 Too Many Requests", 500: "500 Internal Server Error", 503: "503 Service Unavailable"}


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error of obstore tells of, or None when there was no answer at all."""
    if isinstance(error, FileNotFoundError):
        return 404
    match = _STATUS.search(str(error))
    return int(match[1]) if match else None


def is_passing(status: int | None) -> bool:
    """Whether the same request may succeed a little later."""
    return status is None or status in (408, 425, 429) or status >= 500


def passing(error: BaseException) -> PassingFault:
    """The passing fault that an error of obstore stands for."""
    status = status_of(error)
    # Never the error's own text: it holds the address, and that of a signed link is a secret.
    return PassingFault(status_words(status), rate_limited=status == 429)


def status_words(status: int | None) -> str:
    """What an HTTP status means; None is no answer at all."""
    return _NAMES.get(status, f"status {status}") if status else "no answer (connection refused, cut or timed out)"


def final_fault(url: str, path: str, status: int | None, refused: dict[int, str]) -> SourceError:
    """The sentence for a request that was refused for good.

    Args:
      url: the source's root.
      path: what was asked for.
      status: the HTTP status.
      refused: what to do about 401, 403 and 404 at this kind of source.
    """
    name, wanted = path or url, f"a readable file in {url}" if path else "a readable folder"
    if status == 404:
        return MissingFileError(Problem(name, wanted, "no such file (404)", refused[404]))
    if status == 401:
        return SourceError(Problem(name, wanted, "no valid credentials (401)", refused[401]))
    if status == 403:
        return SourceError(Problem(name, wanted, "permission denied (403)", refused[403]))
    if status == 416:
        found = "a file that ends before it (416)"
        return SourceError(Problem(name, "the bytes that its header promised", found, "Upload this file again."))
    return SourceError(Problem(name, wanted, f"status {status}", _AGAIN))


def no_ranges(url: str, path: str) -> SourceError:
    """The sentence for a server that only sends whole files."""
    fix = "Copy the checkpoint to a bucket or a local folder and give that."
    return SourceError(Problem(path, f"a server that answers range requests at {url}", "whole files only", fix))


def given_up(url: str, path: str, fault: PassingFault) -> SourceError:
    """The sentence for a fault that did not pass."""
    return SourceError(Problem(path or url, f"an answer from {url}", f"{fault.found}, again and again", _AGAIN))
