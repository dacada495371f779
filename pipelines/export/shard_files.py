"""Safetensors files that many workers fill at once: made at full size, each part written at its final bytes."""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from tensorferry.mappings.export.shards import Shard
from tensorferry.mappings.plan.work import Part
from tensorferry.mappings.rules.geometry import Box
from tensorferry.mappings.words.problems import FerryError, Problem
from tensorferry.pipelines.sinks.sink import store_error

_OPEN_FILES = 64


@dataclass(frozen=True)
class ShardFiles:
    """The files of an export while they are built; small and picklable.

    Attributes:
      folder: a local directory.
    """

    folder: str

    def prepare(self, shards: Sequence[Shard]) -> None:
        """Makes every file at its final size, with its header; bytes that are there stay.

        Raises:
          FerryError: the file system refuses.
        """
        for shard in shards:
            path = Path(self.folder, shard.file)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
                    file.truncate(shard.nbytes)
                    file.write(shard.header)
            except OSError as error:
                raise store_error(str(path), "a file of its full size", error) from error

    def check(self, shards: Sequence[Shard]) -> None:
        """Compares sizes and headers with the plan.

        Raises:
          FerryError: somebody changed them.
        """
        for shard in shards:
            path = Path(self.folder, shard.file)
            with path.open("rb") as file:
                whole = os.fstat(file.fileno()).st_size == shard.nbytes and file.read(len(shard.header)) == shard.header
            if not whole:
                fix = "Something else writes there; run the same command again."
                raise FerryError(str(Problem(str(path), f"{shard.nbytes:,} bytes as planned", "other bytes", fix)))

    def write(self, part: Part, file: str, offset: int, array: np.ndarray) -> None:
        """Writes one part of a tensor.

        Args:
          part: which part.
          file: the shard.
          offset: of the tensor's first byte in the shard.
          array: C-contiguous values of the part's box.

        Raises:
          FerryError: the file system refuses.
        """
        octets = memoryview(array.reshape(-1).view(np.uint8))  # pyright: ignore[reportArgumentType]
        path = os.path.join(self.folder, file)
        at = 0
        try:
            descriptor = _descriptor(path).number
            for start, nbytes in runs(part.spec.shape, array.itemsize, part.spec.box(part.grid)):
                _write_all(descriptor, octets[at : at + nbytes], offset + start)
                at += nbytes
        except OSError as error:
            raise store_error(path, "a file that can be written", error) from error

    def read(self, part: Part, file: str, offset: int, out: np.ndarray) -> None:
        """Reads a part back; the inverse of ``write``."""
        octets, at = memoryview(out.reshape(-1).view(np.uint8)), 0  # pyright: ignore[reportArgumentType]
        with open(os.path.join(self.folder, file), "rb", buffering=0) as opened:
            for start, nbytes in runs(part.spec.shape, out.itemsize, part.spec.box(part.grid)):
                os.preadv(opened.fileno(), [octets[at : at + nbytes]], offset + start)
                at += nbytes


def runs(shape: Sequence[int], itemsize: int, box: Box) -> Iterator[tuple[int, int]]:
    """(start, length) in bytes of every contiguous stretch of a box of a C-order tensor, in C order.

    >>> list(runs((4, 3), 2, ((1, 3), (0, 3)))), list(runs((4, 3), 2, ((1, 3), (1, 2))))
    ([(6, 12)], [(8, 2), (14, 2)])
    """
    axis = len(shape) - 1
    while axis > 0 and box[axis] == (0, shape[axis]):
        axis -= 1
    strides = [itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape))]
    if not shape:
        yield 0, itemsize
        return
    nbytes = (box[axis][1] - box[axis][0]) * strides[axis]
    starts = np.array([box[axis][0] * strides[axis]])
    for (low, high), stride in zip(reversed(box[:axis]), reversed(strides[:axis]), strict=True):
        starts = (np.arange(low, high)[:, None] * stride + starts[None, :]).reshape(-1)
    for start in starts.tolist():
        yield start, nbytes


def _write_all(descriptor: int, octets: memoryview, at: int) -> None:
    done = 0
    while done < len(octets):
        done += os.pwrite(descriptor, octets[done:], at + done)


class _Descriptor:
    """An open file, closed when the cache and the last writer have let go of it."""

    __slots__ = ("number",)

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_WRONLY | os.O_CLOEXEC)

    def __del__(self, close=os.close) -> None:
        close(self.number)


@lru_cache(maxsize=_OPEN_FILES)
def _opened(path: str, _device: int, _inode: int) -> _Descriptor:
    return _Descriptor(path)


def _descriptor(path: str) -> _Descriptor:
    # Device and inode are in the key so that a file replaced under its name is opened anew.
    info = os.stat(path)
    return _opened(path, info.st_dev, info.st_ino)
