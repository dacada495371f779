"""Folders of web servers that answer range requests."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar
from urllib.parse import urlsplit

from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.storage.byte_source import MissingFileError, is_inside
from tensorferry.pipelines.storage.remote_source import Place, RangedSource, at_once, web_store

_INDEX = "model.safetensors.index.json"
# What a checkpoint may consist of, for servers that cannot list.
_KNOWN_FILES = (
    "config.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "model.safetensors",
    _INDEX,
)


@dataclass(frozen=True)
class WebSource(RangedSource):
    """A folder of a web server that answers range requests. It cannot list, so the index names the shards.

    Attributes:
      root: ``https://host/path/``.
    """

    root: str
    refused: ClassVar[dict[int, str]] = {
        401: "The server asks for a login, which is not supported: copy the checkpoint to a bucket and give that.",
        403: "The server does not let this machine read it: copy the checkpoint to a bucket and give that.",
        404: "Correct the address.",
    }

    @property
    def url(self) -> str:
        return self.root

    def place(self, path: str) -> Place:
        return Place(web_store(self.root.rstrip("/")), path)

    def list(self) -> dict[str, int]:
        sizes = self.sizes(_KNOWN_FILES)
        shards = _shards_of(self.read(_INDEX, 0, sizes[_INDEX])) if _INDEX in sizes else ()
        return sizes | self.sizes(shards)

    def folders(self) -> tuple[str, ...]:
        return ()

    def sizes(self, files: Iterable[str]) -> dict[str, int]:
        """Those of some files that are there, with their sizes in bytes."""
        files = tuple(files)
        found = zip(files, at_once(self._size_or_none, files), strict=True)
        return {file: size for file, size in found if size is not None}

    def _size_or_none(self, file: str) -> int | None:
        try:
            return self.size(file)
        except MissingFileError:
            return None


def open_web(url: str) -> WebSource:
    """The source for the address of a folder.

    Raises:
      FerryError: the address has a query, or a password, which would be written into manifests.
    """
    if "?" in url or "#" in url:
        raise FerryError(f"{url.partition('?')[0]}: expected the address of a folder; found one with a query.")
    host = urlsplit(url).netloc.rpartition("@")
    if host[1]:
        raise FerryError(f"{host[2]}: expected an address without a login; found a name or a password in it, "
                         "which is not supported: copy the folder to a bucket and give that.")  # fmt: skip
    return WebSource(url.rstrip("/") + "/")


def _shards_of(index: bytes) -> tuple[str, ...]:
    """The shards that an index names; none when it is damaged, which is told where it is read for its own sake."""
    try:
        names = set(json.loads(index)["weight_map"].values())
    except (ValueError, TypeError, KeyError, AttributeError):
        return ()
    return tuple(sorted(name for name in names if isinstance(name, str) and is_inside(name)))
