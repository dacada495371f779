"""Small checkpoints of every family and spelling, to go to MaxText's layout and back."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import numpy as np
import small_deepseek as deepseek
import small_gemma as gemma
import small_qwen as qwen
from checkpoints import llama_config, llama_tensors, qwen3_moe_config, qwen3_moe_tensors
from formulas import E, V, tensors_of
from oracle_data import MODES, value_names, values
from oracle_models import case_of, compiled_rules, headers, oracle
from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import Family, FamilyOptions
from tensorferry.mappings.families.registry import make_family
from tensorferry.transforms.ops import Shift

Tensors = Mapping[str, np.ndarray]
_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(\w+)\.weight")
_MISTRAL = llama_config(model_type="mistral", architectures=["MistralForCausalLM"], rope_scaling=None)
_PARTS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


@dataclass(frozen=True)
class Trip:
    """A checkpoint and how it is converted.

    Attributes:
      config: its config.json.
      make: makes its tensors.
      options: choices about the mapping.
      modes: those that the family has for it.
      dtype: of the conversion's arrays.
    """

    config: Mapping[str, Any]
    make: Callable[[], Tensors]
    options: Mapping[str, Any] = field(default_factory=dict)
    modes: tuple[str, ...] = MODES
    dtype: str = "bfloat16"

    def mapping(self, mode: str) -> FamilyOptions:
        """The options of a conversion."""
        return FamilyOptions(scan_layers=mode == "scan", **self.options)

    def family(self, mode: str) -> Family:
        """The family that converts it."""
        return make_family(Config(dict(self.config)), self.make(), self.mapping(mode))


def rounded_modules(name: str) -> tuple[frozenset[str], frozenset[str]]:
    """Names of the modules of a family that come back rounded: scaled ones by a unit in the last place at most, and
    shifted ones, which lose what is too small beside the shift."""
    scaled, shifted = set(), set()
    for trip, family in _families():
        if family.name == name:
            for rule in family.plain_rules(trip.modes[0] == "scan"):
                if any(op.elementwise for op in rule.ops):
                    kind = shifted if any(isinstance(op, Shift) for op in rule.ops) else scaled
                    kind.add(module_of(rule.source.text))
    return frozenset(scaled), frozenset(shifted)


@cache
def _families() -> list[tuple[Trip, Family]]:
    return [(trip, trip.family(trip.modes[0])) for trip in trips().values()]


def module_of(name: str) -> str:
    """The last module of a tensor: ``q_proj`` of ``model.layers.3.self_attn.q_proj.weight``."""
    return name.removesuffix(".weight").rpartition(".")[2]


@cache
def trips() -> dict[str, Trip]:
    """Every checkpoint by a name that begins as its family's."""
    return {
        **{name: _of_oracle(name) for name in value_names() if not name.endswith("-fp8")},
        **_of_formulas(),
        **_spellings(),
        **_with_towers(),
    }


def _of_oracle(name: str) -> Trip:
    """A checkpoint that MaxText's converter takes, without what no real one holds, its vocabulary padded as there."""
    rows = values(name).expected["scan"].arrays["params.params.token_embedder.embedding"]["shape"][0]
    spurious = case_of(name).spurious

    def make() -> Tensors:
        tied = {"lm_head.weight"} if values(name).config.get("tie_word_embeddings") else set()
        found = {n: t for n, t in values(name).tensors.items() if n not in tied}
        return {n: t for n, t in found.items() if not fnmatchcase(n, spurious)}

    return Trip(values(name).config, make, {"vocab_size": rows})


