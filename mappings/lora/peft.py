"""A low-rank adapter as PEFT saves it: what its config says, and what its tensors are called.

PEFT keeps A ``[rank, in]`` and B ``[out, rank]`` beside a weight ``[out, in]``, which becomes W + scale B A. For an
embedding ``[vocab, embed]`` it keeps A ``[rank, vocab]`` and B ``[embed, rank]``, and W becomes W + scale (B A)ᵀ.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mappings.lora.family import PREFIX
from mappings.problems import Problem
from mappings.tensors import StoredTensor

CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
_LINEAR = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])(?:\.(?P<adapter>[^.]+))?\.weight")
_EMBEDDING = re.compile(r"(?P<module>.+)\.lora_embedding_(?P<half>[AB])(?:\.(?P<adapter>[^.]+))?")
_WRAPPED = re.compile(r"\.(?:base_layer|modules_to_save\.[^.]+|original_module)(?=\.)")
_NESTED = ".base_layer"
_FLOATS = frozenset({"float32", "bfloat16", "float16", "float64"})
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


@dataclass(frozen=True)
class Pair:
    """The two factors of one module.

    Attributes:
      module: Hugging Face's name of the module, such as ``model.layers.0.mlp.down_proj``.
      a: ``[rank, in]``; for an embedding ``[rank, vocab]``.
      b: ``[out, rank]``; for an embedding ``[embed, rank]``.
      is_embedding: whether the product is transposed before it is added.
      depth: for parameters without a module, how deep the wrapper lies around their module; 0 is the outermost.
    """

    module: str
    a: StoredTensor
    b: StoredTensor
    is_embedding: bool = False
    depth: int = 0


@dataclass(frozen=True)
class Adapter:
    """An adapter, understood from its config and headers.

    Attributes:
      config: what decides ranks and scales.
      pairs: the factors of every module, in the order of their names in the file.
      parameters: the factors of parameters without a module, for which ``module`` is what holds them.
      whole: base tensor's name to the tensor that replaces it (``modules_to_save``, trained biases).
    """

    config: AdapterConfig
    pairs: tuple[Pair, ...] = ()
    parameters: tuple[Pair, ...] = ()
    whole: Mapping[str, StoredTensor] = field(default_factory=dict)

    def scales(self) -> dict[str, float]:
        """Base weight's name to its scale, for every module."""
        return {f"{pair.module}.weight": self.config.scale_of(pair.module) for pair in self.pairs}


