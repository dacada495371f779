"""The FP8 checkpoint whose codes and scales an export keeps where the weights are unchanged."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mappings.arrays import FLOATS
from mappings.problems import PlanError, Problem
from mappings.quantisation import resolve
from mappings.tensors import LogicalTensor, StoredTensor
from pipelines.checkpoint import Checkpoint, open_checkpoint
from pipelines.exporting.repository import QUANTISATION_KEYS


@dataclass(frozen=True)
class Fp8Source:
    """What ``--fp8-from`` names.

    Attributes:
      checkpoint: its headers and files; None without the option.
      low_bit: its quantised weights by name.
      dtypes: dtypes of its other tensors.
      copied: tensors that belong to no weight (scales of activations): written byte for byte.
    """

    checkpoint: Checkpoint | None = None
    low_bit: Mapping[str, LogicalTensor] = field(default_factory=dict, repr=False)
    dtypes: Mapping[str, str] = field(default_factory=dict, repr=False)
    copied: tuple[StoredTensor, ...] = field(default=(), repr=False)

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

    @property
    def config(self) -> Mapping[str, Any] | None:
        """Its quantisation keys of config.json; None without the option."""
        if self.checkpoint is None:
            return None
        return {key: self.checkpoint.config[key] for key in QUANTISATION_KEYS if key in self.checkpoint.config}

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
    return Fp8Source(checkpoint, low_bit, dtypes, copied)
