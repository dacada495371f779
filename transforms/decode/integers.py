"""Kernels for packed integers: compressed-tensors pack-quantized, GPTQ, AWQ."""

from collections.abc import Mapping, Sequence

import numpy as np
from tensorferry.transforms.decode.bits import unpack_integers, word_bytes
from tensorferry.transforms.decode.grid import Grid, constant_grid, index_grid
from tensorferry.transforms.decode.rows import scaled_rows
from tensorferry.transforms.decode.scales import scale_values
from tensorferry.transforms.decode.tables import integer_code

# Where AWQ's gemm layout keeps column k of every eight: the nibble's position in the word.
AWQ_NIBBLE_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)


def decode_packed(
    arrays: Mapping[str, np.ndarray],
    out: np.ndarray,
    *,
    code: str,
    blocks: Sequence[int],
    offsets: Sequence[int],
    per_word: int = 0,
    lead: int = 0,
    zero_lead: int = 0,
    first_column: int = 0,
) -> None:
    """Decodes compressed-tensors words: each row a little-endian bit stream along the last axis, or whole values in
    each word.

    Args:
      arrays: ``values`` int32 ``[rows, words]``, ``scale`` ``[rows, groups]``, and optionally ``zero`` int32
        ``[row words, groups]`` (packed along the rows, offset like the values) and ``group_index`` ``[columns]``.
      out: float32 or bfloat16 ``[rows, columns]``.
      code: an offset integer code, e.g. ``int4_offset``.
      blocks: ``[row block, group]``; ``offsets``: how far into them the region starts.
      per_word: whole values in each word, from its low bits up; 0 for one bit stream.
      lead: values before the region in a row's words; ``zero_lead``: the same in the words of ``zero``.
      first_column: position of the region's first column in the whole row (with ``group_index``).
    """
    zero, values = arrays.get("zero"), word_bytes(arrays["values"])
    if per_word:
        values = values_in_words(arrays["values"], code, per_word)
        zero = None if zero is None else values_in_words(zero.T, code, per_word).T
    elif zero is not None:
        zero = unpack_integers(word_bytes(zero.T), code).T
    zeros = None if zero is None else zero[zero_lead : zero_lead + out.shape[0]]
    scale, grid = _grids(arrays, out.shape, scale_values(arrays["scale"]), zeros, blocks, offsets, first_column)
    if per_word:
        grid = grid or constant_grid(integer_code(code)[1], out.ndim)
    scaled_rows(out, values, "uint8" if per_word else code, scale, grid, lead)


def values_in_words(words: np.ndarray, code: str, per_word: int) -> np.ndarray:
    """Whole values of each 32-bit word, the lowest bits first: int32 ``[rows, words]`` to uint8 ``[rows, values]``."""
    bits = integer_code(code)[0]
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
    lanes = words.view(np.uint32)[..., None] >> shifts & np.uint32((1 << bits) - 1)
    return lanes.astype(np.uint8).reshape(len(words), -1)


def decode_gptq(
    arrays: Mapping[str, np.ndarray],
    out: np.ndarray,
    *,
    code: str,
    blocks: Sequence[int],
    offsets: Sequence[int],
    symmetric: bool,
    zeros_plus: int,
    lead: int = 0,
    zero_lead: int = 0,
    first_column: int = 0,
) -> None:
    """Decodes GPTQ words, packed along the inputs, into rows of outputs.

    Args:
      arrays: ``values`` int32 ``[words, outputs]``, ``scale`` ``[groups, outputs]``, ``zero`` int32
        ``[groups, output words]``, optionally ``group_index`` ``[inputs]``.
      out: float32 or bfloat16 ``[outputs, inputs]``.
      code: an unsigned integer code, e.g. ``uint4``.
      blocks: ``[1, group]``, ``offsets`` alike, in the order of ``out``.
      symmetric: whether all zero points are the middle of the range, which tells v1 from v2 by itself.
      zeros_plus: what the config's format adds to a stored zero point (1 for v1, 0 for v2).
      lead, zero_lead, first_column: as in :func:`decode_packed`, along inputs, outputs and inputs.
    """
    zeros = unpack_integers(word_bytes(arrays["zero"]), code)[:, zero_lead : zero_lead + out.shape[0]].T
    zeros = zeros + np.float32(gptq_zeros_plus(zeros, code, symmetric, zeros_plus))
    scale = scale_values(arrays["scale"]).T
    grids = _grids(arrays, out.shape, scale, zeros, blocks, offsets, first_column)
    scaled_rows(out, word_bytes(arrays["values"].T), code, *grids, lead)


def gptq_zeros_plus(zeros: np.ndarray, code: str, symmetric: bool, configured: int) -> int:
    """What to add to stored zero points: told by the zeros themselves when symmetric, else as configured.

    A symmetric 4-bit tensor holds 7 everywhere in v1 and 8 everywhere in v2.
    """
    middle = 1 << (int(code.removeprefix("uint")) - 1)
    if symmetric and zeros.size and (zeros == zeros.flat[0]).all():
        return {middle - 1: 1, middle: 0}.get(int(zeros.flat[0]), configured)
    return configured


def decode_awq(
    arrays: Mapping[str, np.ndarray],
    out: np.ndarray,
    *,
    blocks: Sequence[int],
    offsets: Sequence[int],
    order: Sequence[int],
    lead: int = 0,
) -> None:
    """Decodes AWQ's gemm layout: 4-bit words packed along the outputs, nibbles interleaved.

    Args:
      arrays: ``values`` int32 ``[inputs, output words]``, ``scale`` ``[groups, outputs]``, ``zero`` int32
        ``[groups, output words]``.
      out: float32 or bfloat16 ``[outputs, inputs]``.
      blocks: ``[group, 1]``, ``offsets`` alike, in stored order.
      order: ``[1, 0]``: stored axis k is axis ``order[k]`` of ``out``.
      lead: outputs before the region in the first word of ``values`` and ``zero``.
    """
    target = out.transpose(order)
    zero = unpack_integers(word_bytes(awq_in_order(arrays["zero"])), "uint4")[:, lead : lead + target.shape[1]]
    scale = Grid.of(scale_values(arrays["scale"]), target.shape, list(blocks), list(offsets))
    zeros = Grid(np.ascontiguousarray(zero), scale.blocks, scale.offsets)
    scaled_rows(target, word_bytes(awq_in_order(arrays["values"])), "uint4", scale, zeros, lead)


def awq_in_order(words: np.ndarray) -> np.ndarray:
    """The same words with the nibble of column k at position k."""
    words = words.view(np.uint32)
    ordered = np.zeros_like(words)
    for column, nibble in enumerate(AWQ_NIBBLE_OF_COLUMN):
        ordered |= ((words >> np.uint32(4 * nibble)) & np.uint32(15)) << np.uint32(4 * column)
    return ordered.view(np.int32)


def _grids(
    arrays: Mapping[str, np.ndarray],
    shape: tuple[int, ...],
    scale: np.ndarray,
    zeros: np.ndarray | None,
    blocks: Sequence[int],
    offsets: Sequence[int],
    first_column: int,
) -> tuple[Grid, Grid | None]:
    """The scale's and the zero points' grids, their columns by ``group_index`` where there is one."""

    def grid(values: np.ndarray) -> Grid:
        values = np.ascontiguousarray(values, dtype=np.float32)
        if index is None:
            return Grid.of(values, shape, list(blocks), list(offsets))
        whole = Grid(values, tuple(blocks), (offsets[0], 0))
        return index_grid(whole, index, blocks[1], first_column)

    index = arrays.get("group_index")
    return grid(scale), None if zeros is None else grid(zeros)
