"""Where finished chunks go: one interface, three storage formats that stock Orbax reads."""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from tensorferry.mappings.plan.array_spec import ArraySpec
from tensorferry.mappings.words.problems import FerryError, Problem
from tensorferry.pipelines.storage.kvstores import GCS_DRIVER, is_local, store_words
from tensorferry.transforms.dtypes import numpy_dtype

if TYPE_CHECKING:
    import numpy as np

COMPRESSIONS = ("none", "zstd1")
_GO_ON = "Then run the same command again: finished work items are kept."
# How TensorStore begins its message, to what it means for somebody who writes to a bucket.
_REFUSALS = {
    "PERMISSION_DENIED": (
        "permission denied (403)",
        "Give the account that runs this the role Storage Object User on the bucket.",
    ),
    "UNAUTHENTICATED": ("no valid credentials (401)", "Log in: gcloud auth application-default login."),
    "NOT_FOUND": ("no such bucket or object (404)", "Make the bucket, or correct its name."),
}
_ATTEMPT_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class PartWriter(ABC):
    """What one attempt at one work item writes; used from one thread, closed exactly once.

    As a context manager it commits on success and aborts when the block raises.
    """

    @abstractmethod
    def write(self, spec: ArraySpec, index: tuple[int, ...], array: "np.ndarray") -> None:
        """Writes one whole chunk; the array may be reused as soon as this returns.

        Args:
          spec: the target array.
          index: the chunk's index in the array's grid.
          array: C-contiguous values of the chunk's box (clipped at the edge), in the spec's dtype.

        Raises:
          FerryError: the array is not exactly the chunk, or the store cannot be written.
        """

    @abstractmethod
    def write_stored(self, spec: ArraySpec, index: tuple[int, ...], stored: bytes) -> None:
        """Begins to write one whole chunk that is encoded already, as the sink's ``kept`` codecs say; ``close`` waits.

        Raises:
          FerryError: there are no bytes, the array's chunks are not kept as they are, or the store cannot be written.
        """

    @abstractmethod
    def close(self) -> None:
        """Makes everything written so far part of the output.

        Raises:
          FerryError: the store cannot be written.
        """

    @abstractmethod
    def abort(self) -> None:
        """Forgets what is not committed; never raises."""

    def __enter__(self) -> "PartWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort()
            return
        try:
            self.close()
        except BaseException:
            self.abort()
            raise


@dataclass(frozen=True)
class Sink(ABC):
    """A checkpoint item being written; small and picklable, so workers get a copy of it.

    Attributes:
      root: url of the item's directory (``…/step/items``).
      compression: ``none`` (default: zstd costs five times the CPU of the write for 20 %) or ``zstd1``.
      crc32c: whether inner chunks carry a checksum, without which damaged weights are read as good ones.
      kept: for arrays whose chunks arrive encoded, by key: the JSON of the zarr v3 codecs that decode them.
    """

    root: str
    compression: str = "none"
    crc32c: bool = True
    kept: Mapping[str, str] = field(default_factory=dict)
    store_format: ClassVar[str]

    def prepare(self, arrays: Sequence[ArraySpec]) -> None:
        """Checks that the format can hold the arrays and makes the directory; writes nothing.

        Raises:
          FerryError: two arrays share a key, or a dtype cannot be stored.
        """
        refuse_unstorable(arrays, self.array_metadata)
        if is_local(self.root):
            make_directory(self.root)

    @abstractmethod
    def array_metadata(self, spec: ArraySpec) -> dict[str, Any]:
        """The array's complete TensorStore metadata, so that workers write without reading any."""

    def encoding_bytes(self, part_bytes: Sequence[int]) -> int:
        """Bytes that writing the parts of one work item takes at once, beside the parts themselves: one is encoded
        after the other, and leaves memory when its write returns."""
        return max(part_bytes, default=0)

    @property
    def buffer_bytes(self) -> int:
        """Bytes that an open part takes whatever it writes."""
        return 0

    def within(self, worker_memory_bytes: int) -> "Sink":
        """The sink with buffers that suit a worker's bound."""
        return self

    @abstractmethod
    def open_part(self, attempt_id: str) -> PartWriter:
        """A writer for one attempt at one work item; ``attempt_id`` must be unique to the attempt."""

    @abstractmethod
    def finalize(self, arrays: Sequence[ArraySpec], winners: Sequence[str], scalars: Collection[str] = ()) -> None:
        """Writes the arrays' metadata and compares every chunk in the store with the plan. May be run again.

        Args:
          arrays: every array of the plan.
          winners: the attempt ids that count, one for each work item (only ocdbt looks at them).
          scalars: keys of leaves that something else writes (``step``).

        Raises:
          ChunkError: a chunk is missing, or there is one that nobody planned.
        """


class ChunkError(FerryError):
    """The store does not hold exactly the planned chunks.

    Attributes:
      missing: store keys of chunks that are absent or have the wrong size.
      extra: store keys that are in no plan.
    """

    def __init__(self, message: str, missing: Sequence[str], extra: Sequence[str]) -> None:
        super().__init__(message)
        self.missing, self.extra = tuple(missing), tuple(extra)


