"""Low-bit codes to numbers: pure kernels on regions, float32 arithmetic, one final rounding."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from tensorferry.transforms.decode.bnb import decode_bnb4
from tensorferry.transforms.decode.integers import decode_awq, decode_gptq, decode_packed
from tensorferry.transforms.decode.scaled import decode_scale, decode_scaled
from tensorferry.transforms.decode.scales import ScaleFault, check_scale, scale_values
from tensorferry.transforms.lowrank import add_product

__all__ = ["KERNELS", "ScaleFault", "check_scale", "run_kernel", "scale_values"]

KERNELS: dict[str, Callable[..., None]] = {
    "awq": decode_awq,
    "bnb4": decode_bnb4,
    "gptq": decode_gptq,
    "packed": decode_packed,
    "scale": decode_scale,
    "scaled": decode_scaled,
}
_OUT_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def run_kernel(
    kernel: str,
    arrays: Mapping[str, np.ndarray],
    shape: tuple[int, ...],
    args: Mapping[str, Any],
    out_dtype: str = "float32",
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Decodes one region.

    Args:
      kernel: a name of :data:`KERNELS`.
      arrays: role to the stored region that the scheme asked for.
      shape: the region's shape.
      args: plain values for the kernel.
      out_dtype: ``float32`` or ``bfloat16``; the only rounding is to this dtype.
      out: written to when given (any strides; its dtype must be ``out_dtype``), else a new array, its axes in
        memory in the order in which they are stored (whoever relays it out moves it once).

    Raises:
      ValueError: ``out`` has another shape or dtype.
    """
    dtype = _OUT_DTYPES[out_dtype]
    if out is None:
        out = _empty(shape, dtype, args.get("order"))
    if out.shape != shape or out.dtype != dtype:
        raise ValueError(f"out is {out.dtype} {out.shape}; the region is {dtype} {shape}")
    if out.size:
        KERNELS[kernel](arrays, out, **args)
    return out


def _decode_merged(
    arrays: Mapping[str, np.ndarray],
    out: np.ndarray,
    *,
    base: str,
    base_args: Mapping[str, Any],
    order: Sequence[int] | None = None,
    **product: Any,
) -> None:
    """Decodes a region of a weight, plain where ``base`` is empty, and adds a low-rank product to it.

    Args:
      arrays: those of the weight, and the factors ``lora_a`` and ``lora_b``.
      out: float32 or bfloat16, the region.
      base: kernel of the weight.
      base_args: its plain values.
      order: of the axes in memory, which the weight's own kernel knows.
      product: see :func:`tensorferry.transforms.lowrank.add_product`.
    """
    values = run_kernel(base, arrays, out.shape, base_args) if base else arrays["values"]
    add_product(out, values, arrays["lora_a"], arrays["lora_b"], **product)


KERNELS["merged"] = _decode_merged


def _empty(shape: tuple[int, ...], dtype: np.dtype, order: Sequence[int] | None) -> np.ndarray:
    """An array whose fastest axis is the stored one: axis ``order[k]`` of the result is the k-th in memory."""
    if order is None:
        return np.empty(shape, dtype)
    return np.empty([shape[axis] for axis in order], dtype).transpose(np.argsort(order))
