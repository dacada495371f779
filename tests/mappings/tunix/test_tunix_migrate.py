"""Every sample's tree becomes exactly the tree that MaxText itself would have saved."""

import json
import tarfile
from pathlib import Path

import pytest
from tensorferry.mappings.tunix.migrate_tree import migrate_tree
from tensorferry.mappings.tunix.model_check import ModelTree
from tensorferry.mappings.tunix.step_plan import MigrateOptions, StepPlan, TargetLeaf
from tensorferry.mappings.tunix.step_tree import ItemTree, Key, Leaf, StepTree, dict_path, spell

DATA = Path(__file__).parents[2] / "data" / "tunix" / "expected.tar.xz"
KEEP = MigrateOptions("keep")
# The loader asks for the router's bias among the weights, where MaxText 0.2.5 itself forgets to save it.
ROUTER_BIAS = "params/params/decoder/moe_layers/DeepSeekMoeBlock_0/MoeBlock_0/gate/bias"


def _samples() -> dict[str, dict]:
    with tarfile.open(DATA) as archive:
        files = [member for member in archive if member.isfile()]
        return {f.name.removeprefix("expected/")[:-5]: json.load(archive.extractfile(f)) for f in files}  # type: ignore[arg-type]


SAMPLES = _samples()


def stored_leaf(item: str, path: str, stored: dict) -> Leaf:
    kinds = {1: "sequence", 2: "dict"}
    keys = tuple(Key(name, kinds[kind]) for name, kind in zip(path.split("/"), stored["kinds"], strict=True))
    impl = (stored.get("ext_metadata") or {}).get("random_key_impl", "")
    return Leaf(item, keys, "array", stored["value_type"], tuple(stored["shape"]), stored["dtype"], prng_impl=impl)


def sample_tree(sample: dict) -> StepTree:
    items = {
        name: ItemTree(name, tuple(stored_leaf(name, path, leaf) for path, leaf in item["leaves"].items()))
        for name, item in sample["source"].items()
    }
    return StepTree(sample["step"], items)


def described(leaf: TargetLeaf, sample: dict) -> dict:
    """A planned leaf in the words of the expected tree; its digest is its source's, since a leaf only moves."""
    if leaf.kind == "none":
        return {"empty": "None"}
    told: dict = {"shape": list(leaf.shape), "dtype": leaf.dtype}
    if leaf.source:
        told["sha256"] = sample["source"][leaf.source.item]["leaves"][spell(leaf.source.path)]["sha256"]
    if leaf.prng_impl:
        words = {"key_data_shape": list(leaf.shape), "key_data_dtype": leaf.dtype, "prng_impl": leaf.prng_impl}
        told |= words | {"shape": list(leaf.shape[:-1]), "dtype": "key<fry>"}
    return told


def expected_items(sample: dict, plan: StepPlan) -> dict:
    expected = dict(sample["expected_items"])
    bias = expected.get(ROUTER_BIAS.replace("params/params", "nnx_aux/model"))
    if bias:
        expected[ROUTER_BIAS] = bias
    if plan.leaves[-1].constant is not None or any(leaf.constant is not None for leaf in plan.leaves):
        expected["step"] = {key: value for key, value in expected["step"].items() if key != "sha256"}
    return expected


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_becomes_exactly_the_expected_tree(name: str) -> None:
    sample = SAMPLES[name]
    plan = migrate_tree(sample_tree(sample), KEEP)
    assert plan.problems == ()
    assert {leaf.name: described(leaf, sample) for leaf in plan.leaves} == expected_items(sample, plan)


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("options", [KEEP, MigrateOptions(), MigrateOptions("threefry2x32", drop_optimizer=True)])
def test_every_leaf_is_out_or_dropped_with_a_reason(name: str, options: MigrateOptions) -> None:
    tree = sample_tree(SAMPLES[name])
    plan = migrate_tree(tree, options)
    out = {str(leaf.source) for leaf in plan.leaves if leaf.source}
    dropped = {str(gone.leaf): gone.reason for gone in plan.dropped}
    assert out | dropped.keys() == {str(leaf) for leaf in tree.leaves()}
    assert out.isdisjoint(dropped)
    assert all(dropped.values())
    assert len({leaf.name for leaf in plan.leaves}) == len(plan.leaves)


