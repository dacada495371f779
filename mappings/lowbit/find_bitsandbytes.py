"""Recognises bitsandbytes: 4-bit by the JSON state stored beside each weight, int8 by its ``SCB``."""

import json
import math

from tensorferry.mappings.lowbit.near import Found, Near, disagreement, missing, seen
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.words.problems import Problem

STATE_MARK = ".quant_state.bitsandbytes__"


def find_flat4(values: StoredTensor, state: StoredTensor, near: Near) -> Found:
    """The logical tensor of a flat 4-bit weight, or what is wrong with it."""
    if near.quant.method not in ("", "bitsandbytes"):
        return disagreement(values, near, f"{seen(values)} with {state.name}, which is bitsandbytes 4-bit")
    raw = near.peeked.get(state.name)
    if raw is None:
        return missing(values, f"the text of {state.name}", "The shape of a bitsandbytes weight is inside that tensor.")
    try:
        return _of_state(values, state, json.loads(raw.decode()), near)
    except (ValueError, KeyError, TypeError) as error:
        return _unreadable(state, f"{type(error).__name__}: {error}")


def _of_state(values: StoredTensor, state: StoredTensor, facts: dict, near: Near) -> Found:
    shape = tuple(int(n) for n in facts["shape"])
    block, count = int(facts["blocksize"]), math.prod(shape)
    nested = "nested_blocksize" in facts
    needed = {"absmax": "absmax", "code": "quant_map"}
    if nested:
        needed |= {"nested_absmax": "nested_absmax", "nested_code": "nested_quant_map"}
    stored = {"values": values, "state": state}
    for role, leaf in needed.items():
        tensor = near.tensors.get(f"{values.name}.{leaf}")
        if tensor is None:
            return missing(values, f"{values.name}.{leaf}", "bitsandbytes needs it to decode the weight.")
        stored[role] = tensor
    found = f"shape {list(shape)}, blocksize {block} for {seen(values)} and absmax {seen(stored['absmax'])}"
    halves, blocks = -(-count // 2), -(-count // block)
    if values.dtype != "uint8" or values.shape[0] != halves or math.prod(values.shape) != halves:
        return _unreadable(state, found)
    if stored["absmax"].shape != (blocks,):
        return _unreadable(state, found)
    params = {
        "block": block,
        "nested_block": int(facts["nested_blocksize"]) if nested else 0,
        "absmax_plus": float(facts.get("nested_offset", 0.0)) if nested else 0.0,
    }
    scheme = "bnb-" + state.name.rpartition("bitsandbytes__")[2]
    if scheme not in ("bnb-nf4", "bnb-fp4"):
        return _unreadable(state, scheme)
    return LogicalTensor(values.name, shape, "float32", stored, scheme, params)


def _unreadable(state: StoredTensor, found: str) -> Problem:
    return Problem(
        name=state.name,
        expected="a bitsandbytes state with shape, blocksize and the sizes of its companions",
        found=found,
        fix="The packed shape disagrees with the stored state; this form is not supported.",
        file=state.file,
    )


def find_bnb_int8(values: StoredTensor, scale: StoredTensor, near: Near) -> Found:
    """int8 rows, each times ``SCB / 127``."""
    if near.quant.method not in ("", "bitsandbytes"):
        return disagreement(values, near, f"{seen(values)} with {scale.name}, which is bitsandbytes int8")
    if len(values.shape) != 2 or scale.shape not in (values.shape[:1], (values.shape[0], 1)):
        return Problem(
            name=scale.name,
            expected=f"one scale per row of {values.name} {seen(values)}",
            found=seen(scale),
            fix="The scale does not match the weight.",
            file=scale.file,
        )
    axes = [0, -1][: len(scale.shape)]
    params = {"code": "int8", "blocks": [1, 0], "scale_axes": axes, "encoding": "float", "divisor": 127.0}
    stored = {"values": values, "scale": scale}
    return LogicalTensor(values.name, values.shape, "float32", stored, "bnb-int8", params)