def open_sink(
    root: str,
    store_format: str = "zarr3",
    compression: str = "none",
    crc32c: bool = True,
    kept: Mapping[str, str] | None = None,
) -> Sink:
    """The sink of a format: ``zarr3``, ``ocdbt`` or ``zarr2``.

    Raises:
      FerryError: unknown format or compression.
    """
    from tensorferry.pipelines.sinks.ocdbt import OcdbtSink
    from tensorferry.pipelines.sinks.plain_zarr import Zarr2Sink, Zarr3Sink

    sinks = {kind.store_format: kind for kind in (Zarr3Sink, OcdbtSink, Zarr2Sink)}
    _refuse_unknown("format", store_format, tuple(sinks))
    _refuse_unknown("compression", compression, COMPRESSIONS)
    return sinks[store_format](root, compression, crc32c, kept or {})


def refuse_unaligned(spec: ArraySpec, index: tuple[int, ...], array: "np.ndarray") -> None:
    """Refuses anything but one whole chunk: TensorStore would silently read, merge and write back.

    Raises:
      FerryError: wrong shape, dtype or memory order, or an index outside the grid.
    """
    try:
        expected = spec.box_shape(index)
    except IndexError as error:
        raise FerryError(str(error)) from error
    found = (array.shape, array.dtype, array.flags.c_contiguous)
    if found != (expected, numpy_dtype(spec.dtype), True):
        order = "" if array.flags.c_contiguous else ", not C-contiguous"
        raise FerryError(
            str(
                Problem(
                    f"{spec.key} chunk {list(index)}",
                    f"one whole chunk: {spec.dtype} {list(expected)}, C-contiguous",
                    f"{array.dtype} {list(array.shape)}{order}",
                    "Write whole chunks only; this is a fault of the plan.",
                )
            )
        )


def refuse_not_kept(sink: Sink, spec: ArraySpec, index: tuple[int, ...], stored: bytes) -> None:
    """Refuses encoded bytes for an array that is not kept as it is, and an empty chunk.

    Raises:
      FerryError: either.
    """
    if spec.key in sink.kept and stored:
        return
    found = "no bytes" if spec.key in sink.kept else "an array that is encoded here"
    fix = "The source lost data, or this is a fault of the plan."
    raise FerryError(str(Problem(f"{spec.key} chunk {list(index)}", "an encoded chunk to keep", found, fix)))


def refuse_unstorable(arrays: Sequence[ArraySpec], metadata: Any) -> None:
    """Refuses arrays that share a key and dtypes that the format cannot hold."""
    import tensorstore as ts

    seen: set[str] = set()
    for spec in arrays:
        if spec.key in seen:
            raise FerryError(str(Problem(spec.key, "one array of this name", "two", "Two rules write it.")))
        seen.add(spec.key)
    for spec in {spec.dtype: spec for spec in arrays}.values():
        driver = "zarr" if "dtype" in metadata(spec) else "zarr3"
        try:
            ts.Spec({"driver": driver, "metadata": metadata(spec)})
        except ValueError as error:
            problem = Problem(spec.key, "a dtype that zarr can hold", spec.dtype, "Choose another --dtype.")
            raise FerryError(str(problem)) from error


def valid_attempt_id(attempt_id: str) -> str:
    """The attempt id, when it can be a directory name.

    Raises:
      ValueError: it cannot.
    """
    if not _ATTEMPT_ID.fullmatch(attempt_id):
        raise ValueError(f"attempt id {attempt_id!r} must be letters, digits, '.', '_' and '-'")
    return attempt_id


def store_error(name: str, expected: str, error: Exception) -> FerryError:
    """A failed store operation as one sentence."""
    found = store_words(error)
    for code, (sentence, fix) in _REFUSALS.items():
        if code in found and _is_of_a_bucket(str(error)):
            return FerryError(str(Problem(name, expected, sentence, f"{fix} {_GO_ON}")))
    fix = "Free space or repair access, then run the same command again: finished work items are kept."
    return FerryError(str(Problem(name, expected, found, fix)))


def bucket_refusal(name: str, expected: str, status: int | None) -> FerryError:
    """What a bucket refused for good, as one sentence."""
    for sentence, fix in _REFUSALS.values():
        if sentence.endswith(f"({status})"):
            return FerryError(str(Problem(name, expected, sentence, f"{fix} {_GO_ON}")))
    return store_error(name, expected, RuntimeError(f"status {status}"))


def _is_of_a_bucket(text: str) -> bool:
    """Whether a bucket answered, and no local file system: the same codes mean other things there."""
    by_grpc = os.environ.get(GCS_DRIVER) == "gcs_grpc"  # whose errors carry no mark of their own
    return "http_response_code" in text or (by_grpc and "os_error_code" not in text)


def make_directory(path: str) -> None:
    """Makes a local directory and its parents.

    Raises:
      FerryError: the file system refuses.
    """
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise store_error(path, "a directory that can be written", error) from error


def _refuse_unknown(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise FerryError(str(Problem(f"--{what}", " or ".join(known), value, "Choose one of those.")))
