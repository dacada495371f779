"""Small PEFT adapters and their arithmetic in plain numpy: PEFT's own formula, and MaxText's. Nothing of ours."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Arrays = dict[str, np.ndarray]
Ready = Mapping[str, np.ndarray]
PREFIX = "base_model.model."


def factors(weights: Ready, modules: Iterable[str], rank: int, seed: int = 7, dtype: Any = np.float32) -> Arrays:
    """Random A and B of some modules, under the names that PEFT saves."""
    random, found = np.random.default_rng(seed), {}
    for module in modules:
        out, into = weights[f"{module}.weight"].shape
        found[f"{PREFIX}{module}.lora_A.weight"] = random.normal(size=(rank, into)).astype(dtype)
        found[f"{PREFIX}{module}.lora_B.weight"] = random.normal(size=(out, rank)).astype(dtype)
    return found


def merged(weights: Ready, adapter: Ready, scales: Mapping[str, float]) -> Arrays:
    """The weights with an adapter in them, in float32: W + scale B A.

    Args:
      scales: module to its scale.
    """
    found = {name: np.asarray(weight).astype(np.float32) for name, weight in weights.items()}
    for module, scale in scales.items():
        a, b = (adapter[f"{PREFIX}{module}.lora_{half}.weight"].astype(np.float32) for half in "AB")
        found[f"{module}.weight"] += np.float32(scale) * (b @ a)
    return found


def merged_kernels(kernels: Ready, adapter: Ready, scale: float, scanned: bool, suffix: str = "") -> Arrays:
    """MaxText's kernels with qwix's factors in them: each layer's ``[in, r]`` times ``[r, out]``, shaped as its kernel.

    Args:
      kernels: dotted names to arrays; ``….kernel`` has factors ``….kernel_lora_a`` and ``….kernel_lora_b``.
      scale: alpha / rank.
      scanned: factors of rank three have layers on axis 1, where the kernel has them too.
      suffix: what follows the factors' names.
    """
    found = {name: kernel.astype(np.float32) for name, kernel in kernels.items()}
    for name in found:
        if f"{name}_lora_a{suffix}" not in adapter:
            continue
        a, b = (adapter[f"{name}_lora_{half}{suffix}"].astype(np.float32) for half in "ab")
        if a.ndim == 2:
            found[name] += np.float32(scale) * (a @ b).reshape(found[name].shape)
            continue
        assert scanned
        for layer in range(a.shape[1]):
            own = found[name][:, layer]
            own += np.float32(scale) * (a[:, layer] @ b[:, layer]).reshape(own.shape)
    return found


def adapter_config(modules: Iterable[str], rank: int, alpha: float, **changes: Any) -> dict[str, Any]:
    """What PEFT 0.17 writes, with some defaults left out."""
    return {
        "base_model_name_or_path": "somebody/tiny",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.05,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "alpha_pattern": {},
        "rank_pattern": {},
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    } | changes


def write_adapter(folder: Path, config: Mapping[str, Any], tensors: Ready) -> Path:
    """An adapter's folder as PEFT saves it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))
    save_file(dict(tensors), folder / "adapter_model.safetensors", {"format": "pt"})
    return folder
