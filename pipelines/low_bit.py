"""Low-bit tensors of a checkpoint: understood from headers and a few tiny tensors, their scales checked in advance."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from mappings.problems import Problem
from mappings.quantisation import Resolution, resolve
from mappings.tensors import StoredTensor
from pipelines.byte_source import ByteSource, LocalSource
from pipelines.checkpoint import Checkpoint
from pipelines.decode_region import scale_problem
from transforms.decode import check_scale
from transforms.decode.bits import unpack_integers
from transforms.decode.integers import gptq_zeros_plus
from transforms.dtypes import numpy_dtype

# All scales of a 671 B model in blocks of 128 are 160 MB in 45,000 tensors: a second or two from a local disk.
CHECKED_BYTES = 256 << 20
_LARGEST_BYTES = 4 << 20
_THREADS = 16


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
    chosen = list(_chosen(found.scales())) if isinstance(checkpoint.source, LocalSource) else []
    raw = _read(checkpoint.source, [stored for stored, _, _ in chosen])
    checked = ((one, check_scale(_array(one[0], octets), *one[1:])) for one, octets in zip(chosen, raw, strict=True))
    return [scale_problem(stored, fault, rule) for (stored, _, rule), fault in checked if fault is not None]


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


def _chosen(scales: Iterable[tuple[StoredTensor, str, str]]) -> Iterator[tuple[StoredTensor, str, str]]:
    """Scales in the order of their size, as far as the budget goes."""
    left = CHECKED_BYTES
    for one in sorted((s for s in scales if s[0].nbytes <= _LARGEST_BYTES), key=lambda s: s[0].nbytes):
        left -= one[0].nbytes
        if left < 0:
            return
        yield one


def _array(stored: StoredTensor, octets: bytes) -> np.ndarray:
    return np.frombuffer(octets, numpy_dtype(stored.dtype)).reshape(stored.shape)


def _read(source: ByteSource, tensors: Sequence[StoredTensor]) -> Iterator[bytes]:
    """The bytes of small tensors, in their order."""
    if isinstance(source, LocalSource):
        yield from (source.read(t.file, t.offset, t.nbytes) for t in tensors)
        return
    with ThreadPoolExecutor(_THREADS) as pool:
        yield from pool.map(lambda t: source.read(t.file, t.offset, t.nbytes), tensors)
