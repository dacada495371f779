"""Regions of logical tensors from regions of stored ones: joins a scheme's geometry to its kernel. Reads nothing."""

from collections.abc import Mapping

import numpy as np
from tensorferry.mappings.lowbit.merged import FACTORS
from tensorferry.mappings.lowbit.schemes import Box, is_merged, scheme_of
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.words.problems import FerryError, Problem
from tensorferry.transforms.decode import ScaleFault, check_scale, run_kernel


def decode_region(
    logical: LogicalTensor,
    box: Box,
    arrays: Mapping[str, np.ndarray],
    out_dtype: str = "float32",
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Decodes a region of a quantised tensor, in float32 with one final rounding.

    Args:
      logical: a tensor that is not plain.
      box: (start, stop) per logical axis.
      arrays: role to array, each exactly the region that ``scheme.stored_box(logical, box)`` names.
      out_dtype: ``float32`` or ``bfloat16``.
      out: written to when given, any strides (those of ``scheme.memory_order`` are fastest); else a new array.

    Returns:
      The region, ``stop - start`` elements per axis. A new array keeps the order of the stored axes in memory, so
      a scheme stored transposed (gpt-oss) comes back as a transposed view that the relayout moves once.

    Raises:
      FerryError: a scale is NaN, infinite, zero or negative, or a low-rank factor is not finite; the sentence names
        the tensor and counts them.
      ValueError: the tensor is plain.
    """
    scheme = scheme_of(logical)
    if scheme is None:
        raise ValueError(f"{logical.name} is plain: its values are read as stored")
    check_scales(logical, arrays)
    check_factors(logical, arrays)
    shape = tuple(stop - start for start, stop in box)
    return run_kernel(scheme.kernel, arrays, shape, scheme.kernel_args(logical, box), out_dtype, out)


def check_scales(logical: LogicalTensor, arrays: Mapping[str, np.ndarray]) -> None:
    """Refuses scales that cannot be right.

    Raises:
      FerryError: see :func:`decode_region`.
    """
    scheme = scheme_of(logical)
    rules = scheme.scale_rules(logical) if scheme else {}
    for role, (encoding, rule) in rules.items():
        fault = check_scale(arrays[role], encoding, rule)
        if fault is not None:
            raise FerryError(str(scale_problem(logical.stored[role], fault, rule)))


def check_factors(logical: LogicalTensor, arrays: Mapping[str, np.ndarray]) -> None:
    """Refuses an adapter whose factors are not numbers.

    Raises:
      FerryError: some are NaN or infinite.
    """
    for role in FACTORS if is_merged(logical) else ():
        bad = arrays[role].size - int(np.count_nonzero(np.isfinite(arrays[role])))
        if bad:
            stored = logical.stored[role]
            found = f"{bad:,} of {arrays[role].size:,} NaN or infinite"
            fix = "The adapter is damaged: training it diverged, or its file is not whole."
            raise FerryError(str(Problem(stored.name, "finite numbers", found, fix, file=stored.file)))


def scale_problem(stored: StoredTensor, fault: ScaleFault, rule: str) -> Problem:
    """A scale whose values cannot be right, with their counts."""
    return Problem(
        name=stored.name,
        expected=f"finite scales {'above zero' if rule == 'positive' else 'of zero or more'}",
        found=str(fault),
        fix="Its weight cannot be decoded; the checkpoint is damaged.",
        file=stored.file,
        rule="a scale is a positive number",
    )