def read_adapter(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> tuple[Adapter, list[Problem]]:
    """Understands an adapter: its config and the names, shapes and dtypes of its tensors.

    Args:
      config: content of ``adapter_config.json``.
      tensors: of ``adapter_model.safetensors``, by name.

    Returns:
      The adapter and everything that is wrong with it; with a problem in the config, an adapter without tensors.
    """
    understood, problems = read_config(config)
    if problems:
        return Adapter(understood), problems
    halves, whole, problems = _sorted_tensors(tensors)
    pairs, found = _pairs(halves)
    problems += found
    fused = bool(understood.target_parameters)
    held = {pair.module for pair in pairs if pair.depth} if fused else set()
    parameters = tuple(pair for pair in pairs if pair.module in held or (fused and _is_parameter(pair, understood)))
    plain = tuple(pair for pair in pairs if pair not in parameters)
    problems += [problem for pair in plain for problem in _wrong_ranks(pair, understood)]
    if not pairs and not whole and not problems:
        problems.append(_empty())
    return Adapter(understood, plain, parameters, whole), problems


def _is_parameter(pair: Pair, config: AdapterConfig) -> bool:
    """Whether a module is one whose parameters are named, such as ``….mlp.experts`` of ``mlp.experts.down_proj``."""
    holders = [name.rpartition(".")[0] for name in config.target_parameters]
    return any(pair.module == holder or pair.module.endswith(f".{holder}") for holder in holders if holder)


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
    return Problem(key, expected, found, fix, file=CONFIG_FILE)


_Halves = dict[tuple[str, int, bool], dict[str, StoredTensor]]


def _sorted_tensors(
    tensors: Mapping[str, StoredTensor],
) -> tuple[_Halves, dict[str, StoredTensor], list[Problem]]:
    """Factors by module, depth and kind; tensors that replace one of the base; what is neither."""
    halves: _Halves = {}
    whole: dict[str, StoredTensor] = {}
    problems: list[Problem] = []
    adapters: set[str] = set()
    for name, tensor in tensors.items():
        stem = name.removeprefix(PREFIX)
        match = _LINEAR.fullmatch(stem) or _EMBEDDING.fullmatch(stem)
        if tensor.dtype not in _FLOATS:
            problems.append(_tensor_problem(tensor, "a float tensor", tensor.dtype, "Save it in float32 or bfloat16."))
        elif match is not None:
            key = _module_of(match["module"], is_embedding=".lora_embedding_" in stem)
            half = halves.setdefault(key, {})
            if match["half"] in half:
                problems.append(_tensor_problem(tensor, "one tensor of this half", "another one, of one more adapter",
                                                "Save one adapter alone."))  # fmt: skip
            half[match["half"]] = tensor
            adapters.add(match["adapter"] or "")
        elif "lora_" in stem or not stem.endswith((".weight", ".bias")):
            expected = "lora_A, lora_B, lora_embedding_A, lora_embedding_B or a whole tensor of the base"
            problems.append(_tensor_problem(tensor, expected, f"{tensor.dtype} {list(tensor.shape)}",
                                            "Merge it with PEFT and convert what that saves."))  # fmt: skip
        else:
            whole[_WRAPPED.sub("", stem)] = tensor
    return halves, whole, problems


def _module_of(stem: str, is_embedding: bool) -> tuple[str, int, bool]:
    depth = 0
    while stem.endswith(_NESTED):
        stem, depth = stem.removesuffix(_NESTED), depth + 1
    return stem, depth, is_embedding


def _pairs(halves: _Halves) -> tuple[list[Pair], list[Problem]]:
    pairs, problems = [], []
    for (module, depth, is_embedding), half in halves.items():
        if half.keys() != {"A", "B"}:
            (there, tensor), *_ = half.items()
            missing = "B" if there == "A" else "A"
            problems.append(_tensor_problem(tensor, f"its lora_{missing} beside it", "no such tensor",
                                            "Is the adapter complete?"))  # fmt: skip
            continue
        pairs.append(Pair(module, half["A"], half["B"], is_embedding, depth))
    return pairs, problems


def _wrong_ranks(pair: Pair, config: AdapterConfig) -> Iterator[Problem]:
    if len(pair.a.shape) != 2 or len(pair.b.shape) != 2:
        odd = pair.a if len(pair.a.shape) != 2 else pair.b
        yield _tensor_problem(odd, "two axes: an adapter of a linear layer or an embedding", str(list(odd.shape)),
                              "Leave this module out of the adapter.")  # fmt: skip
        return
    rank, wanted = pair.a.shape[0], config.rank_of(pair.module)
    if pair.b.shape[1] != rank:
        yield _tensor_problem(pair.b, f"[out, {rank}], the rank of its A", str(list(pair.b.shape)), "Mend the adapter.")
    if rank != wanted:
        yield _tensor_problem(pair.a, f"[{wanted}, in], the rank in {CONFIG_FILE}", str(list(pair.a.shape)),
                              "Does the config belong to this adapter?")  # fmt: skip


def _tensor_problem(tensor: StoredTensor, expected: str, found: str, fix: str) -> Problem:
    return Problem(tensor.name, expected, found, fix, file=tensor.file)


def _empty() -> Problem:
    return Problem(TENSORS_FILE, "factors of at least one module", "none", "Is it the adapter that you mean?")


def names(pairs: Iterable[Pair]) -> tuple[str, ...]:
    """The modules of pairs."""
    return tuple(pair.module for pair in pairs)
