"""A chunk on a local disk: written past the page cache, and under its name when it is complete.

Writing directly costs a twentieth of the system time of buffered writes (measured: 0.05 seconds per GB against 0.25 to
1.9, as the pages of the cache have to be found, filled and written back), keeps the source in the cache, and leaves
the commit's sync nothing to wait for. A file system that cannot do it gets buffered writes.
"""

import ctypes
import errno
import mmap
import os
import threading
import uuid
from collections.abc import Iterable
from functools import cache
from typing import Any

_STAGE_BYTES = 4 << 20
# Small calls: the large page-cache folios that one call for a whole chunk makes cost several times a copy where free
# memory has gone back to a hypervisor.
_BUFFERED_BYTES = 128 << 10
# What every disk's blocks divide.
_ALIGNMENT = 4096
# The suffix of TensorStore's own half-written files: the commit removes what a killed worker left.
_DRAFT_SUFFIX = ".__lock"
_SYNC_FILE_RANGE_WRITE = 2

_own = threading.local()


def write_local_chunk(path: str, pieces: Iterable[memoryview]) -> None:
    """Writes one whole chunk; beside the pieces it takes 4 MiB for each thread.

    Raises:
      OSError: the disk cannot be written; nothing is left behind.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    draft = f"{path}.{uuid.uuid4().hex[:8]}{_DRAFT_SUFFIX}"
    try:
        descriptor, direct = _open(draft)
        try:
            _write_pieces(descriptor, direct, pieces)
        finally:
            os.close(descriptor)
        os.replace(draft, path)
    except BaseException:
        if os.path.exists(draft):
            os.unlink(draft)
        raise


def _open(path: str) -> tuple[int, bool]:
    """A new file, and whether it is written past the page cache."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    if hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, flags | os.O_DIRECT, 0o666), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Linux makes the file before it refuses.
            if os.path.exists(path):
                os.unlink(path)
    return os.open(path, flags, 0o666), False


def _write_pieces(descriptor: int, direct: bool, pieces: Iterable[memoryview]) -> None:
    stage, held = _stage(), 0
    for piece in pieces:
        while piece:
            taken = piece[: _STAGE_BYTES - held]
            stage[held : held + len(taken)] = taken
            held, piece = held + len(taken), piece[len(taken) :]
            if held == _STAGE_BYTES:
                direct = _write_stage(descriptor, direct, stage)
                held = 0
    aligned = held // _ALIGNMENT * _ALIGNMENT
    direct = _write_stage(descriptor, direct, stage[:aligned])
    if direct:
        _leave_direct(descriptor)
    _write_all(descriptor, stage[aligned:held])
    _begin_writeback(descriptor)


def _stage() -> memoryview:
    """This thread's memory for what is written next: aligned, as only whole pages of it are, and used again."""
    if not hasattr(_own, "stage"):
        _own.stage = memoryview(mmap.mmap(-1, _STAGE_BYTES))
    return _own.stage


def _write_stage(descriptor: int, direct: bool, octets: memoryview) -> bool:
    """Writes it all; whether the file is still written directly."""
    while direct and octets:
        try:
            octets = octets[os.write(descriptor, octets) :]
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            _leave_direct(descriptor)
            direct = False
        else:
            # A disk that takes half a block now has filled up, and says so at the next call.
            if len(octets) % _ALIGNMENT:
                _leave_direct(descriptor)
                direct = False
    _write_all(descriptor, octets)
    return direct


def _write_all(descriptor: int, octets: memoryview) -> None:
    while octets:
        octets = octets[os.write(descriptor, octets[:_BUFFERED_BYTES]) :]


def _leave_direct(descriptor: int) -> None:
    import fcntl

    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)


def _begin_writeback(descriptor: int) -> None:
    """Lets the disk start while workers go on, so that the commit's sync finds little left. Only a hint."""
    start = _sync_file_range()
    if start is not None:
        start(descriptor, ctypes.c_int64(0), ctypes.c_int64(0), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))


@cache
def _sync_file_range() -> Any:
    """Linux's sync_file_range, which begins to write and does not wait; None elsewhere. Python does not offer it."""
    return getattr(ctypes.CDLL(None), "sync_file_range", None)
