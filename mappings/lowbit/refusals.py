"""What the config alone is enough to refuse, and the words for tensors that no weight claimed."""

from tensorferry.mappings.lowbit.claims import SUPPORTED_METHODS, QuantConfig
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.words.problems import Problem

_MODELOPT_ALGORITHMS = (
    "FP8",
    "FP8_PB_WO",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "MIXED_PRECISION",
    "MXFP4",
    "MXFP8",
    "NVFP4",
    "W4A16_NVFP4",
)
_GPTQ_FORMATS = ("gptq", "gptq_v2")


def config_problems(quant: QuantConfig) -> list[Problem]:
    """Refusals that need no tensor: an unknown method, or a variant of a known one."""
    raw = quant.raw
    if not raw:
        return []
    if quant.method not in SUPPORTED_METHODS:
        name = quant.method or "(none)"
        return [_refused("quant_method", name, SUPPORTED_METHODS, quant)]
    if quant.method == "awq" and str(raw.get("version", "gemm")).lower() != "gemm":
        return [_refused("AWQ version", str(raw["version"]), ("gemm",), quant)]
    if quant.method == "gptq" and raw.get("checkpoint_format", "gptq") not in _GPTQ_FORMATS:
        return [_refused("GPTQ checkpoint_format", str(raw["checkpoint_format"]), _GPTQ_FORMATS, quant)]
    if quant.method == "modelopt":
        return _modelopt_problems(quant)
    if quant.method == "quark":
        pack = (raw.get("export") or {}).get("pack_method") or "order"
        return [] if pack == "order" else [_refused("Quark pack_method", str(pack), ("order",), quant)]
    return []


def _modelopt_problems(quant: QuantConfig) -> list[Problem]:
    layers = (quant.raw.get("quantized_layers") or {}).values()
    algorithms = {str(layer.get("quant_algo")).upper() for layer in layers}
    if quant.raw.get("quant_algo"):
        algorithms.add(str(quant.raw["quant_algo"]).upper())
    unknown = sorted(algorithms - {*_MODELOPT_ALGORITHMS, "NONE"})
    return [_refused("modelopt quant_algo", name, _MODELOPT_ALGORITHMS, quant) for name in unknown]


def _refused(what: str, name: str, supported: tuple[str, ...], quant: QuantConfig) -> Problem:
    return Problem(
        name=f"{what} {name}",
        expected=f"one of the supported: {', '.join(supported)}",
        found=f"{name} in {quant.where}",
        fix=f"{name} is not supported; convert the checkpoint to a supported form first.",
    )


def orphan(tensor: StoredTensor) -> Problem:
    """A scale (or another companion) that no weight consumed."""
    return Problem(
        name=tensor.name,
        expected="a quantised weight that uses it",
        found=f"an orphan {tensor.dtype} {list(tensor.shape)} that no weight consumed",
        fix="A scale without its weight means that a weight is missing, renamed or already dequantised.",
        file=tensor.file,
        rule="every scale belongs to one weight",
    )


def folded(tensor: StoredTensor) -> Problem:
    """A factor on the activations that belongs to the weight."""
    return Problem(
        name=tensor.name,
        expected="no factor on the inputs",
        found=f"{tensor.dtype} {list(tensor.shape)}, by which the inputs are multiplied at run time",
        fix="Dropping it would change the model; folding it into the weight is not supported.",
        file=tensor.file,
    )


def twice(tensor: StoredTensor, other: LogicalTensor) -> Problem:
    """Two stored weights with one logical name."""
    return Problem(
        name=tensor.name,
        expected=f"one tensor called {other.name}",
        found=f"also {other.stored['values'].name} (scheme {other.scheme})",
        fix="Two stored weights cannot have the same name; remove one of them.",
        file=tensor.file,
    )


def shared(tensor: StoredTensor, first: str, second: str) -> Problem:
    """One companion that two weights would use."""
    return Problem(
        name=tensor.name,
        expected="one weight that uses it",
        found=f"both {first} and {second}",
        fix="A scale belongs to one weight.",
        file=tensor.file,
    )
