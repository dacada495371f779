"""The account: everybody used once or excused, and a sentence for everybody else."""

from dataclasses import replace

import pytest
from small_family import headers, small_family
from tensorferry.mappings.families.family import Family
from tensorferry.mappings.lowbit.tensors import LogicalTensor, StoredTensor
from tensorferry.mappings.plan.account import Account, covers, take_account
from tensorferry.mappings.rules.compiled import compile_rule
from tensorferry.mappings.rules.geometry import AxisGeometry, Factor, Geometry
from tensorferry.mappings.rules.rule import Rule
from tensorferry.mappings.words.problems import Problem


def account(family: Family, tensors: dict[str, LogicalTensor]) -> Account:
    rules = [compile_rule(rule, family.dims) for rule in family.plain_rules(True)]
    return take_account(rules, tensors, family)


def problems(tensors: dict[str, LogicalTensor], family: Family | None = None) -> list[Problem]:
    return list(account(family or small_family(), tensors).problems)


def tensor(name: str, *shape: int) -> LogicalTensor:
    return LogicalTensor.plain(StoredTensor(name, "float16", shape, "two.safetensors", 0))


def test_a_complete_checkpoint_adds_up() -> None:
    found = account(small_family(), headers(small_family()))
    assert found.problems == ()
    assert len(found.claims["model.layers.1.qkv.weight"]) == 3
    assert len(found.claims["model.layers.1.experts.3.up"]) == 1


def test_a_missing_tensor_is_named_with_its_shape_and_where_that_comes_from() -> None:
    tensors = headers(small_family())
    del tensors["model.layers.2.experts.1.up"]
    (problem,) = problems(tensors)
    assert str(problem) == (
        "model.layers.2.experts.1.up: expected a tensor [embed=6, mlp·part=14] from hidden_size, intermediate_size in "
        'config.json by rule "embed (mlp part) -> expert layer embed mlp"; found no tensor of this name. Is the '
        "checkpoint complete, and is it a small model?"
    )


def test_a_misshapen_tensor_shows_both_shapes_and_its_file() -> None:
    tensors = headers(small_family())
    name = "model.layers.0.norm.weight"
    tensors[name] = replace(tensors[name], shape=(7,))
    (problem,) = problems(tensors)
    assert str(problem) == (
        'model.layers.0.norm.weight (in one.safetensors): expected [embed=6] from hidden_size in config.json by rule '
        '"embed -> embed layer"; found [7]. Wrong config.json for this checkpoint?'
    )  # fmt: skip


def test_a_tensor_nobody_asked_for_is_named() -> None:
    extra = tensor("model.layers.3.norm.weight", 6)
    (problem,) = problems(headers(small_family()) | {extra.name: extra})
    assert str(problem) == (
        "model.layers.3.norm.weight (in two.safetensors): expected a tensor that the family small knows; found float16 "
        "[6] that no rule uses. Is the family right (--family), and does config.json belong to this checkpoint?"
    )


def test_all_mismatches_are_listed_not_the_first_only() -> None:
    found = problems(headers(small_family(embed=5)))
    assert {problem.name for problem in found} == headers(small_family()).keys()


def test_ignored_tensors_carry_their_reason() -> None:
    spare = tensor("model.rotary.inv_freq", 3)
    found = account(small_family(), headers(small_family()) | {spare.name: spare})
    assert found.problems == ()
    assert found.ignored == {"model.rotary.inv_freq": "recomputed"}


def test_a_stored_tie_is_left_out_and_remembered() -> None:
    """Both are stored: the model has one array, so their bytes must be compared."""
    head = tensor("head.weight", 10, 6)
    found = account(small_family(), headers(small_family()) | {head.name: head})
    assert found.ignored == {"head.weight": "tied to model.embed.weight: the model has one array for both"}
    assert found.ties == (("head.weight", "model.embed.weight"),)


def test_a_part_that_no_rule_uses_is_found() -> None:
    family = small_family()
    without = replace(family, rules=tuple(rule for rule in family.rules if not rule.target.endswith("-key")))
    found = problems(headers(family), without)
    assert {problem.found for problem in found} == {"elements 10 to 12 are used by no rule"}
    assert len(found) == 3


def test_a_tensor_used_twice_is_found() -> None:
    family = small_family()
    again = Rule("model.layers.{layer}.norm.weight", "params-other", "embed -> embed layer")
    found = problems(headers(family), replace(family, rules=(*family.rules, again)))
    assert [problem.name for problem in found] == [f"model.layers.{layer}.norm.weight" for layer in range(3)]
    assert "2 rules use it whole" in found[0].found


def claim(offset: int, length: int, extent: int = 9, axis: int = 0) -> Geometry:
    part = AxisGeometry((Factor(extent, offset, ("a",), (length,), "whole.part"),))
    whole = AxisGeometry((Factor(4, 0, ("b",), (4,)),))
    return (part, whole) if axis == 0 else (whole, part)


@pytest.mark.parametrize(("claims", "words"), [
    ([claim(0, 5), claim(5, 4)], ""),
    ([claim(5, 4), claim(0, 5)], ""),
    ([claim(0, 5), claim(4, 5)], "elements 4 to 5 are used twice"),
    ([claim(0, 5), claim(6, 3)], "elements 5 to 6 are used by no rule"),
    ([claim(0, 5), claim(5, 3)], "elements 8 to 9 are used by no rule"),
    ([claim(1, 8)], "elements 0 to 1 are used by no rule"),
    ([claim(0, 5), claim(5, 4, axis=1)], "its parts lie on different axes"),
    ([], "nothing uses it"),
])  # fmt: skip
def test_claims_must_tile(claims: list[Geometry], words: str) -> None:
    assert covers(claims) == words
