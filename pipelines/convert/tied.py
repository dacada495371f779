"""Stored tensors that config.json declares to be one: their bytes are compared before anything is written."""

from tensorferry.mappings.words.problems import PlanError, Problem
from tensorferry.pipelines.convert.conversion_planning import Conversion
from tensorferry.pipelines.storage.byte_source import ByteSource

_COMPARE_BYTES = 8 << 20


def compare_tied(conversion: Conversion) -> None:
    """Compares stored tensors that config.json declares to be one, before anything is written.

    Raises:
      PlanError: they differ.
    """
    problems = [
        Problem(
            name, f"the same bytes as {to}: config.json says tie_word_embeddings=true", "other bytes",
            "Choose with --lm-head stored (keep it, untied) or --lm-head tied (leave it out).",
            file=conversion.checkpoint.tensors[name].file,
        )
        for name, to in conversion.compare
        if not same_bytes(conversion, name, to)
    ]  # fmt: skip
    if problems:
        raise PlanError(problems)


def same_bytes(conversion: Conversion, one: str, other: str) -> bool:
    """Whether two stored tensors hold the same dtype, shape and bytes; reads blocks until they differ."""
    a, b = conversion.checkpoint.tensors[one], conversion.checkpoint.tensors[other]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    source: ByteSource = conversion.source
    starts = range(0, a.nbytes, _COMPARE_BYTES)
    lengths = (min(_COMPARE_BYTES, a.nbytes - start) for start in starts)
    return all(
        source.read(a.file, a.offset + start, length) == source.read(b.file, b.offset + start, length)
        for start, length in zip(starts, lengths, strict=True)
    )
