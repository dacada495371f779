"""The settings that a family writes load its arrays: MaxText's own sizes, and its model files' values."""

from fnmatch import fnmatchcase
from typing import Any

import pytest
from family_cases import CASES, Case
from oracle_data import model, model_names, settings
from tensorferry.mappings.families.config import Config
from tensorferry.mappings.families.family import FamilyOptions
from tensorferry.mappings.families.registry import make_family

_DIMS = {
    "base_num_decoder_layers": "base_num_decoder_layers",
    "base_emb_dim": "emb_dim",
    "base_num_query_heads": "num_query_heads",
    "base_num_kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "base_mlp_dim": "mlp_dim",
    "vocab_size": "vocab_size",
    "num_experts": "num_experts",
    "first_num_dense_layers": "first_num_dense_layers",
    "inhomogeneous_layer_cycle_interval": "inhomogeneous_layer_cycle_interval",
    "logits_via_embedding": "logits_via_embedding",
    "mtp_num_layers": "mtp_num_layers",
}

# Nothing of the checkpoint's layout or arithmetic hangs on these.
_FREE = (
    "enable_dropout", "load_balance_loss_weight", "routed_bias_update_rate", "tokenizer_type", "dtype", "scan_layers",
    "image_*", "*_for_vit", "vision_output_length", "max_position_embeddings", "weight_dtype", "weight_block_size",
    "unquantized_modules", "base_config", "float32_gate_logits", "gdn_chunk_size", "use_multimodal",
    "vision_encoder_block", "log_moe_bias_norms",
)  # fmt: skip

_TABLE = "the oracle's config.json has another value than MaxText's model file"
_NAME = "MaxText takes it from the model's name, not from its model file"
_UNUSED = "only read with logits_via_embedding"
_KNOWN = {
    ("kimi-k2-1t", "normalization_layer_epsilon"): _TABLE,
    ("gemma3-*", "rope_max_timescale"): _TABLE,
    ("llama3.1-405b", "rope_max_timescale"): _TABLE,
    ("qwen3-4b-thinking-2507", "rope_max_timescale"): _TABLE,
    ("olmo3-*", "rope_type"): _TABLE,
    ("olmo3-*", "rope_factor"): _TABLE,
    ("olmo3-*", "rope_truncate"): _TABLE,
    ("olmo3-*", "original_max_position_embeddings"): _TABLE,
    ("llama3.1-*", "rope_type"): _NAME,
    ("qwen*", "normalize_embedding_logits"): _UNUSED,
}


def emitted(name: str) -> dict[str, Any]:
    oracle, case = model(name), CASES.get(name, Case())
    mode = "scan" if "scan" in oracle.trees else "unscan"
    base = (model(case.config_of) if case.config_of else oracle).hf_config or {}
    options = FamilyOptions(scan_layers=mode == "scan", vocab_size=oracle.dims["vocab_size"], **case.options)
    names = oracle.trees[mode].names | set(case.names)
    return dict(make_family(Config({**base, **case.config}), names, options).settings)


def compared() -> list[str]:
    return [name for name in model_names() if not CASES.get(name, Case()).refused]


@pytest.mark.parametrize("name", compared())
def test_sizes_equal_maxtexts(name: str) -> None:
    dims, ours = model(name).dims, emitted(name)
    found = {key: ours[key] for key in _DIMS if key in ours}
    assert found == {key: dims[_DIMS[key]] for key in found}
    assert ours["decoder_block"].upper() == dims["decoder_block"].removeprefix("DecoderBlockType.")


@pytest.mark.parametrize("name", [name for name in compared() if name in settings()[1]])
def test_settings_equal_the_model_files(name: str) -> None:
    """Whatever MaxText's file of this model sets, we set alike, or leave at the same default."""
    defaults, models = settings()
    ours = {key: value for key, value in emitted(name).items() if key in defaults}
    wanted = {key: _number(value) for key, value in (defaults | models[name]).items()}
    found = {key: _number(value) for key, value in (defaults | ours).items()}
    differing = {key: (found.get(key), wanted[key]) for key in wanted if found.get(key) != wanted[key]}
    assert {key: pair for key, pair in differing.items() if not _excused(name, key)} == {}


def test_every_excuse_is_needed() -> None:
    """An excuse whose difference is gone must go too."""
    defaults, models = settings()
    needed = set()
    for name in compared():
        if name in models:
            ours = defaults | emitted(name)
            wanted = defaults | models[name]
            keys = {k for k in wanted if _number(ours.get(k)) != _number(wanted[k])}
            needed |= {pair for pair in _KNOWN if fnmatchcase(name, pair[0]) and pair[1] in keys}
    assert needed == set(_KNOWN)


def _excused(name: str, key: str) -> bool:
    free = any(fnmatchcase(key, pattern) for pattern in _FREE)
    return free or any(fnmatchcase(name, model_) and key == key_ for model_, key_ in _KNOWN)


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-6 as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
