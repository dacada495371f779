"""From stored tensors to logical tensors: every stored tensor is plain, a role, ignored with a reason, or a problem."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensorferry.mappings.lowbit.claims import QuantConfig, read_config
from tensorferry.mappings.lowbit.companion_names import FOLDED_LEAVES, IGNORED_LEAVES, companions, looks_orphaned
from tensorferry.mappings.lowbit.find_bitsandbytes import STATE_MARK, find_bnb_int8, find_flat4
from tensorferry.mappings.lowbit.find_fp4 import find_fp4, find_gpt_oss
from tensorferry.mappings.lowbit.find_integers import find_pack_quantized, find_words
from tensorferry.mappings.lowbit.find_one_byte import find_one_byte
from tensorferry.mappings.lowbit.near import ONE_BYTE_FLOATS, Found, Near, no_scale
from tensorferry.mappings.lowbit.refusals import config_problems, folded, orphan, shared, twice
from tensorferry.mappings.lowbit.schemes import SCHEMES
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.words.problems import Problem

Peek = Callable[[Sequence[StoredTensor]], Mapping[str, bytes]]

_CODE_DTYPES = frozenset((*ONE_BYTE_FLOATS, "int8", "uint8", "float4_e2m1fn"))
_PACKED_ENDINGS = (".qweight", ".weight_packed")


@dataclass(frozen=True)
class Resolution:
    """What a checkpoint holds once its low-bit tensors are understood.

    Attributes:
      logical: every tensor that mappings may claim, by name.
      ignored: stored tensors that no weight needs, each with the reason.
      problems: what does not add up; the plan stops when there are any.
      quant: what the config says.
    """

    logical: dict[str, LogicalTensor]
    ignored: tuple[tuple[str, str], ...] = ()
    problems: list[Problem] = field(default_factory=list)
    quant: QuantConfig = field(default_factory=QuantConfig)

    @property
    def summary(self) -> dict[str, Any]:
        """Counts for the plan, JSON: tensors per scheme, ignored tensors per last name and reason."""
        reasons = Counter(f"{name.rpartition('.')[2]}: {why}" for name, why in self.ignored)
        return {
            "config": self.quant.where,
            "method": self.quant.method,
            "schemes": dict(Counter(tensor.scheme for tensor in self.logical.values())),
            "ignored": dict(reasons),
        }

    def scales(self) -> list[tuple[StoredTensor, str, str]]:
        """Every stored scale with its (encoding, rule) for ``tensorferry.transforms.decode.check_scale``.

        A launcher may fetch the small ones and check them before any worker starts; workers check every
        scale they read in any case.
        """
        return [
            (tensor.stored[role], encoding, rule)
            for tensor in self.logical.values()
            if tensor.scheme != "plain"
            for role, (encoding, rule) in SCHEMES[tensor.scheme].scale_rules(tensor).items()
        ]


def resolve(
    tensors: Mapping[str, StoredTensor],
    config: dict[str, Any],
    quant_config_files: Mapping[str, dict[str, Any]] | None = None,
    peek: Peek | None = None,
) -> Resolution:
    """Understands every stored tensor: header dtype and siblings decide, the config is the cross-check.

    Args:
      tensors: every tensor of the checkpoint by name, from all files.
      config: ``config.json``; may be empty.
      quant_config_files: other configuration files by name (``hf_quant_config.json``, …).
      peek: reads a few tiny tensors and returns their bytes by name; called at most once, with the states of
        bitsandbytes 4-bit and one ``weight_shape`` per form of packed weight. Without it bitsandbytes 4-bit is a
        problem, and the rows of packed weights are taken to be full.
    """
    quant = read_config(config, dict(quant_config_files or {}))
    problems = config_problems(quant)
    if problems:
        return Resolution({}, (), problems, quant)
    states = {name.partition(STATE_MARK)[0]: name for name in tensors if STATE_MARK in name}
    near = Near(tensors, quant, config, _peek(tensors, states, peek))
    suspects = (tensor for tensor in tensors.values() if _holds_codes(tensor, states))
    found = {tensor.name: result for tensor in suspects if (result := _find(tensor, near, states)) is not None}
    return _account(tensors, found, quant)


def _peek(tensors: Mapping[str, StoredTensor], states: dict[str, str], peek: Peek | None) -> Mapping[str, bytes]:
    """Reads the states of bitsandbytes, and one packed shape for all weights that are stored alike."""
    alike: dict[tuple, list[str]] = {}
    for name in tensors if peek else ():
        if name.endswith(".weight_shape"):
            alike.setdefault(_stored_form(name, tensors), []).append(name)
    wanted = [*states.values(), *(names[0] for names in alike.values())]
    if peek is None or not wanted:
        return {}
    read = peek([tensors[name] for name in wanted])
    return {**read, **{name: read[names[0]] for names in alike.values() for name in names}}


def _stored_form(shape_name: str, tensors: Mapping[str, StoredTensor]) -> tuple:
    """Shapes of the packed weight and its scale: equal ones have equal logical shapes."""
    stem = shape_name.removesuffix("shape")
    return tuple(tensors[name].shape for end in ("packed", "scale") if (name := stem + end) in tensors)


def _holds_codes(tensor: StoredTensor, states: dict[str, str]) -> bool:
    return tensor.dtype in _CODE_DTYPES or tensor.name.endswith(_PACKED_ENDINGS) or tensor.name in states


def _find(values: StoredTensor, near: Near, states: dict[str, str]) -> Found | None:
    """The scheme of a tensor of codes; None when it is a companion or a plain tensor after all."""
    name, dtype = values.name, values.dtype
    leaf = name.rpartition(".")[2]
    if name in states:
        return find_flat4(values, near.tensors[states[name]], near)
    if leaf == "qweight":
        return find_words(values, near)
    if leaf == "weight_packed":
        return find_pack_quantized(values, near) if dtype == "int32" else find_fp4(values, near)
    if _is_companion(name, near.tensors):
        return None
    if dtype in ONE_BYTE_FLOATS:
        return find_one_byte(values, near)
    if leaf.endswith("_blocks") and (dtype == "uint8"):
        return find_gpt_oss(values, near)
    if dtype == "float4_e2m1fn":
        return find_fp4(values, near)
    return _find_integer_bytes(values, near)


def _find_integer_bytes(values: StoredTensor, near: Near) -> Found | None:
    """uint8 and int8: FP4 pairs, int8 codes, or numbers that are no weight."""
    scb = near.sibling(values, "SCB")
    if scb is not None and values.name.endswith(".weight"):
        return find_bnb_int8(values, scb, near)
    scale = near.scale(values)
    if scale is None:
        is_weight = values.name.endswith("weight") and len(values.shape) >= 2
        return no_scale(values) if is_weight else None
    exponents = scale.dtype in ("float8_e8m0fnu", "uint8", "float8_e4m3fn")
    return find_fp4(values, near) if values.dtype == "uint8" or exponents else find_one_byte(values, near)


_COMPANION_ENDINGS = ("_scale", "_scale_inv", "_scales", "_scale_2", "_zero_point", ".scale", ".absmax", ".scale_inv")


def _is_companion(name: str, tensors: Mapping[str, StoredTensor]) -> bool:
    """A one-byte tensor that scales another (E4M3 scales of NVFP4, E8M0 bytes, int8 zero points)."""
    return name.endswith(_COMPANION_ENDINGS) or STATE_MARK in name


def _account(tensors: Mapping[str, StoredTensor], found: dict[str, Found], quant: QuantConfig) -> Resolution:
    """Sorts every stored tensor: claimed by a weight, ignored, a problem, or plain."""
    problems = [result for result in found.values() if isinstance(result, Problem)]
    logical: dict[str, LogicalTensor] = {}
    owners: dict[str, str] = {}
    for tensor in (result for result in found.values() if isinstance(result, LogicalTensor)):
        problems += _claim(tensor, logical, owners)
    quantised = bool(found) or bool(quant.method)
    blamed = _blamed(found)
    ignored: list[tuple[str, str]] = []
    for name, tensor in tensors.items():
        if name in owners or name in blamed:
            continue
        leaf = name.rpartition(".")[2]
        if leaf in ("weight", "bias") and tensor.dtype not in _CODE_DTYPES and name not in logical:
            logical[name] = LogicalTensor.plain(tensor)
        elif quantised and leaf in IGNORED_LEAVES:
            ignored.append((name, IGNORED_LEAVES[leaf]))
        elif leaf in FOLDED_LEAVES:
            problems.append(folded(tensor))
        elif looks_orphaned(name, tensor.dtype, tensors) or _second_scale(name, owners):
            problems.append(orphan(tensor))
        elif name in logical:
            problems.append(twice(tensor, logical[name]))
        else:
            logical[name] = LogicalTensor.plain(tensor)
    return Resolution(logical, tuple(ignored), problems, quant)


def _blamed(found: dict[str, Found]) -> set[str]:
    """Weights that have a problem, with their companions: one report each is enough."""
    wrong = [name for name, result in found.items() if isinstance(result, Problem)]
    return {name for values in wrong for name in (values, *companions(values))}


def _claim(tensor: LogicalTensor, logical: dict[str, LogicalTensor], owners: dict[str, str]) -> list[Problem]:
    problems = []
    if tensor.name in logical:
        problems.append(twice(tensor.stored["values"], logical[tensor.name]))
    for stored in tensor.stored.values():
        if stored.name in owners:
            problems.append(shared(stored, owners[stored.name], tensor.name))
        owners[stored.name] = tensor.name
    logical[tensor.name] = tensor
    return problems


def _second_scale(name: str, owners: dict[str, str]) -> bool:
    """``X.scale`` beside a one-byte ``X.weight`` that already has a scale under another name."""
    head, _, leaf = name.rpartition(".")
    return leaf == "scale" and f"{head}.weight" in owners
