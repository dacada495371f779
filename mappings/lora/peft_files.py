"""What stands beside an adapter's factors: PEFT's adapter_config.json, and MaxText's settings."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"


def peft_config(base: str, rank: int, alpha: float, targets: Sequence[str]) -> dict[str, Any]:
    """The content of adapter_config.json.

    Args:
      base: name or path of the model that it adapts.
      rank: of all its factors.
      alpha: B A is scaled by alpha / rank.
      targets: module names, or their ends.
    """
    return {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": list(targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def module_name(name: str, family: str) -> str:
    """What transformers calls the module of a weight, where that differs from the weight's name in the files.

    Releases before 4.52 stored the language model of a multimodal model as ``language_model.model``; only Llama 4's is
    still called so.

    >>> module_name("language_model.model.layers.0.mlp.up_proj", "gemma3")
    'model.language_model.layers.0.mlp.up_proj'
    >>> module_name("language_model.model.layers.0.mlp.up_proj", "llama4")
    'language_model.model.layers.0.mlp.up_proj'
    """
    if family == "llama4":
        return name
    for stored, module in (("language_model.model.", "model.language_model."), ("language_model.lm_head", "lm_head")):
        if name.startswith(stored):
            return module + name.removeprefix(stored)
    return name


def target_modules(adapted: Iterable[str], known: Collection[str]) -> list[str]:
    """PEFT's ``target_modules``: last names where they mean exactly the adapted modules, whole names elsewhere.

    Args:
      adapted: modules with factors.
      known: every module of the model that has a weight.

    >>> target_modules(["l.0.q", "l.1.q", "l.0.up"], ["l.0.q", "l.1.q", "l.0.up", "l.1.up"])
    ['l.0.up', 'q']
    """
    modules, found = set(adapted), set()
    own: dict[str, set[str]] = {}
    for module in modules.union(known):
        own.setdefault(module.rpartition(".")[2], set()).add(module)
    for module in modules:
        last = module.rpartition(".")[2]
        found.add(last if own[last] <= modules else module)
    return sorted(found)


def maxtext_lora(rank: int, alpha: float, module_path: str) -> dict[str, Any]:
    """MaxText's ``lora`` settings, as it records them in a step's custom metadata.

    Args:
      rank: of all factors.
      alpha: a b is scaled by alpha / rank.
      module_path: regular expression for the modules with factors.
    """
    return {
        "enable_lora": True,
        "lora_rank": rank,
        "lora_alpha": float(alpha),
        "lora_module_path": module_path,
        "lora_weight_qtype": None,
        "lora_tile_size": None,
        "lora_restore_path": "",
    }