def _of_formulas() -> dict[str, Trip]:
    """Odd sizes that go through every factor and every kind of block."""
    vision = {"text_config": qwen.TEXT, "vision_config": qwen.VISION, "tie_word_embeddings": False}
    thinker = {"text_config": qwen.TEXT, "vision_config": qwen.VISION, "audio_config": qwen.AUDIO}
    return {
        "llama": Trip(llama_config(), llama_tensors),
        "llama-tied": Trip(llama_config(tie_word_embeddings=True), lambda: llama_tensors(head=False)),
        "mistral": Trip(_MISTRAL, llama_tensors),
        "gemma2": Trip(gemma.gemma2_config(), lambda: tensors_of(gemma.gemma2_shapes())),
        "gemma4": Trip(gemma.GEMMA4, lambda: tensors_of(gemma.gemma4_shapes())),
        "gemma4-small": Trip(
            gemma.gemma4_small_config(), lambda: tensors_of(gemma.gemma4_small_shapes()), modes=("unscan",)
        ),
        "llama4": Trip(gemma.LLAMA4, lambda: tensors_of(gemma.llama4_shapes())),
        "deepseek3+mtp": Trip(deepseek.V3, deepseek.v3_tensors, {"mtp": True}),
        "deepseek4": Trip(deepseek.V4, deepseek_v4, dtype="source"),
        "deepseek4+int32": Trip(deepseek.V4, lambda: _narrow(deepseek_v4()), modes=("unscan",), dtype="source"),
        "qwen3-vl-moe": Trip(vision | {"model_type": "qwen3_vl_moe"}, _qwen_vl_text),
        "qwen3-vl-moe+mm": Trip(
            vision | {"model_type": "qwen3_vl_moe"}, lambda: {**_qwen_vl_text(), **_qwen_vl_tower()},
            {"multimodal": True}, ("unscan",),
        ),
        "qwen3-omni+mm": Trip(
            {"model_type": "qwen3_omni_moe", "thinker_config": thinker}, _qwen_omni, {"multimodal": True}, ("unscan",)
        ),
    }  # fmt: skip


def deepseek_v4() -> Tensors:
    return tensors_of(deepseek.v4_shapes(), ("gate.bias", "_fn", "_base", "_scale"))


def _narrow(tensors: Tensors) -> Tensors:
    """Tables of expert numbers in int32."""
    return {name: a.astype(np.int32) if a.dtype == np.int64 else a for name, a in tensors.items()}


def _qwen_vl_text() -> Tensors:
    text = qwen.text_shapes("model.language_model.", qwen.fused_inputs_first)
    return tensors_of(text | {"lm_head.weight": (V, E)})


def _qwen_vl_tower() -> Tensors:
    return tensors_of(
        qwen.vision_shapes("model.visual.", "deepstack_merger_list", ("norm", "linear_fc1", "linear_fc2"))
    )


def _qwen_omni() -> Tensors:
    text = qwen.text_shapes("thinker.model.", qwen.separate) | {"thinker.lm_head.weight": (V, E)}
    tower = qwen.vision_shapes("thinker.visual.", "merger_list", ("ln_q", "mlp.0", "mlp.2"))
    return tensors_of(text | tower | qwen.audio_shapes())


def _spellings() -> dict[str, Trip]:
    """Experts as the other version of transformers writes them: fused, or one by one."""

    def fused(name: str) -> Trip:
        trip = _of_oracle(name)
        return Trip(trip.config, lambda: fuse_experts(trip.make()), trip.options)

    separate = _of_oracle("qwen3.5-35b-a3b")
    return {
        "qwen3-moe": Trip(qwen3_moe_config(), qwen3_moe_tensors),
        "qwen3-moe+fused": Trip(qwen3_moe_config(), lambda: qwen3_moe_tensors(fused=True)),
        "mixtral+fused": fused("mixtral-8x7b"),
        "deepseek2+fused": fused("deepseek2-16b"),
        "deepseek3+fused": fused("deepseek3-671b"),
        "qwen3-next+fused": fused("qwen3-next-80b-a3b"),
        "qwen3.5+separate": Trip(separate.config, lambda: split_experts(separate.make()), separate.options),
    }


