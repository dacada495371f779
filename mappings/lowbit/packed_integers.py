"""Integers packed in 32-bit words: compressed-tensors pack-quantized, GPTQ, AWQ (gemm). Two axes, outputs first.

``params``: ``bits``, ``code``, ``group`` (inputs per scale; 0 when one scale serves a row), ``per_word`` for whole
values in each word (bits that are left over stay empty) instead of one bit stream, and for GPTQ ``symmetric`` and
``zeros_plus`` (see ``tensorferry.transforms.decode.integers``).
"""

import math
from dataclasses import dataclass
from typing import Any

from tensorferry.mappings.lowbit.scheme import Box, Scheme, outward
from tensorferry.mappings.lowbit.tensors import LogicalTensor


def word_run(bits: int, per_word: int = 0) -> tuple[int, int]:
    """The shortest run of whole words that holds whole values: ``(values, words)``.

    >>> word_run(4), word_run(3), word_run(6), word_run(3, 10)
    ((8, 1), (32, 3), (16, 3), (10, 1))
    """
    if per_word:
        return per_word, 1
    total = math.lcm(bits, 32)
    return total // bits, total // 32


def packed_words(values: int, bits: int, per_word: int = 0) -> int:
    """Words that hold ``values`` integers in one bit stream, or ``per_word`` in each."""
    return -(-values // per_word) if per_word else -(-values * bits // 32)


def word_span(span: tuple[int, int], bits: int, words: int, per_word: int = 0) -> tuple[int, int]:
    """The words that a span of values touches, from the start of the run it starts in."""
    values_per_run, words_per_run = word_run(bits, per_word)
    first = span[0] // values_per_run * words_per_run
    return first, min(packed_words(span[1], bits, per_word), words)


def _lead(start: int, bits: int, per_word: int = 0) -> int:
    return start % word_run(bits, per_word)[0]


def _groups(logical: LogicalTensor, columns: tuple[int, int], count: int) -> tuple[int, int]:
    """Groups that a span of columns needs: all of them when ``g_idx`` may point anywhere."""
    if "group_index" in logical.stored:
        return 0, count
    group = logical.params["group"]
    return outward(columns, group) if group else (0, 1)


@dataclass(frozen=True)
class _Words(Scheme):
    """What the three layouts share."""

    def granularity(self, logical: LogicalTensor) -> tuple[int, ...]:
        run = word_run(logical.params["bits"], logical.params.get("per_word", 0))[0]
        return run if "zero" in logical.stored else 1, run

    def shared_runs(self, logical: LogicalTensor) -> tuple[int, ...]:
        return 1, logical.params["group"] or 1

    def scale_rules(self, logical: LogicalTensor) -> dict[str, tuple[str, str]]:
        return {"scale": ("float", "positive")}

    def describe(self, logical: LogicalTensor) -> str:
        params, scale = logical.params, logical.stored["scale"]
        group = f" group {params['group']}" if params["group"] else ""
        return f"{self.name} {params['bits']} bits{group}, scale {scale.name} {scale.dtype} {list(scale.shape)}"


@dataclass(frozen=True)
class PackQuantized(_Words):
    """compressed-tensors: words along the inputs, ``[outputs, words]``; zero points packed along the outputs."""

    name: str = "int-packed"
    kernel: str = "packed"

    def stored_box(self, logical: LogicalTensor, box: Box) -> dict[str, Box]:
        (rows, columns), stored, bits = box, logical.stored, logical.params["bits"]
        per_word = logical.params["per_word"]
        groups = _groups(logical, columns, stored["scale"].shape[1])
        scale_rows = rows if stored["scale"].shape[0] == logical.shape[0] else (0, 1)
        boxes: dict[str, Box] = {
            "values": (rows, word_span(columns, bits, stored["values"].shape[1], per_word)),
            "scale": (scale_rows, groups),
        }
        if "zero" in stored:
            boxes["zero"] = (word_span(rows, bits, stored["zero"].shape[0], per_word), groups)
        if "group_index" in stored:
            boxes["group_index"] = (columns,)
        return boxes

    def kernel_args(self, logical: LogicalTensor, box: Box) -> dict[str, Any]:
        (rows, columns), params = box, logical.params
        group, bits = params["group"], params["bits"]
        row_block = 1 if logical.stored["scale"].shape[0] == logical.shape[0] else 0
        return {
            "code": params["code"],
            "per_word": params["per_word"],
            "blocks": [row_block, group],
            "offsets": [0, columns[0] % group if group else 0],
            "lead": _lead(columns[0], bits, params["per_word"]),
            "zero_lead": _lead(rows[0], bits, params["per_word"]),
            "first_column": columns[0],
        }


@dataclass(frozen=True)
class Gptq(_Words):
    """GPTQ: words along the inputs, ``[words, outputs]``; zero points packed along the outputs."""

    name: str = "gptq"
    kernel: str = "gptq"

    def stored_order(self, logical: LogicalTensor) -> tuple[int, ...]:
        return 1, 0

    def stored_box(self, logical: LogicalTensor, box: Box) -> dict[str, Box]:
        (rows, columns), stored, bits = box, logical.stored, logical.params["bits"]
        groups = _groups(logical, columns, stored["scale"].shape[0])
        boxes: dict[str, Box] = {
            "values": (word_span(columns, bits, stored["values"].shape[0]), rows),
            "scale": (groups, rows),
            "zero": (groups, word_span(rows, bits, stored["zero"].shape[1])),
        }
        if "group_index" in stored:
            boxes["group_index"] = (columns,)
        return boxes

    def kernel_args(self, logical: LogicalTensor, box: Box) -> dict[str, Any]:
        (rows, columns), params = box, logical.params
        group, bits = params["group"], params["bits"]
        return {
            "code": params["code"],
            "blocks": [1, group],
            "offsets": [0, columns[0] % group if group else 0],
            "symmetric": params["symmetric"],
            "zeros_plus": params["zeros_plus"],
            "lead": _lead(columns[0], bits),
            "zero_lead": _lead(rows[0], bits),
            "first_column": columns[0],
        }


@dataclass(frozen=True)
class Awq(_Words):
    """AWQ gemm: words along the outputs, ``[inputs, words]``, nibbles interleaved."""

    name: str = "awq"
    kernel: str = "awq"

    def stored_box(self, logical: LogicalTensor, box: Box) -> dict[str, Box]:
        (rows, columns), stored, bits = box, logical.stored, logical.params["bits"]
        groups = _groups(logical, columns, stored["scale"].shape[0])
        words = word_span(rows, bits, stored["values"].shape[1])
        return {"values": (columns, words), "scale": (groups, rows), "zero": (groups, words)}

    def kernel_args(self, logical: LogicalTensor, box: Box) -> dict[str, Any]:
        (rows, columns), group = box, logical.params["group"]
        return {
            "blocks": [group, 1],
            "order": [1, 0],
            "offsets": [columns[0] % group if group else 0, 0],
            "lead": _lead(rows[0], logical.params["bits"]),
        }

    def memory_order(self, logical: LogicalTensor) -> tuple[int, ...]:
        return 1, 0

    def granularity(self, logical: LogicalTensor) -> tuple[int, ...]:
        return word_run(logical.params["bits"])[0], 1
