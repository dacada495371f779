"""What PEFT's adapter_config.json says: ranks and scales, and all that is more than W + scale B A, which is refused."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tensorferry.mappings.lora.peft_files import ADAPTER_CONFIG
from tensorferry.mappings.words.problems import Problem

_RANK, _ALPHA = 8, 8


@dataclass(frozen=True)
class AdapterConfig:
    """What decides the factor of each module.

    Attributes:
      rank: of modules that no pattern names.
      alpha: likewise.
      rank_pattern: regular expression for a module's name, or its end, to its rank.
      alpha_pattern: likewise to its alpha.
      rslora: the scale is alpha / sqrt(rank) instead of alpha / rank.
      target_parameters: ends of names of parameters that are adapted without a module of their own (fused experts).
      targets: names of modules, or their ends, of which some must have factors; none where the config gives a pattern.
    """

    rank: int = _RANK
    alpha: float = _ALPHA
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    rslora: bool = False
    target_parameters: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()

    def rank_of(self, module: str) -> int:
        """The rank of a module.

        >>> AdapterConfig(rank=4, rank_pattern={"q_proj": 2}).rank_of("model.layers.0.self_attn.q_proj")
        2
        """
        return _by_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """What B A is multiplied by for a module.

        >>> AdapterConfig(rank=4, alpha=16).scale_of("lm_head"), AdapterConfig(4, 16, rslora=True).scale_of("lm_head")
        (4.0, 8.0)
        """
        alpha, rank = _by_pattern(self.alpha_pattern, module, self.alpha), self.rank_of(module)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that matches a name, or its end after a dot: PEFT's rule."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def read_config(data: Mapping[str, Any]) -> tuple[AdapterConfig, list[Problem]]:
    """What ``adapter_config.json`` says, and everything in it that cannot be merged."""
    problems = [*_not_lora(data), *_refused(data), *_bad_values(data)]
    if problems:
        return AdapterConfig(), problems
    ranks, alphas = data.get("rank_pattern") or {}, data.get("alpha_pattern") or {}
    rank, alpha = data.get("r", _RANK), data.get("lora_alpha", _ALPHA)
    parameters, targets = tuple(data.get("target_parameters") or ()), data.get("target_modules")
    some = any(data.get(key) is not None for key in ("exclude_modules", "layers_to_transform"))
    named = tuple(targets) if isinstance(targets, list) and not some else ()
    return AdapterConfig(rank, alpha, ranks, alphas, bool(data.get("use_rslora")), parameters, named), []


def _not_lora(data: Mapping[str, Any]) -> Iterator[Problem]:
    kind = data.get("peft_type")
    if kind != "LORA":
        found = "none" if kind is None else str(kind)
        yield _in_config("peft_type", "LORA", found, "Merge it with PEFT and convert what that saves.")


# Config keys that make an adapter more than W + scale B A, with what they do.
_NOT_PLAIN = {
    "use_dora": "DoRA, which rescales the columns of the merged weight",
    "use_qalora": "QA-LoRA, which pools the inputs",
    "use_bdlora": "BD-LoRA, whose factors are block-diagonal",
    "lora_bias": "a bias beside B",
    "kasa_config": "KaSA, which truncates the base weight",
    "monteclora_config": "MonteCLoRA, which adds random factors",
    "arrow_config": "Arrow, which routes between adapters",
    "alora_invocation_tokens": "activated LoRA, which holds for some tokens only and cannot be merged",
    "layer_replication": "replicated layers, which the base model does not have",
    "trainable_token_indices": "rows of the embedding that are trained apart",
    "fan_in_fan_out": "weights stored as [in, out], which no model here has",
}
# Starts that leave the base as it is; the others take their start away from the base weight.
_STARTS = frozenset({None, True, False, "true", "false", "gaussian", "eva", "orthogonal", "mica"})


def _refused(data: Mapping[str, Any]) -> Iterator[Problem]:
    for key, what in _NOT_PLAIN.items():
        if data.get(key):
            yield _in_config(key, "a plain low-rank adapter", what, "Merge it with PEFT and convert what that saves.")
    start = data.get("init_lora_weights")
    if not isinstance(start, str | bool | None) or (start.lower() if isinstance(start, str) else start) not in _STARTS:
        yield _in_config(
            "init_lora_weights", "a start that leaves the base weights alone", f"{start}, which changes them",
            "Save it as plain LoRA (PEFT's path_initial_model_for_weight_conversion), or set it to true where --source "
            "is the changed base.",
        )  # fmt: skip


def _bad_values(data: Mapping[str, Any]) -> Iterator[Problem]:
    if not _is_rank(data.get("r", _RANK)):
        yield _in_config("r", "a whole number above 0", str(data["r"]), _MEND)
    if not _is_number(data.get("lora_alpha", _ALPHA)):
        yield _in_config("lora_alpha", "a number", str(data["lora_alpha"]), _MEND)
    for key, fits in (("rank_pattern", _is_rank), ("alpha_pattern", _is_number)):
        patterns = data.get(key) or {}
        if not isinstance(patterns, dict):
            yield _in_config(key, "an object of names and numbers", str(patterns), _MEND)
            continue
        for pattern, value in patterns.items():
            if not fits(value):
                yield _in_config(f"{key}[{pattern}]", "a number", str(value), _MEND)
            if not _is_expression(pattern):
                yield _in_config(f"{key}[{pattern}]", "a regular expression", "one that does not parse", _MEND)
    parameters = data.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(isinstance(name, str) for name in parameters):
        yield _in_config("target_parameters", "a list of names", str(parameters), _MEND)


_MEND = "Mend the file, or save the adapter again with PEFT."


def _is_rank(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_expression(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def _in_config(key: str, expected: str, found: str, fix: str) -> Problem:
    return Problem(key, expected, found, fix, file=ADAPTER_CONFIG)
