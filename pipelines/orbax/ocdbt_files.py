"""Which byte ranges of which files an OCDBT database points at: what must be there for its values to be read."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

if TYPE_CHECKING:
    import tensorstore as ts


@dataclass(frozen=True, slots=True)
class Extent:
    """A file and how many bytes it must at least have.

    Attributes:
      file: path relative to the database's root.
      end: first byte after the last one that is pointed at.
    """

    file: str
    end: int


def referenced_files(base: "ts.KvStore") -> dict[str, int]:
    """Every data file that the newest version of a database needs, and the bytes it needs of it.

    Args:
      base: the folder that holds ``manifest.ocdbt``, as a key-value store.

    Raises:
      ValueError: the manifest or a node of the index cannot be read.
    """
    needed: dict[str, int] = {}
    for extent in _extents(base):
        needed[extent.file] = max(needed.get(extent.file, 0), extent.end)
    return needed


def missing_files(needed: Mapping[str, int], sizes: Mapping[str, int]) -> dict[str, tuple[int, int | None]]:
    """Files that are absent or too short: path to needed bytes and bytes found (None when absent)."""
    found = {file: sizes.get(file) for file in needed}
    return {file: (end, found[file]) for file, end in needed.items() if (found[file] or 0) < end}


def _extents(base: "ts.KvStore") -> Iterator[Extent]:
    root = _dump(base)["versions"][-1]["root"].get("location")
    waiting = [root] if root else []
    while waiting:
        location = waiting.pop()
        yield _extent(location)
        for entry in _node_entries(base, location):
            if "location" in entry:
                waiting.append(entry["location"])
            elif "indirect_value" in entry:
                yield _extent(entry["indirect_value"])


def _node_entries(base: "ts.KvStore", location: str) -> list[dict[str, Any]]:
    return _dump(base, location)["entries"]


def _dump(base: "ts.KvStore", location: str | None = None) -> Any:
    import tensorstore as ts

    return ts.ocdbt.dump(base, location).result() if location else ts.ocdbt.dump(base).result()


def _extent(location: str) -> Extent:
    """Reads TensorStore's spelling ``kind:folder/:file:offset:length``."""
    _, folder, file, offset, length = location.split(":")
    return Extent(unquote(folder) + unquote(file), int(offset) + int(length))