@pytest.mark.parametrize("name", SAMPLES)
def test_only_a_top_level_chain_is_a_sequence(name: str) -> None:
    plan = migrate_tree(sample_tree(SAMPLES[name]), KEEP)
    for leaf in plan.leaves:
        positions = [index for index, key in enumerate(leaf.path) if key.kind == "sequence"]
        chain = leaf.section == "opt_state" and leaf.path[1].name.isdigit()
        assert positions == ([1] if chain else []), leaf.name


def test_samples_cover_every_run() -> None:
    assert len(SAMPLES) == 31


def make_step(model: dict[str, tuple], optimizer: dict[str, tuple] | None = None, **marks: str) -> StepTree:
    """A step from ``name: (dtype, *shape)``; positions of a tuple are written ``[0]``."""
    items = {"model_params": _item("model_params", model, marks)}
    if optimizer is not None:
        items["optimizer_state"] = _item("optimizer_state", optimizer, {})
    return StepTree(17, items)


def _item(item: str, leaves: dict[str, tuple], marks: dict[str, str]) -> ItemTree:
    return ItemTree(item, tuple(_leaf(item, name, spec, marks) for name, spec in leaves.items()))


def _leaf(item: str, name: str, spec: tuple, marks: dict[str, str]) -> Leaf:
    keys = tuple(Key(part.strip("[]"), "sequence" if part.startswith("[") else "dict") for part in name.split("/"))
    if spec == ("none",):
        return Leaf(item, keys, "none", "None")
    stream = next((part for part in name.split("/") if part in marks), "")
    impl = marks[stream] if stream and "key" in name.split("/")[-2:] else ""
    return Leaf(item, keys, "array", "jax.Array", spec[1:], spec[0], prng_impl=impl)


WEIGHTS: dict[str, tuple] = {
    "decoder/layers/mlp/wi_0/kernel/value": ("bfloat16", 5, 3, 7),
    "decoder/layers/self_attention/value/kernel/value": ("bfloat16", 5, 3, 2, 4),
    "token_embedder/embedding/value": ("bfloat16", 11, 5),
}
RNGS: dict[str, tuple] = {
    "decoder/layers/rngs/params/key/value": ("uint32", 3, 2),
    "decoder/layers/rngs/params/count/value": ("uint32", 3),
    "decoder/to_nnx__rngs/dropout/key/value": ("uint32", 4),
    "decoder/to_nnx__rngs/dropout/count/value": ("uint32",),
}


def names(plan: StepPlan, section: str) -> set[str]:
    return {leaf.name for leaf in plan.leaves if leaf.section == section}


def test_keys_of_another_implementation_are_left_out_and_their_counts_stay() -> None:
    step = make_step(WEIGHTS | RNGS, params="threefry2x32", dropout="unsafe_rbg")
    plan = migrate_tree(step, MigrateOptions("unsafe_rbg"))
    assert names(plan, "nnx_aux") == {
        "nnx_aux/model/decoder/layers/rngs/params/count",
        "nnx_aux/model/decoder/to_nnx__rngs/dropout/count",
        "nnx_aux/model/decoder/to_nnx__rngs/dropout/key",
    }
    (gone,) = plan.dropped
    assert gone.reason == "a threefry2x32 key, and the reader runs unsafe_rbg; its count is kept"


def test_the_wanted_implementation_decides_which_key_goes() -> None:
    step = make_step(WEIGHTS | RNGS, params="threefry2x32", dropout="unsafe_rbg")
    for impl, kept in (("unsafe_rbg", ["dropout"]), ("threefry2x32", ["params"]), ("keep", ["params", "dropout"])):
        plan = migrate_tree(step, MigrateOptions(impl))  # type: ignore[arg-type]
        typed = {leaf.path[-2].name: leaf.prng_impl for leaf in plan.leaves if leaf.prng_impl}
        assert sorted(typed) == sorted(kept)


def test_unmarked_keys_are_guessed_by_their_words() -> None:
    plan = migrate_tree(make_step(WEIGHTS | RNGS), KEEP)
    impls = {leaf.path[-2].name: leaf.prng_impl for leaf in plan.leaves if leaf.path[-1].name == "key"}
    assert impls == {"params": "threefry2x32", "dropout": ""}
    assert any("two words are taken for threefry2x32 (1 keys)" in told for told in plan.warnings)
    assert any("may be rbg or unsafe_rbg: written as plain uint32" in told for told in plan.warnings)


