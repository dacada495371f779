"""Recognises integers packed in 32-bit words: compressed-tensors pack-quantized, GPTQ, AWQ."""

import struct

from tensorferry.mappings.lowbit.claims import Claim
from tensorferry.mappings.lowbit.companion_names import logical_name
from tensorferry.mappings.lowbit.near import Found, Near, disagreement, missing, no_scale, seen
from tensorferry.mappings.lowbit.packed_integers import packed_words
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.words.problems import Problem


def find_pack_quantized(values: StoredTensor, near: Near) -> Found:
    """``X.weight_packed`` int32 ``[outputs, words]`` with ``weight_scale`` and ``weight_shape``."""
    scale = near.scale(values)
    if scale is None:
        return no_scale(values)
    claim = _claim(values, near)
    if isinstance(claim, Problem):
        return claim
    stored = {"values": values, "scale": scale}
    for role, suffix in (("zero", "zero_point"), ("group_index", "g_idx"), ("shape", "shape")):
        tensor = near.companion(values, suffix)
        if tensor is not None:
            stored[role] = tensor
    if not claim.symmetric and "zero" not in stored:
        return missing(values, "weight_zero_point", "The config says asymmetric, which needs zero points.")
    if len(values.shape) != 2 or len(scale.shape) != 2:
        return _disagrees(values, near, f"two axes; scale {scale.name} {seen(scale)}")
    rows, columns = _columns(values, scale, claim, stored.get("shape"), near)
    group = claim.block[-1] if claim.block else 0
    stream, whole = (packed_words(columns, claim.bits, k) for k in (0, 32 // claim.bits))
    per_word = 32 // claim.bits if 32 % claim.bits and values.shape[1] != stream else 0
    if 32 % claim.bits and stream == whole:
        return _two_packings(values, claim.bits, near)
    faults = _pack_faults(values, scale, stored, (rows, columns), claim.bits, group, per_word)
    if faults:
        return _disagrees(values, near, faults)
    params = {"bits": claim.bits, "code": f"int{claim.bits}_offset", "group": group, "per_word": per_word}
    return LogicalTensor(logical_name(values.name), (rows, columns), "float32", stored, "int-packed", params)


def _pack_faults(values, scale, stored, shape: tuple[int, int], bits: int, group: int, per_word: int) -> str:
    rows, columns = shape
    groups = -(-columns // group) if group else 1
    wanted = {values.name: [rows, packed_words(columns, bits, per_word)], scale.name: [rows, groups]}
    if "zero" in stored:
        wanted[stored["zero"].name] = [packed_words(rows, bits, per_word), groups]
    if "group_index" in stored:
        wanted[stored["group_index"].name] = [columns]
    if scale.shape == (1, 1) and not group:
        wanted.pop(scale.name)
    return _faults(list(stored.values()), wanted)


def _two_packings(values: StoredTensor, bits: int, near: Near) -> Problem:
    return Problem(
        name=values.name,
        expected=f"a shape that tells how {bits}-bit integers are packed ({near.quant.where})",
        found=f"{seen(values)}, which fits a bit stream and whole integers in each word alike",
        fix="So few columns leave the packing ambiguous; dequantise this checkpoint with the library that made it.",
        file=values.file,
        rule="a packing is never guessed",
    )


def _faults(tensors: list[StoredTensor], wanted: dict[str, list[int]]) -> str:
    wrong = [t for t in tensors if t.name in wanted and list(t.shape) != wanted[t.name]]
    return "; ".join(f"{t.name} is {seen(t)}, not {wanted[t.name]}" for t in wrong)


def _columns(values, scale, claim: Claim, shape: StoredTensor | None, near: Near) -> tuple[int, int]:
    """Logical (outputs, inputs): from weight_shape when it was read, else the words' capacity."""
    raw = near.peeked.get(shape.name) if shape else None
    if raw is not None and shape is not None:
        code = {"int64": "<2q", "int32": "<2i"}.get(shape.dtype)
        if code and len(raw) == struct.calcsize(code):
            rows, columns = struct.unpack(code, raw)
            return rows, columns
    capacity = values.shape[1] * 32 // claim.bits
    if claim.block:
        capacity = min(capacity, scale.shape[1] * claim.block[-1])
    elif 32 % claim.bits:
        capacity = values.shape[1] * (32 // claim.bits)
    return values.shape[0], capacity


def _claim(values: StoredTensor, near: Near) -> Claim | Problem:
    """The config's integer width for this weight; words alone do not tell it."""
    found = [claim for bits in range(2, 9) for claim in near.claims(values, "int", bits)]
    if len(found) == 1:
        return found[0]
    if near.quant.exhaustive and not found:
        return disagreement(values, near, f"{seen(values)}, integers packed in words")
    return Problem(
        name=values.name,
        expected=f"one bit width for packed integers ({near.quant.where})",
        found=f"{seen(values)} and {len(found)} matching statements in the config",
        fix="The bit width cannot be deduced from packed words: add it to the config.",
        file=values.file,
        rule="the bit width comes from the config",
    )


def _disagrees(values: StoredTensor, near: Near, found: str) -> Problem:
    return Problem(
        name=values.name,
        expected=f"packed shapes that follow {near.quant.text} ({near.quant.where})",
        found=f"{seen(values)}; {found}",
        fix="The packed shape disagrees with the config: wrong config for this checkpoint?",
        file=values.file,
        rule="packed shapes follow bits and group size",
    )


def find_words(values: StoredTensor, near: Near) -> Found:
    """``X.qweight`` int32: GPTQ when as wide as its scales, AWQ when eight times narrower."""
    scale, zero = near.sibling(values, "scales"), near.sibling(values, "qzeros")
    if scale is None:
        return missing(values, "scales", "A packed weight without its scales cannot be decoded.")
    if zero is None:
        return missing(values, "qzeros", "A packed weight without its zero points cannot be decoded.")
    claim = _claim(values, near)
    if isinstance(claim, Problem):
        return claim
    if len(values.shape) != 2 or len(scale.shape) != 2 or len(zero.shape) != 2:
        return _disagrees(values, near, f"two axes; {scale.name} {seen(scale)}")
    is_awq = scale.shape[1] != values.shape[1]
    if is_awq != (near.quant.method == "awq"):
        layout = "AWQ" if is_awq else "GPTQ"
        return disagreement(values, near, f"{seen(values)} with scales {seen(scale)}, the layout of {layout}")
    return (_awq if is_awq else _gptq)(values, scale, zero, claim, near)


def _awq(values, scale, zero, claim: Claim, near: Near) -> Found:
    inputs, outputs = values.shape[0], scale.shape[1]
    group = claim.block[-1] if claim.block else 0
    groups = -(-inputs // group) if group else 1
    words = packed_words(outputs, 4)
    wanted = {values.name: [inputs, words], zero.name: [groups, words], scale.name: [groups, outputs]}
    faults = _faults([values, zero, scale], wanted)
    if claim.bits != 4 or faults:
        return _disagrees(values, near, faults or f"AWQ of {claim.bits} bits is not supported")
    stored = {"values": values, "scale": scale, "zero": zero}
    params = {"bits": 4, "code": "uint4", "group": group}
    return LogicalTensor(logical_name(values.name), (outputs, inputs), "float32", stored, "awq", params)


def _gptq(values, scale, zero, claim: Claim, near: Near) -> Found:
    outputs, bits = values.shape[1], claim.bits
    index = near.sibling(values, "g_idx")
    inputs = index.shape[0] if index is not None else values.shape[0] * 32 // bits
    group = claim.block[-1] if claim.block else 0
    groups = -(-inputs // group) if group else 1
    wanted = {
        values.name: [packed_words(inputs, bits), outputs],
        zero.name: [groups, packed_words(outputs, bits)],
        scale.name: [groups, outputs],
    }
    faults = _faults([values, zero, scale], wanted)
    if faults:
        return _disagrees(values, near, faults)
    stored = {"values": values, "scale": scale, "zero": zero}
    if index is not None:
        stored["group_index"] = index
    version = near.quant.raw.get("checkpoint_format", "gptq")
    params = {
        "bits": bits,
        "code": f"uint{bits}",
        "group": group,
        "symmetric": claim.symmetric,
        "zeros_plus": 0 if version == "gptq_v2" else 1,
    }
    return LogicalTensor(logical_name(values.name), (outputs, inputs), "float32", stored, "gptq", params)
