"""What a leaf of the old model tree is: weight, random-number stream, custom variable, or ephemeral."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from tensorferry.mappings.tunix.step_tree import Leaf, Path, spell

Role = Literal["weight", "custom", "rng_key", "rng_count", "sown", "cache", "empty"]

# The adapter through which RL and DPO train keeps the model as its only attribute, under this name.
ADAPTER_LEVEL = "base"

_CACHE_BLOCKS = ("KVCache_", "MlaKVCache_")
_CACHE_PREFIXES = ("cached_", "cache_ar_", "cache_prefill_")


@dataclass(frozen=True, slots=True)
class ModelLeaf:
    """A leaf of ``model_params`` under the name the model itself gives it.

    Attributes:
      leaf: as stored.
      path: without the adapter level and without the final ``value`` key of the variable.
      role: what it is.
    """

    leaf: Leaf
    path: Path
    role: Role

    @property
    def name(self) -> str:
        return spell(self.path)


def is_wrapped(leaves: Iterable[Leaf]) -> bool:
    """Whether every leaf sits under the adapter's level (a model with no leaves is not wrapped)."""
    paths = [leaf.path for leaf in leaves]
    return bool(paths) and all(len(path) > 1 and path[0].name == ADAPTER_LEVEL for path in paths)


def unwrap_value(path: Path) -> Path:
    """The path without the final ``value`` of an NNX variable; a projection called ``value`` survives."""
    return path[:-1] if len(path) > 1 and path[-1].name == "value" else path


def is_sown(path: Path) -> bool:
    """A sown value is a tuple inside its variable, so its path ends in ``value`` and a position."""
    return len(path) > 2 and path[-1].kind == "sequence" and path[-2].name == "value"


def is_cache(path: Path) -> bool:
    """A key-value cache of a decoding step."""
    names = [key.name for key in path]
    return any(name.startswith(_CACHE_BLOCKS) for name in names) or names[-1].startswith(_CACHE_PREFIXES)


def rng_part(path: Path) -> str:
    """``key`` or ``count`` when the path is ``…/rngs/<stream>/key|count``; empty otherwise.

    Only the position tells: attention has a projection called ``key`` too.
    """
    if len(path) < 3 or path[-1].name not in ("key", "count"):
        return ""
    holder = path[-3].name
    return path[-1].name if holder == "rngs" or holder.endswith("_rngs") else ""


def _rng_role(leaf: Leaf, path: Path) -> Role | None:
    part = rng_part(path)
    if leaf.prng_impl or (part == "key" and leaf.dtype == "uint32"):
        return "rng_key"
    return "rng_count" if part == "count" and leaf.dtype == "uint32" else None


def role_of(leaf: Leaf, path: Path) -> Role:
    """The role of a leaf by structure alone; custom variables still look like weights here.

    Args:
      leaf: as stored.
      path: its path without the final ``value``.
    """
    if is_sown(leaf.path):
        return "sown"
    if leaf.kind != "array":
        return "empty"
    if is_cache(path):
        return "cache"
    return _rng_role(leaf, path) or "weight"


def model_leaves(leaves: Iterable[Leaf]) -> list[ModelLeaf]:
    """Names and roles of all leaves of ``model_params``, without the adapter level if it wraps them all."""
    stored = list(leaves)
    skip = 1 if is_wrapped(stored) else 0
    named = [(leaf, unwrap_value(leaf.path[skip:])) for leaf in stored]
    return [ModelLeaf(leaf, path, role_of(leaf, path)) for leaf, path in named]


def is_adapter_only(leaves: Iterable[ModelLeaf]) -> bool:
    """Whether all weights are low-rank factors (``…_lora_a``, ``…_lora_b``), without the base model."""
    names = [leaf.name for leaf in leaves if leaf.role == "weight"]
    return bool(names) and all(name.endswith(("_lora_a", "_lora_b")) for name in names)


def mark_custom(leaves: list[ModelLeaf], names: frozenset[str]) -> list[ModelLeaf]:
    """The leaves, with the named weights made custom variables."""
    return [replace(leaf, role="custom") if leaf.role == "weight" and leaf.name in names else leaf for leaf in leaves]


def custom_names(leaves: list[ModelLeaf], moments: frozenset[str]) -> frozenset[str]:
    """Names of variables that the model holds but no optimizer trains, such as the router bias of DeepSeek-3.

    The optimizer runs over parameters only, so a weight-like leaf without a moment is a variable of
    another class. Without moments the router's bias is known by its name.

    Args:
      leaves: the model's leaves.
      moments: names that have a moment, masked ones included; empty when the step has none, or when parts of
        the model are frozen, so that a missing moment says nothing.
    """
    weights = {leaf.name for leaf in leaves if leaf.role == "weight"}
    if moments and moments <= weights:
        return frozenset(weights - moments)
    return frozenset(name for name in weights - moments if name.endswith("/gate/bias"))