def test_an_undecided_key_goes_as_plain_words_to_a_reader_of_such_words_only() -> None:
    step = make_step(WEIGHTS | RNGS, params="threefry2x32")
    for impl, kept in (("unsafe_rbg", {"dropout": ""}), ("threefry2x32", {"params": "threefry2x32"})):
        plan = migrate_tree(step, MigrateOptions(impl))  # type: ignore[arg-type]
        keys = {leaf.path[-2].name: leaf.prng_impl for leaf in plan.leaves if leaf.path[-1].name == "key"}
        assert keys == kept


def test_a_projection_called_value_survives_alone() -> None:
    lora = {
        "decoder/layers/self_attention/value/kernel_lora_a/value": ("float32", 5, 3, 2),
        "decoder/layers/self_attention/value/kernel_lora_b/value": ("float32", 2, 3, 8),
    }
    plan = migrate_tree(make_step(lora), KEEP)
    base = "params/params/decoder/layers/self_attention/value"
    assert names(plan, "params") == {f"{base}/kernel_lora_a", f"{base}/kernel_lora_b"}
    assert plan.adapter_only
    assert any("adapter only" in told for told in plan.warnings)


def test_a_weight_below_a_projection_called_value_is_not_sown() -> None:
    plan = migrate_tree(make_step(WEIGHTS | {"decoder/self_attention/value/scales": ("float32", 3)}), KEEP)
    assert "params/params/decoder/self_attention/value/scales" in names(plan, "params")


def test_base_goes_only_where_it_wraps_everything() -> None:
    wrapped = {f"base/{name}": spec for name, spec in WEIGHTS.items()}
    assert names(migrate_tree(make_step(wrapped), KEEP), "params") == {
        f"params/params/{name.removesuffix('/value')}" for name in WEIGHTS
    }
    plan = migrate_tree(make_step({**WEIGHTS, "base/kernel/value": ("float32", 3)}), KEEP)
    assert "params/params/base/kernel" in names(plan, "params")


def test_base_inside_the_moments_of_an_unwrapped_model_is_a_name() -> None:
    model: dict[str, tuple] = {"base/kernel/value": ("float32", 3), "other/kernel/value": ("float32", 3)}
    moments: dict[str, tuple] = {f"opt_state/0/{moment}/base/kernel/value": ("float32", 3) for moment in ("mu", "nu")}
    optimizer = moments | {"opt_state/0/count/value": ("int32",), "opt_state/2/count/value": ("int32",)}
    plan = migrate_tree(make_step(model, optimizer), KEEP)
    assert "opt_state/0/mu/params/base/kernel" in names(plan, "opt_state")


def test_sown_values_and_caches_are_dropped() -> None:
    extra: dict[str, tuple] = {
        "decoder/layers/activation_mean/value/[0]": ("bfloat16",),
        "decoder/layers/self_attention/KVCache_0/cached_prefill_key/value": ("bfloat16", 2, 3),
    }
    plan = migrate_tree(make_step(WEIGHTS | extra), KEEP)
    assert sorted(gone.reason for gone in plan.dropped) == ["a decoding cache", "a value sown by one forward pass"]
    assert len(names(plan, "params")) == len(WEIGHTS)


def test_a_variable_without_a_moment_goes_to_both_places() -> None:
    bias: dict[str, tuple] = {"decoder/moe_layers/tid2eid/value": ("float32", 3, 4)}
    optimizer: dict[str, tuple] = {
        f"opt_state/{moment}/{name}": spec for moment in ("mu", "nu") for name, spec in WEIGHTS.items()
    }
    plan = migrate_tree(make_step(WEIGHTS | bias, optimizer), KEEP)
    assert "params/params/decoder/moe_layers/tid2eid" in names(plan, "params")
    assert names(plan, "nnx_aux") == {"nnx_aux/model/decoder/moe_layers/tid2eid"}


