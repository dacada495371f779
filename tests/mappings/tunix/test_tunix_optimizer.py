"""Shells come off in any order, and what is left is laid out as pre-training builds it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorferry.mappings.tunix.linen import Layout, OptimizerTarget, lay_out
from tensorferry.mappings.tunix.optimizer import Node, leaves_of, nest, peel, strip_adapter
from tensorferry.mappings.tunix.step_tree import Leaf, dict_path, spell


def leaf(name: str) -> Leaf:
    return Leaf("optimizer_state", dict_path(*name.split("/")), dtype="int32")


def state(*names: str) -> Node:
    return nest(leaf(name) for name in names)


ADAM = ("count", "mu/w", "nu/w")
ADAMW = tuple(f"0/{name}" for name in ADAM) + ("2/count",)


def under(prefix: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{prefix}/{name}" for name in names)


def clip(names: tuple[str, ...]) -> tuple[str, ...]:
    return under("1", names)


def inject(names: tuple[str, ...]) -> tuple[str, ...]:
    shell = ("count", "hyperparams/learning_rate", "hyperparams_states/learning_rate/count")
    return (*shell, *under("inner_state", names))


def multi_steps(names: tuple[str, ...]) -> tuple[str, ...]:
    return ("mini_step", "gradient_step", "acc_grads/w", *under("inner_opt_state", names))


def placed(layout: Layout) -> dict[str, str | None]:
    return {spell(path): spell(source.path) if source else None for path, source in layout.entries}


def laid_out(names: tuple[str, ...], target: OptimizerTarget | None = None) -> Layout:
    return lay_out(peel(state(*names)), target)


def test_adamw_becomes_a_list_with_a_gap() -> None:
    assert placed(laid_out(ADAMW)) == {
        "opt_state/0/count": "0/count",
        "opt_state/0/mu/params/w": "0/mu/w",
        "opt_state/0/nu/params/w": "0/nu/w",
        "opt_state/1": None,
        "opt_state/2/count": "2/count",
    }


def test_adam_pax_stays_one_dict_with_or_without_a_clip() -> None:
    bare = placed(laid_out(ADAM))
    assert bare == {
        "opt_state/count": "count",
        "opt_state/mu/params/w": "mu/w",
        "opt_state/nu/params/w": "nu/w",
    }
    assert placed(laid_out(clip(ADAM))).keys() == bare.keys()


def test_sgd_keeps_its_gap_and_is_no_clip() -> None:
    assert placed(laid_out(("1/count",))) == {"opt_state/0": None, "opt_state/1/count": "1/count"}
    assert placed(laid_out(clip(("1/count",)))) == {"opt_state/0": None, "opt_state/1/count": "1/1/count"}


def test_the_count_of_inject_hyperparams_becomes_the_schedules() -> None:
    inner = tuple(name for name in ADAMW if name != "2/count")
    layout = laid_out(inject(clip(inner)))
    assert placed(layout)["opt_state/2/count"] == "count"
    assert layout.problems == []


def test_a_chain_with_its_own_schedule_keeps_it() -> None:
    layout = laid_out(inject(ADAMW))
    assert placed(layout)["opt_state/2/count"] == "inner_state/2/count"
    assert [spell(gone.leaf.path) for gone in layout.dropped] == ["count"]


def test_a_constant_learning_rate_starts_the_schedule_at_adams_count() -> None:
    layout = laid_out(tuple(name for name in ADAMW if name != "2/count"))
    assert placed(layout)["opt_state/2/count"] == "0/count"
    assert layout.notes == ["the learning rate was constant: the schedule starts at Adam's count"]


def test_adam_without_weight_decay_takes_the_length_of_adamw() -> None:
    layout = laid_out((*under("0", ADAM), "1/count"))
    assert list(placed(layout))[-2:] == ["opt_state/1", "opt_state/2/count"]


def test_multi_steps_gives_the_update_count() -> None:
    peeled = peel(state(*multi_steps(clip(ADAMW))))
    assert peeled.gradient_step == leaf("gradient_step")
    assert peeled.mini_step == leaf("mini_step")
    assert {spell(gone.leaf.path) for gone in peeled.dropped} == {"mini_step", "acc_grads/w"}


def test_skip_step_on_spikes_is_not_inject_hyperparams() -> None:
    shell = ("count", "is_skipped", "losses", "grad_norms")
    layout = laid_out((*shell, *under("inner_state", ADAMW)))
    assert set(placed(layout)) == {
        *(f"opt_state/{name}" for name in shell),
        "opt_state/inner_state/0/count",
        "opt_state/inner_state/0/mu/w",
        "opt_state/inner_state/0/nu/w",
        "opt_state/inner_state/2/count",
    }
    assert layout.problems == []


def test_a_clip_around_and_inside_skip_step_on_spikes_comes_off() -> None:
    shell = ("count", "is_skipped", "losses", "grad_norms")
    layout = laid_out(clip((*shell, *under("inner_state", clip(ADAMW)))))
    assert placed(layout)["opt_state/inner_state/0/mu/w"] == "1/inner_state/1/0/mu/w"
    assert layout.problems == []


def skip(names: tuple[str, ...]) -> tuple[str, ...]:
    return ("count", "is_skipped", "losses", "grad_norms", *under("inner_state", names))


@given(st.lists(st.sampled_from([clip, inject, multi_steps]), max_size=5))
def test_shells_come_off_in_any_order_and_nothing_is_lost(shells: list) -> None:
    names: tuple[str, ...] = tuple(name for name in ADAMW if name != "2/count")
    for shell in shells:
        names = shell(names)
    whole = state(*names)
    peeled = peel(whole)
    layout = lay_out(peeled)
    assert list(placed(layout)) == [
        "opt_state/0/count",
        "opt_state/0/mu/params/w",
        "opt_state/0/nu/params/w",
        "opt_state/1",
        "opt_state/2/count",
    ]
    out = {spell(source.path) for _, source in layout.entries if source}
    out |= {spell(gone.leaf.path) for gone in [*peeled.dropped, *layout.dropped]}
    out |= {spell(peeled.gradient_step.path)} if peeled.gradient_step else set()
    assert out == {spell(stored.path) for stored in leaves_of(whole)}
    assert layout.problems == []


@given(*[st.lists(st.sampled_from([clip, inject, multi_steps]), max_size=3)] * 2)
def test_shells_come_off_on_both_sides_of_skip_step_on_spikes(inside: list, outside: list) -> None:
    names = ADAMW
    for shell in [*inside, skip, *outside]:
        names = shell(names)
    whole = state(*names)
    peeled = peel(whole)
    layout = lay_out(peeled)
    assert {name for name in placed(layout) if "inner" in name} == {f"opt_state/inner_state/{name}" for name in ADAMW}
    gone = [*(d.leaf for d in peeled.dropped), *(d.leaf for d in layout.dropped)]
    out = [source for _, source in layout.entries if source]
    kept = [peeled.gradient_step] if peeled.gradient_step else []
    assert {spell(x.path) for x in [*gone, *out, *kept]} == {spell(x.path) for x in leaves_of(whole)}


@pytest.mark.parametrize(
    "names",
    [
        ("0/trace/w", "1/count"),
        ("notfinite_count", "inner_state/0/count"),
        ("count", "mu/w", "nu/w", "nu_max/w"),
        ("0/count", "0/mu/w", "0/nu/w", "1/ema/w", "2/count"),
    ],
)
def test_an_unknown_optimizer_is_a_problem_that_says_what_it_saw(names: tuple[str, ...]) -> None:
    (problem,) = laid_out(names).problems
    assert problem.name == "opt_state"
    assert all(name.removesuffix("/w") in problem.found for name in names if "ema" not in name)
    assert "--drop-optimizer" in problem.fix


ADAMW_TARGET = OptimizerTarget(True, 3, frozenset({"0/count", "0/mu", "0/nu", "2/count"}))
PAX_TARGET = OptimizerTarget(False, 0, frozenset({"count", "mu", "nu"}))


def test_the_template_decides_between_a_list_and_a_dict() -> None:
    as_list = laid_out(clip(ADAM), ADAMW_TARGET)
    assert placed(as_list)["opt_state/2/count"] == "1/count"
    as_dict = laid_out(ADAMW, PAX_TARGET)
    assert set(placed(as_dict)) == {"opt_state/count", "opt_state/mu/params/w", "opt_state/nu/params/w"}
    assert not as_list.problems + as_dict.problems
    assert as_list.notes
    assert as_dict.notes


def test_the_template_decides_the_length() -> None:
    longer = OptimizerTarget(True, 4, frozenset({"0/count", "0/mu", "0/nu", "3/count"}))
    assert list(placed(laid_out(ADAMW, longer)))[-3:] == ["opt_state/1", "opt_state/2", "opt_state/3/count"]


def test_the_template_may_end_in_a_gap() -> None:
    longer = OptimizerTarget(True, 5, ADAMW_TARGET.arrays)
    layout = laid_out(ADAMW, longer)
    assert list(placed(layout))[-2:] == ["opt_state/3", "opt_state/4"]
    assert layout.problems == []


def test_an_optimizer_unlike_the_templates_is_a_problem() -> None:
    (problem,) = laid_out(("1/count",), ADAMW_TARGET).problems
    assert str(problem) == (
        "opt_state: expected the template's optimizer (0/count, 0/mu, 0/nu, 2/count); found 1/count. "
        "A full resume would fail; --drop-optimizer migrates the weights without it."
    )


def test_the_adapter_level_goes_only_directly_under_moments() -> None:
    wrapped = state("0/mu/base/w", "0/nu/base/w", "0/count", "1/mu/base/w", "1/mu/w")
    stripped = strip_adapter(wrapped)
    assert isinstance(stripped, dict)
    zero, one = stripped["0"], stripped["1"]
    assert isinstance(zero, dict)
    assert isinstance(one, dict)
    assert zero["mu"] == {"w": leaf("0/mu/base/w")}
    assert isinstance(one["mu"], dict)
    assert set(one["mu"]) == {"base", "w"}