def fuse_experts(tensors: Tensors) -> dict[str, np.ndarray]:
    """Experts one by one as transformers 5 fuses them."""
    found: dict[str, np.ndarray] = {}
    experts: dict[tuple[str, str], dict[int, np.ndarray]] = {}
    for name, array in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match:
            experts.setdefault((match[1], match[3]), {})[int(match[2])] = array
        else:
            found[name.replace("block_sparse_moe", "mlp")] = array
    whole = {key: np.stack([some[at] for at in range(len(some))]) for key, some in experts.items()}
    for gate, up, down in _PARTS:
        for block in [block for block, part in whole if part == gate]:
            into = block.replace("block_sparse_moe", "mlp")
            found[f"{into}.experts.gate_up_proj"] = np.concatenate([whole[block, gate], whole[block, up]], axis=1)
            found[f"{into}.experts.down_proj"] = whole[block, down]
    return found


def split_experts(tensors: Tensors) -> dict[str, np.ndarray]:
    """The inverse of ``fuse_experts``."""
    found: dict[str, np.ndarray] = {}
    for name, array in tensors.items():
        block, _, part = name.partition(".experts.")
        halves = np.split(array, 2, axis=1) if part == "gate_up_proj" else [array]
        names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(part)
        if names is None:
            found[name] = array
            continue
        for one, half in zip(names, halves, strict=True):
            found |= {f"{block}.experts.{at}.{one}.weight": np.array(matrix) for at, matrix in enumerate(half)}
    return found


# Sizes that stand for published ones where the tower comes with a table of its own; all different.
_TOWER_SIZES: dict[str, Any] = {
    "hidden_size": 12, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 10,
    "vocab_size": 14, "moe_intermediate_size": 5, "shared_expert_intermediate_size": 5, "num_experts": 3,
    "top_k_experts": 2, "num_experts_per_tok": 2, "global_head_dim": 6, "num_global_key_value_heads": 1,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 3, "linear_value_head_dim": 5,
    "query_pre_attn_scalar": 7, "depth": 3, "num_heads": 2, "patch_size": 3, "num_position_embeddings": 11,
    "out_hidden_size": 12, "deepstack_visual_indexes": [0, 2], "position_embedding_size": 11, "image_size": 15,
}  # fmt: skip


def _with_towers() -> dict[str, Trip]:
    """Vision towers whose tables are long: names and shapes as the rules want them, which MaxText's trees confirm."""
    return {
        "gemma3+mm": _small("gemma3-4b+mm", {"num_hidden_layers": 8}, {"num_hidden_layers": 3}),
        "gemma4+mm": _small("gemma4-26b", {"num_hidden_layers": 8}, {"num_hidden_layers": 3}),
        "qwen3.5+mm": _small("qwen3.5-35b-a3b+mm", {"num_hidden_layers": 8}, {}),
        "qwen3-vl+mm": _small("qwen3-vl-2b", {"num_hidden_layers": 3}, {}, ("unscan",)),
    }


def _small(name: str, text: Mapping[str, Any], vision: Mapping[str, Any], modes: tuple[str, ...] = MODES) -> Trip:
    case, known = case_of(name), oracle(name).trees["unscan"]
    config = {**(oracle(case.config_of or name).hf_config or {}), **case.config}
    config["text_config"] = _shrunk(config["text_config"], text)
    config["vision_config"] = _shrunk(config["vision_config"], vision)
    options = {"multimodal": True}
    names = known.names.union(*known.extra.values())
    family = make_family(Config(config), names, FamilyOptions(scan_layers=False, **options))
    shapes = {n: tensor.shape for n, tensor in headers(compiled_rules(family, False)).items()}
    return Trip(config, lambda: tensors_of(shapes), options, modes)


def _shrunk(config: Mapping[str, Any], layers: Mapping[str, Any]) -> dict[str, Any]:
    small = {**config, **{key: size for key, size in _TOWER_SIZES.items() if config.get(key)}, **layers}
    if "layer_types" in small:
        small["layer_types"] = small["layer_types"][: small["num_hidden_layers"]]
    return small
