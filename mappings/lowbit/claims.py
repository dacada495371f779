"""What the config says about the weights: read from wherever it is, in one form for all methods."""

import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

SUPPORTED_METHODS = (
    "awq",
    "bitsandbytes",
    "compressed-tensors",
    "fbgemm_fp8",
    "fp8",
    "gptq",
    "modelopt",
    "mxfp4",
    "mxfp8",
    "quark",
)
_METHOD_ALIASES = {
    "gpt_oss_mxfp4": "mxfp4",
    "compressed_tensors": "compressed-tensors",
    "fbgemm-fp8": "fbgemm_fp8",
    "modelopt_fp8": "modelopt",
    "modelopt_fp4": "modelopt",
    "modelopt_mxfp8": "modelopt",
    "modelopt_mixed": "modelopt",
    "gptq_v2": "gptq",
}
_MOVED_PREFIXES = re.compile(r"^(?:model\.|language_model\.|thinker\.)+")


@dataclass(frozen=True)
class Claim:
    """One way in which the config says weights are stored.

    Attributes:
      kind: ``fp8``, ``fp4`` or ``int``.
      bits: per value.
      strategy: ``tensor``, ``channel``, ``group``, ``block``, or empty when the config does not say.
      block: block length along the last axes, when the config states one (``(1, group)`` for groups).
      symmetric: no zero points.
      targets: module names or patterns; empty means every module.
      text: the config's own words, for messages.
    """

    kind: str
    bits: int
    strategy: str = ""
    block: tuple[int, ...] | None = None
    symmetric: bool = True
    targets: tuple[str, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class QuantConfig:
    """The quantisation part of a checkpoint's configuration.

    Attributes:
      method: normalised name; empty when the config states none.
      where: the file and key it was read from.
      claims: what it says about weights.
      exhaustive: whether a weight of a kind that no claim names contradicts the config.
      raw: the section itself.
    """

    method: str = ""
    where: str = "config.json (no quantization_config)"
    claims: tuple[Claim, ...] = ()
    exhaustive: bool = False
    raw: dict[str, Any] = field(default_factory=dict)

    def of(self, module: str, kind: str, bits: int) -> tuple[Claim, ...]:
        """The claims about a module's weight if it is of this kind and width; explicit targets win."""
        fitting = [claim for claim in self.claims if (claim.kind, claim.bits) == (kind, bits)]
        explicit = [claim for claim in fitting if _names(claim.targets, module)]
        return tuple(explicit or (claim for claim in fitting if _everywhere(claim.targets)))

    @property
    def text(self) -> str:
        """What the config claims, in its own words."""
        return "; ".join(claim.text for claim in self.claims) or self.method or "nothing"


def _names(targets: tuple[str, ...], module: str) -> bool:
    if not targets:
        return False
    exact, patterns = _sorted_targets(targets)
    bare = _MOVED_PREFIXES.sub("", module)
    return bare in exact or any(_matches(pattern, module) for pattern in patterns)


@lru_cache(maxsize=256)
def _sorted_targets(targets: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
    exact = frozenset(_MOVED_PREFIXES.sub("", t) for t in targets if not t.startswith("re:") and "*" not in t)
    return exact, tuple(t for t in targets if t.startswith("re:") or "*" in t)


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return fnmatchcase(module, pattern)


def _everywhere(targets: tuple[str, ...]) -> bool:
    """Class names (``Linear``) stand for every module."""
    return not targets or any("." not in t and t[:1].isupper() for t in targets)


def read_config(config: dict[str, Any], files: dict[str, dict[str, Any]]) -> QuantConfig:
    """Finds the quantisation section and reads its claims.

    Args:
      config: ``config.json``.
      files: other configuration files by name: ``hf_quant_config.json``, ``quantize_config.json``,
        ``params.json``.
    """
    where, raw = _section(config, files)
    if not raw:
        return QuantConfig()
    if isinstance(raw.get("quantization"), dict):  # modelopt's own file form, pasted into config.json
        raw = {**raw, **raw["quantization"]}
    method = _method(where, raw)
    if method == "compressed-tensors":
        return QuantConfig(method, where, _compressed_tensors(raw), True, raw)
    if method == "modelopt":
        return QuantConfig(method, where, *_modelopt(raw), raw)
    if method == "quark":
        return QuantConfig(method, where, _quark(raw), False, raw)
    if method in ("gptq", "awq"):
        return QuantConfig(method, where, _integer_words(raw), True, raw)
    return QuantConfig(method, where, _others(method, raw), False, raw)


def _section(config: dict[str, Any], files: dict[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    for key in ("quantization_config", "compression_config"):
        if config.get(key):
            return f"{key} in config.json", config[key]
        text = config.get("text_config") or {}
        if text.get(key):
            return f"text_config.{key} in config.json", text[key]
    if "quantization" in files.get("hf_quant_config.json", {}):
        return "quantization in hf_quant_config.json", files["hf_quant_config.json"]["quantization"]
    if files.get("quantize_config.json"):
        return "quantize_config.json", files["quantize_config.json"]
    if files.get("params.json", {}).get("quantization"):
        return "quantization in params.json", files["params.json"]["quantization"]
    return "", {}


def _method(where: str, raw: dict[str, Any]) -> str:
    method = str(raw.get("quant_method", "")).lower()
    if not method and "quant_algo" in raw:
        method = "modelopt"
    if not method and where.startswith("quantize_config"):
        method = "awq" if "w_bit" in raw else "gptq"
    if not method and "qformat_weight" in raw:
        method = "fp8" if "fp8" in str(raw["qformat_weight"]) else str(raw["qformat_weight"])
    if not method and (raw.get("load_in_4bit") or raw.get("load_in_8bit")):
        method = "bitsandbytes"
    if not method and "config_groups" in raw:
        method = "compressed-tensors"
    return _METHOD_ALIASES.get(method, method)


def _compressed_tensors(raw: dict[str, Any]) -> tuple[Claim, ...]:
    return tuple(
        claim
        for group in (raw.get("config_groups") or {}).values()
        if isinstance(group, dict) and group.get("weights")
        for claim in [_compressed_group(group, group.get("format") or raw.get("format") or "")]
    )


def _compressed_group(group: dict[str, Any], form: str) -> Claim:
    weights = group["weights"]
    bits, strategy = int(weights.get("num_bits", 8)), str(weights.get("strategy") or "")
    kind = {"float": f"fp{bits}"}.get(weights.get("type", "int"), "int")
    size = weights.get("group_size")
    block = tuple(weights["block_structure"]) if weights.get("block_structure") else None
    if strategy in ("group", "tensor_group") and size and size > 0:
        block = (1, int(size))
    said = {key: weights.get(key) for key in ("num_bits", "type", "strategy", "group_size", "block_structure")}
    words = [f"{key} {value}" for key, value in said.items() if value is not None]
    text = ", ".join([f"format {form}"] * bool(form) + words)
    strategy = "group" if strategy == "tensor_group" else strategy
    targets = tuple(group.get("targets") or ())
    return Claim(kind, bits, strategy, block, bool(weights.get("symmetric", True)), targets, text)


_MODELOPT = {
    "FP8": Claim("fp8", 8, "tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": Claim("fp8", 8, "channel"),
    "FP8_PB_WO": Claim("fp8", 8, "block", (128, 128)),
    "MXFP8": Claim("fp8", 8, "group", (1, 32)),
    "NVFP4": Claim("fp4", 4, "group", (1, 16)),
    "NVFP4_SVDQUANT": Claim("fp4", 4, "unsupported"),
    "W4A16_NVFP4": Claim("fp4", 4, "group", (1, 16)),
    "MXFP4": Claim("fp4", 4, "group", (1, 32)),
}


def _modelopt(raw: dict[str, Any]) -> tuple[tuple[Claim, ...], bool]:
    algo = str(raw.get("quant_algo") or "").upper()
    layers = raw.get("quantized_layers") or {}
    if not layers and "config_groups" in raw and algo not in _MODELOPT:
        return _compressed_tensors(raw), False
    if not layers:
        return tuple(_modelopt_claim(algo, raw, ())), algo in _MODELOPT
    kinds: dict[tuple, list[str]] = {}
    for module, layer in layers.items():
        key = (str(layer.get("quant_algo") or "").upper(), layer.get("group_size"))
        kinds.setdefault(key, []).append(module)
    return tuple(
        claim
        for (layer_algo, size), modules in kinds.items()
        for claim in _modelopt_claim(layer_algo, {"group_size": size}, tuple(modules))
    ), False


def _modelopt_claim(algo: str, raw: dict[str, Any], targets: tuple[str, ...]) -> list[Claim]:
    known = _MODELOPT.get(algo)
    if known is None or known.strategy == "unsupported":
        return []
    block = known.block
    if known.strategy == "group" and raw.get("group_size"):
        block = (1, int(raw["group_size"]))
    text = f"quant_algo {algo}" + (f", group_size {block[1]}" if block and known.strategy == "group" else "")
    return [Claim(known.kind, known.bits, known.strategy, block, True, targets, text)]


def _quark(raw: dict[str, Any]) -> tuple[Claim, ...]:
    weight = (raw.get("global_quant_config") or {}).get("weight") or {}
    weight = weight[0] if isinstance(weight, list) else weight
    dtype, scheme = str(weight.get("dtype", "")), str(weight.get("qscheme", "")).removeprefix("per_")
    kind = {"fp8": ("fp8", 8), "fp4": ("fp4", 4)}.get(dtype[:3])
    if kind is None:
        return ()
    size = weight.get("block_size") or ((1, weight["group_size"]) if weight.get("group_size") else None)
    block = tuple(int(n) for n in size) if size and scheme in ("group", "block") else None
    return (Claim(*kind, scheme, block, True, (), f"dtype {dtype}, qscheme per_{scheme}"),)


def _integer_words(raw: dict[str, Any]) -> tuple[Claim, ...]:
    bits, size = raw.get("bits", raw.get("w_bit")), raw.get("group_size", raw.get("q_group_size", -1))
    if not bits:
        return ()
    block = (1, int(size)) if size and int(size) > 0 else None
    symmetric = bool(raw.get("sym", not raw.get("zero_point", False)))
    return (Claim("int", int(bits), "group", block, symmetric, (), f"bits {bits}, group_size {size}"),)


def _others(method: str, raw: dict[str, Any]) -> tuple[Claim, ...]:
    if method == "fp8":
        block = tuple(raw["weight_block_size"]) if raw.get("weight_block_size") else None
        text = f"weight_block_size {list(block)}" if block else "quant_method fp8 without weight_block_size"
        return (Claim("fp8", 8, "block" if block else "", block, True, (), text),)
    if method == "fbgemm_fp8":
        return (Claim("fp8", 8, "channel", None, True, (), "quant_method fbgemm_fp8"),)
    if method == "mxfp8":
        size = int(raw.get("group_size") or 32)
        return (Claim("fp8", 8, "group", (1, size), True, (), f"quant_method mxfp8, group {size}"),)
    if method == "mxfp4":
        return (Claim("fp4", 4, "group", (1, 32), True, (), "quant_method mxfp4, group 32"),)
    return ()
