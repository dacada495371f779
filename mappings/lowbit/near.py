"""What a recogniser sees beside one tensor of codes: its siblings, the config, and small tensors already read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tensorferry.mappings.lowbit.claims import Claim, QuantConfig
from tensorferry.mappings.lowbit.companion_names import companion, logical_name, scale_aliases, scale_of, stem_of
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.words.problems import Problem

ONE_BYTE_FLOATS = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
_NUMBERS = ("float32", "bfloat16", "float16", "float64")

Found = LogicalTensor | Problem


@dataclass(frozen=True)
class Near:
    """The surroundings of a tensor.

    Attributes:
      tensors: every stored tensor by name.
      quant: what the config says.
      config: the whole ``config.json``.
      peeked: bytes of the few small tensors that had to be read to plan, by name.
    """

    tensors: Mapping[str, StoredTensor]
    quant: QuantConfig
    config: Mapping[str, Any]
    peeked: Mapping[str, bytes] = field(default_factory=dict)

    def scale(self, values: StoredTensor) -> StoredTensor | None:
        """The scale of ``values`` under whatever name, in whatever file."""
        name = scale_of(values.name, self.tensors)
        return None if name is None else self.tensors[name]

    def companion(self, values: StoredTensor, suffix: str) -> StoredTensor | None:
        """``X.weight_<suffix>`` beside ``X.weight``."""
        return self.tensors.get(companion(values.name, suffix))

    def sibling(self, values: StoredTensor, leaf: str) -> StoredTensor | None:
        """``X.<leaf>`` beside ``X.weight`` or ``X.qweight``."""
        return self.tensors.get(values.name.rpartition(".")[0] + "." + leaf)

    def claims(self, values: StoredTensor, kind: str, bits: int) -> tuple[Claim, ...]:
        """What the config says of this weight if it is of this kind."""
        return self.quant.of(module_of(values.name), kind, bits)


def module_of(name: str) -> str:
    """The module that owns a weight: ``a.b`` of ``a.b.weight``."""
    return logical_name(name).removesuffix(".weight")


def encoding_of(scale: StoredTensor) -> str | None:
    """How the scale's elements are numbers; None when they cannot be."""
    if scale.dtype in ("float8_e8m0fnu", "uint8"):
        return "e8m0"
    if scale.dtype in _NUMBERS:
        return "float"
    return scale.dtype if scale.dtype in ONE_BYTE_FLOATS else None


def seen(tensor: StoredTensor) -> str:
    """Dtype and shape of a stored tensor, as the header states them."""
    return f"{tensor.dtype} {list(tensor.shape)}"


def no_scale(values: StoredTensor) -> Problem:
    """A one-byte weight that has no scale under any name."""
    names = ", ".join(alias.removeprefix(stem_of(values.name)) for alias in scale_aliases(values.name))
    return Problem(
        name=values.name,
        expected=f"a scale beside the {values.dtype} weight (looked for {names})",
        found="no scale in any file of the checkpoint",
        fix="Without its scale the weight would be wrong by its factor; the checkpoint is incomplete.",
        file=values.file,
        rule="a one-byte weight needs its scale",
    )


def bad_scale_dtype(values: StoredTensor, scale: StoredTensor, wanted: str) -> Problem:
    """A scale whose dtype cannot be a scale of these values."""
    return Problem(
        name=scale.name,
        expected=f"{wanted} for the {seen(values)} weight {values.name}",
        found=seen(scale),
        fix="This packing is not supported.",
        file=scale.file,
        rule="the scale's dtype tells the scheme",
    )


def disagreement(values: StoredTensor, near: Near, header: str) -> Problem:
    """The header and the config say different things; both are shown."""
    return Problem(
        name=values.name,
        expected=f"{near.quant.text} ({near.quant.where})",
        found=header,
        fix="The header and the config disagree: correct the config, or take the config that belongs to these files.",
        file=values.file,
        rule="header and config must agree",
    )


def missing(values: StoredTensor, names: str, why: str) -> Problem:
    """A companion that the scheme cannot do without."""
    return Problem(
        name=values.name,
        expected=f"{names} beside the {seen(values)} weight",
        found="none in any file of the checkpoint",
        fix=why,
        file=values.file,
        rule="every companion of a scheme is required",
    )
