"""The model check lists every difference, and knows the two that have one simple cause."""

import pytest
from tensorferry.mappings.tunix.model_check import ModelTree, check_run, scan_layers, validate, validate_adapter
from tensorferry.mappings.tunix.step_tree import Key, Leaf, Path, dict_path

SCANNED = {
    "decoder/dense_layers/mlp/wo/kernel": (7, 2, 5),
    "decoder/layers/mlp/wo/kernel": (7, 3, 5),
    "decoder/layers/norm/scale": (5, 3),
    "decoder/layers/gate/bias": (3, 4),
    "decoder/logits_dense/kernel": (5, 11),
    "token_embedder/embedding": (11, 5),
}


def unrolled() -> dict[str, tuple[int, ...]]:
    layers = {
        name.replace("layers/", f"layers_{layer}/"): shape
        for layer in range(3)
        for name, shape in (
            ("decoder/layers/mlp/wo/kernel", (7, 5)),
            ("decoder/layers/norm/scale", (5,)),
            ("decoder/layers/gate/bias", (4,)),
        )
    }
    dense = {f"decoder/dense_layers_{layer}/mlp/wo/kernel": (7, 5) for layer in range(2)}
    rest = {name: shape for name, shape in SCANNED.items() if "layers" not in name}
    return layers | dense | rest


def test_the_same_tree_is_valid() -> None:
    check = validate(SCANNED, ModelTree(SCANNED))
    assert check.validated
    assert check.problems() == []


def test_every_difference_is_listed_in_both_directions() -> None:
    weights = {name: shape for name, shape in SCANNED.items() if "norm" not in name} | {"decoder/new": (3,)}
    weights["decoder/logits_dense/kernel"] = (6, 11)
    check = validate(weights, ModelTree(SCANNED, origin="the template x"))
    assert check.missing == {"decoder/layers/norm/scale": (5, 3)}
    assert check.extra == {"decoder/new": (3,)}
    assert check.different == {"decoder/logits_dense/kernel": ((6, 11), (5, 11))}
    assert [str(problem).split(". ")[0] for problem in check.problems()] == [
        "decoder/layers/norm/scale: expected [5, 3] (the template x); found nothing",
        "decoder/new: expected nothing (the template x); found [3]",
        "decoder/logits_dense/kernel: expected [5, 11] (the template x); found [6, 11]",
    ]
    assert not check.validated


def test_an_axis_order_is_a_difference() -> None:
    weights = SCANNED | {"decoder/layers/mlp/wo/kernel": (3, 7, 5)}
    assert validate(weights, ModelTree(SCANNED)).different


@pytest.mark.parametrize("ours", ["scanned", "unrolled"])
def test_scanned_against_unrolled_is_said(ours: str) -> None:
    step, model = (SCANNED, unrolled()) if ours == "scanned" else (unrolled(), SCANNED)
    sides = {"scanned": "the step has scanned layers, the model unrolled layers"}
    sides["unrolled"] = "the step has unrolled layers, the model scanned layers"
    assert validate(step, ModelTree(model)).explanation == f"{sides[ours]}; otherwise they agree exactly"


@pytest.mark.parametrize(
    "change",
    [
        {"decoder/layers/mlp/wo/kernel": (7, 4, 5)},
        {"decoder/layers/mlp/wo/kernel": (5, 3, 7)},
        {"decoder/layers/norm/scale": (5,)},
        {"more": (1,)},
    ],
)
def test_scanned_against_unrolled_with_more_wrong_is_not_called_exact(change: dict) -> None:
    explanation = validate(unrolled(), ModelTree(SCANNED | change)).explanation
    assert explanation == "the step has unrolled layers, the model scanned layers"


def test_only_the_vocabulary_is_said() -> None:
    padded = SCANNED | {"decoder/logits_dense/kernel": (5, 13), "token_embedder/embedding": (13, 5)}
    explanation = validate(SCANNED, ModelTree(padded)).explanation
    assert explanation == "only the vocabulary differs: 11 in the step, 13 in the model"