def test_the_router_bias_is_known_by_name_when_there_are_no_moments() -> None:
    bias: dict[str, tuple] = {"decoder/moe_layers/MoeBlock_0/gate/bias/value": ("float32", 3, 4)}
    plan = migrate_tree(make_step(WEIGHTS | bias), KEEP)
    assert names(plan, "nnx_aux") == {"nnx_aux/model/decoder/moe_layers/MoeBlock_0/gate/bias"}


def test_frozen_parts_are_no_custom_variables() -> None:
    optimizer: dict[str, tuple] = {
        "opt_state/inner_states/trainable/inner_state/0/mu/token_embedder/embedding/value": ("float32", 11, 5),
        "opt_state/inner_states/trainable/inner_state/0/mu/decoder/layers/mlp/wi_0/kernel/value": ("none",),
    }
    plan = migrate_tree(make_step(WEIGHTS, optimizer), KEEP)
    assert names(plan, "nnx_aux") == set()
    assert plan.counts()["opt_state"] == (1, 4 * 11 * 5)
    masked = [leaf for leaf in plan.leaves if leaf.kind == "none"]
    assert [leaf.name for leaf in masked] == [
        "opt_state/inner_states/trainable/inner_state/0/mu/decoder/layers/mlp/wi_0/kernel"
    ]


def test_a_template_names_the_custom_variables() -> None:
    declared = {name.removesuffix("/value"): spec[1:] for name, spec in WEIGHTS.items()}
    model = ModelTree(declared, custom=frozenset({"token_embedder/embedding"}))
    plan = migrate_tree(make_step(WEIGHTS), KEEP, model)
    assert names(plan, "nnx_aux") == {"nnx_aux/model/token_embedder/embedding"}
    assert plan.check.validated


def test_a_step_without_an_optimizer_counts_by_its_folder() -> None:
    plan = migrate_tree(make_step(WEIGHTS), KEEP)
    (step,) = [leaf for leaf in plan.leaves if leaf.section == "step"]
    assert (step.constant, step.dtype, step.path, plan.step) == (17, "int32", dict_path("step"), 17)
    assert "moments absent: a resume starts with a fresh optimizer" in plan.warnings


def test_a_moment_of_another_shape_refuses_the_step() -> None:
    optimizer: dict[str, tuple] = {
        f"opt_state/{moment}/{name}": spec for moment in ("mu", "nu") for name, spec in WEIGHTS.items()
    }
    optimizer["opt_state/nu/token_embedder/embedding/value"] = ("bfloat16", 13, 5)
    plan = migrate_tree(make_step(WEIGHTS, optimizer), KEEP)
    assert [str(problem) for problem in plan.problems] == [
        "optimizer_state/opt_state/nu/token_embedder/embedding/value: expected the shape of its weight, [11, 5]; "
        "found [13, 5]. The optimizer belongs to another model; --drop-optimizer migrates the weights without it."
    ]
    assert migrate_tree(make_step(WEIGHTS, optimizer), MigrateOptions("keep", True)).problems == ()


def test_a_step_without_weights_is_refused() -> None:
    plan = migrate_tree(make_step(RNGS), KEEP)
    assert [problem.found for problem in plan.problems] == ["none"]


def test_counts_add_up_to_bytes() -> None:
    plan = migrate_tree(make_step(WEIGHTS | RNGS), KEEP)
    counts = plan.counts()
    assert counts["params"] == (3, 2 * (5 * 3 * 7 + 5 * 3 * 2 * 4 + 11 * 5))
    assert counts["nnx_aux"] == (4, 4 * (6 + 3 + 4 + 1))
    assert counts["step"] == (1, 4)


def test_scan_layers_joins_the_metadata_of_the_source() -> None:
    sample = SAMPLES["sft_llama_unscan_adamw/3"]
    tree = sample_tree(sample)
    with_metadata = StepTree(3, tree.items, custom_metadata={"global_step": 9})
    assert migrate_tree(with_metadata, KEEP).custom_metadata == {"global_step": 9, "scan_layers": False}


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [("bool", 15), ("bfloat16", 30), ("float32", 60), ("complex64", 120), ("float8_e4m3fn", 15), ("int4", 15)],
)
def test_bytes_follow_the_dtypes_name(dtype: str, nbytes: int) -> None:
    assert Leaf("model_params", dict_path("w"), shape=(3, 5), dtype=dtype).nbytes == nbytes
