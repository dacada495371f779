"""The FP8 checkpoint whose codes and scales an export keeps where the weights are unchanged."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tensorferry.mappings.lowbit.quantisation import resolve
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.plan.target_arrays import FLOATS
from tensorferry.mappings.words.problems import PlanError, Problem
from tensorferry.pipelines.huggingface.checkpoint import Checkpoint, open_checkpoint
from tensorferry.pipelines.huggingface.repository import QUANTISATION_KEYS, Repository


@dataclass(frozen=True)
class Fp8Source:
    """The FP8 checkpoint whose scheme an export keeps: ``--fp8-from``, or ``--config`` where the source carries FP8.

    Attributes:
      checkpoint: its headers and files; None when there is none, or its weights are not at hand.
      low_bit: its quantised weights by name.
      dtypes: dtypes of its other tensors.
      copied: tensors that belong to no weight (scales of activations): written byte for byte.
      config: its quantisation keys of config.json; None when weights leave as numbers.
    """

    checkpoint: Checkpoint | None = None
    low_bit: Mapping[str, LogicalTensor] = field(default_factory=dict, repr=False)
    dtypes: Mapping[str, str] = field(default_factory=dict, repr=False)
    copied: tuple[StoredTensor, ...] = field(default=(), repr=False)
    config: Mapping[str, Any] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return self.checkpoint.source.url if self.checkpoint else ""

    @property
    def digest(self) -> str:
        return self.checkpoint.digest if self.checkpoint else ""

    @property
    def order(self) -> tuple[str, ...]:
        """Names of what it stores, in the order of its files."""
        return tuple(self.checkpoint.tensors) if self.checkpoint else ()

    def files(self) -> dict[str, bytes]:
        """Its files that tell of the quantisation beside config.json."""
        if self.checkpoint is None:
            return {}
        sizes = self.checkpoint.source.list()
        return {name: self.checkpoint.source.read(name, 0, sizes[name]) for name in self.checkpoint.quant_config_files}


def open_fp8_source(url: str) -> Fp8Source:
    """Opens the FP8 checkpoint by its headers; an empty URL is none.

    Raises:
      PlanError: it cannot be read, or nothing in it is quantised.
    """
    if not url:
        return Fp8Source()
    checkpoint = open_checkpoint(url)
    found = resolve(checkpoint.tensors, checkpoint.config, checkpoint.quant_config_files)
    if found.problems:
        raise PlanError(found.problems)
    low_bit = {name: tensor for name, tensor in found.logical.items() if tensor.scheme != "plain"}
    if not low_bit:
        fix = "Give the checkpoint whose scales shall be kept, or leave the option out."
        raise PlanError([Problem(url, "quantised weights (--fp8-from)", "none", fix)])
    plain = {name: tensor.dtype for name, tensor in found.logical.items() if name not in low_bit}
    dtypes = {name: dtype for name, dtype in plain.items() if dtype in FLOATS}
    copied = tuple(checkpoint.tensors[name] for name in dict(found.ignored))
    return Fp8Source(checkpoint, low_bit, dtypes, copied, quantisation_of(checkpoint.config))


def open_own_scheme(repository: Repository) -> Fp8Source:
    """The FP8 scheme of the repository that ``--config`` names; none when its weights are not there, or not FP8."""
    if not repository.dtypes or not repository.quantised:
        return Fp8Source()
    own = open_fp8_source(repository.source.url)
    return own if any(str(one.params.get("code")).startswith("float8") for one in own.low_bit.values()) else Fp8Source()


def quantisation_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The quantisation keys of a config.json."""
    return {key: config[key] for key in QUANTISATION_KEYS if key in config}
