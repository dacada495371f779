"""Low-bit tensors of a checkpoint: understood from headers and a few tiny tensors, their scales checked in advance."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from tensorferry.mappings.lowbit.quantisation import Resolution, resolve
from tensorferry.mappings.lowbit.tensors import StoredTensor
from tensorferry.mappings.words.problems import Problem
from tensorferry.pipelines.huggingface.checkpoint import Checkpoint
from tensorferry.pipelines.regions.decode_region import scale_problem
from tensorferry.pipelines.storage.byte_source import ByteSource, LocalSource
from tensorferry.transforms.decode import check_scale
from tensorferry.transforms.decode.bits import unpack_integers
from tensorferry.transforms.decode.integers import gptq_zeros_plus
from tensorferry.transforms.dtypes import numpy_dtype

# All scales of a 671 B model in blocks of 128 are 160 MB in 45,000 tensors: a second or two from a local disk.
CHECKED_BYTES = 256 << 20
_LARGEST_BYTES = 4 << 20
_BATCH_BYTES = 8 << 20
_THREADS = 16

# A stored scale, how its numbers are encoded, and what they must be.
Scale = tuple[StoredTensor, str, str]


def understand(checkpoint: Checkpoint) -> Resolution:
    """The logical tensors of a checkpoint; reads no more than a few bytes of tiny tensors that tell shapes."""

    def peek(wanted: Sequence[StoredTensor]) -> Mapping[str, bytes]:
        return dict(zip((t.name for t in wanted), _read(checkpoint.source, wanted), strict=True))

    return resolve(checkpoint.tensors, checkpoint.config, checkpoint.quant_config_files, peek)


def bad_scales(checkpoint: Checkpoint, found: Resolution) -> list[Problem]:
    """Every scale that is NaN, infinite, zero or negative, among the small ones of a local checkpoint.

    Workers check each scale that they read as well; this finds nearly all of them before anything is written. Scales
    of a bucket or hub are left to the workers: each would be a request.

    Raises:
      SourceError: a file cannot be read.
    """
    if not isinstance(checkpoint.source, LocalSource):
        return []
    return [problem for batch in _batches(found.scales()) for problem in _bad(checkpoint.source, batch)]


def _bad(source: ByteSource, batch: Sequence[Scale]) -> Iterator[Problem]:
    """The bad ones among scales of one kind: checked in one go, and one by one only when something is wrong."""
    stored, encoding, rule = batch[0]
    dtype = numpy_dtype(stored.dtype)
    raw = list(_read(source, [stored for stored, _, _ in batch]))
    if check_scale(np.frombuffer(b"".join(raw), dtype), encoding, rule) is None:
        return
    for (stored, _, _), octets in zip(batch, raw, strict=True):
        fault = check_scale(np.frombuffer(octets, dtype), encoding, rule)
        if fault is not None:
            yield scale_problem(stored, fault, rule)


def gptq_notes(checkpoint: Checkpoint, found: Resolution) -> tuple[str, ...]:
    """Says so when symmetric GPTQ zero points tell another version than the config; the zero points are believed."""
    symmetric = (t for t in found.logical.values() if t.scheme == "gptq" and t.params["symmetric"])
    tensor = next(symmetric, None)
    if tensor is None or not isinstance(checkpoint.source, LocalSource):
        return ()
    zero, told = tensor.stored["zero"], tensor.params["zeros_plus"]
    raw = checkpoint.source.read(zero.file, zero.offset, 4 * zero.shape[1])
    zeros = unpack_integers(np.frombuffer(raw, np.uint8)[None], tensor.params["code"])[:, : tensor.shape[0]]
    true = gptq_zeros_plus(zeros, tensor.params["code"], True, told)
    if true == told:
        return ()
    config, stored = ("gptq", "gptq_v2") if told else ("gptq_v2", "gptq")
    says = f"{zero.name}: the config says checkpoint_format {config}, the zero points are those of {stored}"
    return (f"{says}; decoded as {stored}",)


def _batches(scales: Iterable[Scale]) -> Iterator[list[Scale]]:
    """Scales in the order of their size as far as the budget goes, those of one dtype and rule together."""
    left = CHECKED_BYTES
    batch: list[Scale] = []
    batch_bytes = 0
    for one in sorted((s for s in scales if s[0].nbytes <= _LARGEST_BYTES), key=lambda s: s[0].nbytes):
        left -= one[0].nbytes
        if left < 0:
            break
        if batch and (_kind(one) != _kind(batch[0]) or batch_bytes > _BATCH_BYTES):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(one)
        batch_bytes += one[0].nbytes
    if batch:
        yield batch


def _kind(scale: Scale) -> tuple[str, str, str]:
    return scale[0].dtype, scale[1], scale[2]


def _read(source: ByteSource, tensors: Sequence[StoredTensor]) -> Iterator[bytes]:
    """The bytes of small tensors, in their order."""
    if isinstance(source, LocalSource):
        yield from (source.read(t.file, t.offset, t.nbytes) for t in tensors)
        return
    with ThreadPoolExecutor(_THREADS) as pool:
        yield from pool.map(lambda t: source.read(t.file, t.offset, t.nbytes), tensors)
