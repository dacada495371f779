"""A low-rank adapter as PEFT saves it: what its config says, and what its tensors are called.

PEFT keeps A ``[rank, in]`` and B ``[out, rank]`` beside a weight ``[out, in]``, which becomes W + scale B A. For an
embedding ``[vocab, embed]`` it keeps A ``[rank, vocab]`` and B ``[embed, rank]``, and W becomes W + scale (B A)ᵀ.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tensorferry.mappings.lora.adapter_family import PREFIX
from tensorferry.mappings.lora.peft_config import AdapterConfig, read_config
from tensorferry.mappings.lora.peft_files import ADAPTER_CONFIG as CONFIG_FILE
from tensorferry.mappings.lora.peft_files import ADAPTER_FILE as TENSORS_FILE
from tensorferry.mappings.lowbit.tensors import StoredTensor
from tensorferry.mappings.words.problems import Problem

_LINEAR = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])(?:\.(?P<adapter>[^.]+))?\.weight")
_EMBEDDING = re.compile(r"(?P<module>.+)\.lora_embedding_(?P<half>[AB])(?:\.(?P<adapter>[^.]+))?")
_WRAPPED = re.compile(r"\.(?:base_layer|modules_to_save\.[^.]+|original_module)(?=\.)")
_NESTED = ".base_layer"
_FLOATS = frozenset({"float32", "bfloat16", "float16", "float64"})


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
