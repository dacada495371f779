"""What a PEFT adapter says: ranks and scales by PEFT's rules; everything else is refused in a sentence."""

import pytest
from adapters import PREFIX, adapter_config
from tensorferry.mappings.lora.peft_adapter import read_adapter
from tensorferry.mappings.lora.peft_config import AdapterConfig, read_config
from tensorferry.mappings.lowbit.tensors import StoredTensor

Q = "model.layers.0.self_attn.q_proj"


def stored(name: str, *shape: int, dtype: str = "float32") -> StoredTensor:
    return StoredTensor(name, dtype, shape, "adapter_model.safetensors", 0)


def pair(module: str = Q, rank: int = 3, out: int = 6, into: int = 5) -> list[StoredTensor]:
    return [stored(f"{PREFIX}{module}.lora_A.weight", rank, into), stored(f"{PREFIX}{module}.lora_B.weight", out, rank)]


def read(*tensors: StoredTensor, **config):
    adapter, problems = read_adapter(adapter_config([Q], 3, 6, **config), {tensor.name: tensor for tensor in tensors})
    return adapter, [str(problem) for problem in problems]


def test_a_plain_adapter():
    adapter, problems = read(*pair())
    assert not problems
    assert [(one.module, one.a.shape, one.b.shape) for one in adapter.pairs] == [(Q, (3, 5), (6, 3))]
    assert adapter.scales() == {f"{Q}.weight": 2.0}


@pytest.mark.parametrize(("module", "rank", "scale"), [
    ("model.layers.1.mlp.up_proj", 8, 2.0),
    ("model.layers.1.mlp.down_proj", 2, 8.0),
    ("model.layers.11.self_attn.q_proj", 8, 4.0),
    ("q_proj", 8, 4.0),
    ("model.layers.2.self_attn.xq_proj", 8, 2.0),
    ("model.layers.1.self_attn.o_proj", 4, 4.0),
])  # fmt: skip
def test_patterns_match_whole_names_or_their_ends(module, rank, scale):
    """As PEFT: a pattern matches from the start or after a dot, to the end; the first one wins."""
    config = AdapterConfig(
        8, 16, {"down_proj": 2, r"layers\.1\.self_attn\..*": 4, "mlp.down_proj": 7}, {"q_proj": 32, "^self_attn": 5}
    )
    assert (config.rank_of(module), config.scale_of(module)) == (rank, scale)


def test_ranks_and_alphas_left_out_are_pefts_defaults():
    config, problems = read_config({"peft_type": "LORA"})
    assert (config.rank, config.alpha, problems) == (8, 8, [])


REFUSED = {
    "peft_type": "VERA",
    "use_dora": True,
    "use_qalora": True,
    "lora_bias": True,
    "kasa_config": {"beta": 1},
    "monteclora_config": {"num_samples": 4},
    "alora_invocation_tokens": [1, 2],
    "layer_replication": [[0, 2]],
    "trainable_token_indices": [5],
    "fan_in_fan_out": True,
    "use_bdlora": {"nblocks": 2},
    "arrow_config": {"top_k": 2},
    "init_lora_weights": "pissa",
    "r": 0,
    "lora_alpha": "16",
    "rank_pattern": {"q_proj": 1.5},
    "alpha_pattern": {"(": 3},
    "target_parameters": "experts.down_proj",
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_is_no_plain_adapter_is_refused_by_its_key(key):
    _, (problem,) = read(*pair(), **{key: REFUSED[key]})
    assert problem.startswith(key)
    assert "(in adapter_config.json): expected " in problem


def test_every_fault_of_the_config_is_told():
    _, problems = read(*pair(), **REFUSED)
    assert len(problems) == len(REFUSED)


@pytest.mark.parametrize("start", ["pissa_niter_4", "olora", "corda", "loftq", "lora_ga", 5])
def test_starts_that_change_the_base_are_refused(start):
    _, (problem,) = read(*pair(), init_lora_weights=start)
    assert problem == (
        "init_lora_weights (in adapter_config.json): expected a start that leaves the base weights alone; found "
        f"{start}, which changes them. Save it as plain LoRA (PEFT's path_initial_model_for_weight_conversion), or set "
        "it to true where --source is the changed base."
    )


@pytest.mark.parametrize("start", [True, False, None, "gaussian", "Gaussian", "eva", "orthogonal"])
def test_other_starts_are_of_no_account(start):
    assert not read(*pair(), init_lora_weights=start)[1]


@pytest.mark.parametrize(("tensors", "words"), [
    ([], "expected factors of at least one module; found none"),
    (pair()[:1], "expected its lora_B beside it; found no such tensor"),
    (pair()[1:], "expected its lora_A beside it; found no such tensor"),
    (pair(rank=4), "expected [3, in], the rank in adapter_config.json; found [4, 5]"),
    ([pair()[0], stored(pair()[1].name, 6, 4)], "expected [out, 3], the rank of its A; found [6, 4]"),
    ([pair()[0], stored(pair()[1].name, 6, 3, 1, 1)], "expected two axes: an adapter of a linear"),
    ([pair()[0], stored(pair()[1].name, 6, 3, dtype="int8")], "expected a float tensor; found int8"),
    ([*pair(), stored(f"{PREFIX}{Q}.lora_magnitude_vector", 6)], "expected lora_A, lora_B, lora_embedding_A"),
    ([*pair(), stored(f"{PREFIX}{Q}.lora_B.bias", 6)], "expected lora_A, lora_B, lora_embedding_A"),
    ([*pair(), stored(f"{PREFIX}{Q}.lora_A.other.weight", 3, 5)], "expected one tensor of this half; found another"),
    ([*pair(), stored("base_model.vera_lambda_b", 6)], "expected lora_A, lora_B, lora_embedding_A"),
])  # fmt: skip
def test_tensors_that_do_not_add_up(tensors, words):
    _, problems = read(*tensors)
    assert any(words in problem for problem in problems), problems


def test_names_of_whole_tensors_lose_what_peft_wraps_them_in():
    adapter, problems = read(
        *pair(),
        stored(f"{PREFIX}lm_head.weight", 9, 5),
        stored(f"{PREFIX}model.norm.modules_to_save.default.weight", 5),
        stored(f"{PREFIX}{Q}.base_layer.bias", 6),
        modules_to_save=["lm_head", "norm"],
        bias="lora_only",
    )
    assert not problems
    assert list(adapter.whole) == ["lm_head.weight", "model.norm.weight", f"{Q}.bias"]
