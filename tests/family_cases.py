"""What the oracle's models need besides what the oracle says of them: one line per special case."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """What a model needs besides what the oracle says of it.

    Attributes:
      config: changes to the oracle's config.json, or the whole of it where the oracle has none.
      config_of: take the config.json of this other model.
      options: family options.
      moved: our array names that differ from the tree's on purpose, tree's name part to ours, with axes unchanged.
      names: tensors of the checkpoint that the oracle's mapping lacks.
      spurious: pattern of tensors that the oracle's synthetic checkpoint holds and no real one does.
      refused: why MaxText has no layout to compare with.
    """

    config: dict[str, Any] = field(default_factory=dict)
    config_of: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    moved: tuple[tuple[str, str], ...] = ()
    names: tuple[str, ...] = ()
    spurious: str = ""
    refused: str = ""


_NO_TABLE = "MaxText knows neither sizes nor names of this model: its tables disagree with each other"
# The router bias goes where both of MaxText's loaders take it, which is not where its tree declares it.
_ROUTER_BIAS = (("MoEBiasVar-", "params-"),)

CASES: dict[str, Case] = {
    # MaxText's shape table of Gemma 3 lists biases; its config says that there are none.
    "gemma3-4b": Case(spurious="*_proj.bias"),
    "gemma3-4b+mm": Case(config_of="gemma3-4b", options={"multimodal": True}),
    "llama3.1-8b+fp8": Case(refused="FP8 trees: see test_carried_scales"),
    "llama3.1-8b+fp8block": Case(refused="FP8 trees: see test_carried_scales"),
    "qwen3.5-35b-fp8": Case(refused=_NO_TABLE),
    "deepseek3-671b": Case(moved=_ROUTER_BIAS),
    "deepseek3-671b+mtp": Case(config_of="deepseek3-671b", options={"mtp": True}, moved=_ROUTER_BIAS),
    "deepseek3.2-671b": Case(moved=_ROUTER_BIAS),
    "kimi-k2-1t": Case(moved=_ROUTER_BIAS),
}