@pytest.mark.parametrize(
    "change",
    [
        {"token_embedder/embedding": (13, 5), "decoder/logits_dense/kernel": (5, 14)},
        {"token_embedder/embedding": (13, 6)},
        {"decoder/layers/norm/scale": (6, 3)},
        {"token_embedder/embedding": (13, 5), "decoder/layers/norm/scale": (6, 3)},
    ],
)
def test_more_than_the_vocabulary_is_not_called_that(change: dict) -> None:
    assert validate(SCANNED, ModelTree(SCANNED | change)).explanation == ""


@pytest.mark.parametrize(
    ("names", "scanned"),
    [
        (["decoder/layers/mlp/kernel"], True),
        (["decoder/layers_0/mlp/kernel"], False),
        (["decoder/layers/layers_0/kernel"], True),
        (["decoder/moe_layers_3/kernel"], False),
        (["decoder/layers/kernel", "decoder/layers_remainder/layers_0/kernel"], True),
        (["decoder/layers_0/kernel", "vision_encoder/layers/kernel"], False),
        (["token_embedder/embedding"], None),
    ],
)
def test_scan_layers_comes_from_the_names(names: list[str], scanned: bool | None) -> None:
    assert scan_layers(names) is scanned


def test_an_adapter_must_sit_on_weights_of_the_model() -> None:
    lora = {"decoder/layers/mlp/wo/kernel_lora_a": (7, 3, 2), "decoder/layers/mlp/wo/kernel_lora_b": (2, 3, 5)}
    assert validate_adapter(lora, ModelTree(SCANNED)).ok
    stray = validate_adapter(lora | {"decoder/other/kernel_lora_a": (7, 2)}, ModelTree(SCANNED))
    assert list(stray.extra) == ["decoder/other/kernel_lora_a"]


def _leaf(path: Path, *shape: int, kind: str = "array", impl: str = "") -> Leaf:
    return Leaf("items", path, kind, shape=shape, dtype="float32", prng_impl=impl)  # type: ignore[arg-type]


def test_a_template_gives_weights_custom_variables_aux_and_optimizer() -> None:
    chain = (Key("opt_state"), Key("1", "sequence"))
    model = ModelTree.from_template(
        [
            _leaf(dict_path("params", "params", "decoder", "kernel"), 5, 7),
            _leaf(dict_path("params", "MoEBiasVar", "decoder", "other"), 3),
            _leaf(dict_path("nnx_aux", "model", "decoder", "bias"), 4),
            _leaf(dict_path("nnx_aux", "model", "decoder", "rngs", "params", "key"), 2, impl="unsafe_rbg"),
            _leaf(dict_path("nnx_aux", "model", "decoder", "rngs", "params", "count")),
            _leaf((Key("opt_state"), Key("0", "sequence")), kind="none"),
            _leaf((*chain, Key("mu"), Key("params"), Key("decoder"), Key("kernel")), 5, 7),
            _leaf((*chain, Key("count"))),
            _leaf(dict_path("step")),
        ],
        "the template x",
    )
    assert model.weights == {"decoder/kernel": (5, 7), "decoder/other": (3,), "decoder/bias": (4,)}
    assert model.custom == {"decoder/other", "decoder/bias"}
    assert model.aux == {"decoder/rngs/params/key", "decoder/rngs/params/count"}
    assert model.optimizer
    assert (model.optimizer.is_list, model.optimizer.length) == (True, 2)
    assert model.optimizer.arrays == {"1/mu", "1/count"}


def test_a_run_must_agree_with_itself() -> None:
    odd = SCANNED | {"token_embedder/embedding": (13, 5)}
    assert check_run({"1": SCANNED, "2": SCANNED}) == {}
    found = check_run({"1": odd, "2": SCANNED, "3": SCANNED})
    assert list(found) == ["1"]
    assert "as in step 2 of the same run" in str(found["1"][1])
    assert check_run({}) == {}
