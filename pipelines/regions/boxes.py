"""Reading a box of a stored tensor: as few ranged reads as its rows allow, into memory that is used again."""

import itertools
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from tensorferry.mappings.lowbit.tensors import StoredTensor
from tensorferry.mappings.rules.geometry import Box
from tensorferry.pipelines.storage.byte_source import ByteSource
from tensorferry.transforms.dtypes import bits_of, numpy_dtype
from tensorferry.transforms.relayout import copy_into

# Rows shorter than this are read together with the gaps between them, when those are not most of the bytes.
_SHORT_RUN_BYTES = 1 << 14
_MOST_GAP = 4


class Scratch:
    """Memory that work items use one after the other: fresh pages cost as much as a copy.

    A buffer is valid until the same name is asked for again. Used by one thread at a time.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held, in use or not."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def take(self, name: str, nbytes: int) -> np.ndarray:
        """A uint8 array of exactly ``nbytes``; its content is undefined."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.nbytes < nbytes:
            # Let go of the old one first, so that both never stand side by side.
            self._buffers.pop(name, None)
            del buffer
            self._buffers[name] = buffer = np.empty(nbytes, np.uint8)
        return buffer[:nbytes]

    def array(self, name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """A C-contiguous array of undefined content."""
        wanted = numpy_dtype(dtype)
        return self.take(name, math.prod(shape) * wanted.itemsize).view(wanted).reshape(shape)


class ScratchPool:
    """Scratches of one process. What lies unused in it stays below a limit."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._free: list[Scratch] = []
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Lets go of what lies unused."""
        with self._lock:
            self._free.clear()

    @contextmanager
    def lend(self) -> Iterator[Scratch]:
        """A scratch for the length of the ``with`` block."""
        with self._lock:
            scratch = self._free.pop() if self._free else Scratch()
        try:
            yield scratch
        finally:
            with self._lock:
                if sum(free.nbytes for free in self._free) + scratch.nbytes <= self._limit_bytes:
                    self._free.append(scratch)


def box_shape(box: Box) -> tuple[int, ...]:
    """Lengths of a box."""
    return tuple(stop - start for start, stop in box)


def read_box(source: ByteSource, stored: StoredTensor, box: Box, scratch: Scratch, name: str = "values") -> np.ndarray:
    """The values of a box of a stored tensor, C-contiguous, in the stored dtype.

    Args:
      source: the files.
      stored: a tensor of whole-byte elements.
      box: (start, stop) per axis, in elements.
      scratch: owns the result, which the next read under the same name overwrites.

    Raises:
      SourceError: the file is shorter than its header said, or cannot be read.
      ValueError: the dtype packs several elements into a byte.
    """
    if bits_of(stored.dtype) < 8:
        raise ValueError(f"{stored.name}: {stored.dtype} is packed; its scheme reads whole bytes")
    hull = _hull(stored, box)
    if hull is not None:
        whole = _read_runs(source, stored, hull, scratch, f"{name}-hull")
        inside = tuple(slice(b[0] - h[0], b[1] - h[0]) for b, h in zip(box, hull, strict=True))
        out = scratch.array(name, box_shape(box), stored.dtype)
        copy_into(out, whole[inside])
        return out
    return _read_runs(source, stored, box, scratch, name)


def _read_runs(source: ByteSource, stored: StoredTensor, box: Box, scratch: Scratch, name: str) -> np.ndarray:
    out = scratch.array(name, box_shape(box), stored.dtype)
    octets = memoryview(out.reshape(-1).view(np.uint8))  # pyright: ignore[reportArgumentType]
    at = 0
    for start, nbytes in runs(stored, box):
        source.readinto(stored.file, start, octets[at : at + nbytes])
        at += nbytes
    return out


def runs(stored: StoredTensor, box: Box) -> Iterator[tuple[int, int]]:
    """(start, length) in bytes of every contiguous stretch of a box, in C order.

    >>> list(runs(StoredTensor("w", "bfloat16", (4, 3), "f", 100), ((1, 3), (0, 3))))
    [(106, 12)]
    """
    itemsize = bits_of(stored.dtype) // 8
    axis = _run_axis(stored, box)
    strides = [itemsize * math.prod(stored.shape[i + 1 :]) for i in range(len(stored.shape))]
    nbytes = itemsize * math.prod(box_shape(box)[axis:])
    inner = box[axis][0] * strides[axis] if box else 0
    for index in itertools.product(*(range(*span) for span in box[:axis])):
        yield stored.offset + inner + sum(i * s for i, s in zip(index, strides, strict=False)), nbytes


def _run_axis(stored: StoredTensor, box: Box) -> int:
    """The axis from which on a box is one contiguous stretch."""
    axis = len(box) - 1
    while axis > 0 and box[axis] == (0, stored.shape[axis]):
        axis -= 1
    return max(axis, 0)


def _hull(stored: StoredTensor, box: Box) -> Box | None:
    """A box of whole rows around one of short rows, where reading the gaps is cheaper than many reads."""
    axis = _run_axis(stored, box)
    itemsize = bits_of(stored.dtype) // 8
    run_bytes = itemsize * math.prod(box_shape(box)[axis:])
    if math.prod(box_shape(box)[:axis]) == 1 or run_bytes >= _SHORT_RUN_BYTES:
        return None
    whole = tuple((0, n) if i >= axis else span for i, (n, span) in enumerate(zip(stored.shape, box, strict=True)))
    gap = math.prod(box_shape(whole)) / max(1, math.prod(box_shape(box)))
    return whole if gap <= _MOST_GAP else None
