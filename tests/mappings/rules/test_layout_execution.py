"""Random layouts, carried out by plan and assembly, against one master array turned by numpy alone."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import tensorferry.pipelines.regions.assemble
from hypothesis import given, settings
from hypothesis import strategies as st
from in_memory import logical, run_plan
from tensorferry.mappings.families.family import Family
from tensorferry.mappings.plan.conversion_plan import PlanOptions, plan_rules
from tensorferry.mappings.plan.target_arrays import hf_path
from tensorferry.mappings.rules.compiled import compile_rule
from tensorferry.mappings.rules.dims import Concat, Dims
from tensorferry.mappings.rules.layout import parse_layout
from tensorferry.mappings.rules.rule import PlainRule, Template
from tensorferry.transforms.ops import Pad

WORDS = ("a", "b", "c", "d", "e")


@dataclass(frozen=True)
class Side:
    """How one side spreads the dims: those in the name, and the axes of the shape."""

    named: tuple[str, ...]
    axes: tuple[tuple[str, ...], ...]

    @property
    def text(self) -> str:
        return " ".join(axis[0] if len(axis) == 1 else f"({' '.join(axis)})" for axis in self.axes)

    def template(self, stem: str) -> str:
        return stem + "".join(f"_{{{word}}}" for word in self.named)

    def arrays(self, stem: str, master: np.ndarray, sizes: dict[str, int]) -> dict[str, np.ndarray]:
        """Every array of this side, cut out of the master array over all dims."""
        inside = [word for axis in self.axes for word in axis]
        turned = master.transpose([list(sizes).index(word) for word in (*self.named, *inside)])
        shape = [math.prod(sizes[word] for word in axis) for axis in self.axes]
        found = {}
        for at in itertools.product(*(range(sizes[word]) for word in self.named)):
            labels = "".join(f"_{label(position)}" for position in at)
            found[stem + labels] = np.ascontiguousarray(turned[at].reshape(shape))
        return found


def label(position: int) -> int:
    """Labels that are no positions: 3, 5, 7, …"""
    return 3 + 2 * position


def axes_of(draw: st.DrawFn, words: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    order = draw(st.permutations(words))
    axes: list[list[str]] = []
    for word in order:
        if axes and draw(st.booleans()):
            axes[-1].append(word)
        else:
            axes.append([word])
    return tuple(tuple(axis) for axis in axes)


@st.composite
def sides(draw: st.DrawFn) -> tuple[dict[str, int], Side, Side]:
    words = WORDS[: draw(st.integers(2, 5))]
    sizes = {word: draw(st.integers(1, 5)) for word in words}
    made = []
    for _ in range(2):
        named = tuple(draw(st.permutations(words))[: draw(st.integers(0, min(2, len(words) - 1)))])
        made.append(Side(named, axes_of(draw, [word for word in words if word not in named])))
    return sizes, made[0], made[1]


def carried_out(
    rules: Sequence[PlainRule], dims: Dims, arrays: dict[str, np.ndarray], chunk_bytes: int
) -> dict[str, np.ndarray]:
    family = Family("random", dims, {}, ())
    compiled = [compile_rule(rule, dims) for rule in rules]
    options = PlanOptions(dtype="source", chunk_bytes=chunk_bytes)
    return run_plan(plan_rules(family, compiled, logical(arrays), options, path_of=hf_path), arrays)


def equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array), name


@pytest.fixture(autouse=True, params=[16, 4 << 20], ids=["small-blocks", "whole-blocks"])
def block_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of four elements, so that every read streams in pieces; and blocks of the usual size."""
    monkeypatch.setattr(tensorferry.pipelines.regions.assemble, "BLOCK_BYTES", request.param)


CHUNKS = st.sampled_from([1, 12, 50, 200, 1 << 20])


@settings(max_examples=60, deadline=None)
@given(sides(), CHUNKS)
def test_any_layout_and_its_inverse(case: tuple[dict[str, int], Side, Side], chunk_bytes: int) -> None:
    """Dims in names and shapes on either side, axes merged in any order: stacks, splits, transposes, reshapes."""
    sizes, source, target = case
    master = np.arange(math.prod(sizes.values()), dtype=np.float32).reshape(list(sizes.values()))
    dims = Dims({word: tuple(label(at) for at in range(size)) for word, size in sizes.items()})
    layout = parse_layout(f"{source.text} -> {target.text}")
    rule = PlainRule(Template(source.template("s")), Template(target.template("t")), layout)
    rule.check(dims)
    before, after = source.arrays("s", master, sizes), target.arrays("t", master, sizes)
    equal(carried_out([rule], dims, before, chunk_bytes), after)
    equal(carried_out([rule.inverse(dims)], dims, after, chunk_bytes), before)


@settings(max_examples=60, deadline=None)
@given(sides(), CHUNKS, st.integers(0, 4), st.data())
def test_padding_adds_zeros_and_its_inverse_takes_them_away(
    case: tuple[dict[str, int], Side, Side], chunk_bytes: int, extra: int, data: st.DataObject
) -> None:
    sizes, source, target = case
    alone = [axis[0] for axis in target.axes if len(axis) == 1]
    if not alone:
        return
    word = data.draw(st.sampled_from(alone))
    axis = target.axes.index((word,))
    master = 1 + np.arange(math.prod(sizes.values()), dtype=np.float32).reshape(list(sizes.values()))
    dims = Dims({word: tuple(label(at) for at in range(size)) for word, size in sizes.items()})
    layout = parse_layout(f"{source.text} -> {target.text}")
    pad = Pad(word, to=sizes[word] + extra)
    rule = PlainRule(Template(source.template("s")), Template(target.template("t")), layout, (pad,))
    before, after = source.arrays("s", master, sizes), target.arrays("t", master, sizes)
    width = [(0, extra if i == axis else 0) for i in range(len(target.axes))]
    after = {name: np.pad(array, width) for name, array in after.items()}
    equal(carried_out([rule], dims, before, chunk_bytes), after)
    equal(carried_out([rule.inverse(dims)], dims, after, chunk_bytes), before)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=2, max_size=4),
    st.integers(1, 3), st.integers(1, 5), st.booleans(), st.integers(0, 2), CHUNKS,
)  # fmt: skip
def test_uneven_parts_of_an_axis(
    lengths: list[int], inner: int, embed: int, grouped: bool, place: int, chunk_bytes: int
) -> None:
    """A fused tensor whose parts have different sizes: each part an array of its own, and back into one tensor.

    ``grouped`` puts a dim before the parts in the same axis, as a regrouping per key head does; ``place`` says
    where the fused axis stands.
    """
    groups = 3 if grouped else 1
    parts = {f"p{i}": length * inner for i, length in enumerate(lengths)}
    sizes = {f"n{i}": length for i, length in enumerate(lengths)}
    dims = Dims(
        {"fused": Concat.of(**parts), "group": groups, "inner": inner, "embed": embed, "layer": (4, 9), **sizes}
    )
    width = groups * sum(parts.values())
    random = np.random.default_rng(0)
    fused = {f"s_{at}": random.normal(size=(embed, width)).astype(np.float32) for at in (4, 9)}
    rules, expected, start = [], {}, 0
    for i, (part, length) in enumerate(parts.items()):
        term = f"fused.{part}(n{i} inner)"
        axis = f"(group {term})" if grouped else term
        extra = "group " if grouped else ""
        sides_ = ([f"{axis} embed", f"embed {axis}", f"embed {axis}"])[place]
        layout = parse_layout(f"{sides_} -> n{i} layer {extra}embed inner")
        rules.append(PlainRule(Template("s_{layer}"), Template(f"t{i}"), layout))
        taken = np.stack([
            fused[f"s_{at}"].reshape(embed, groups, -1)[:, :, start : start + length]
            .reshape(embed, groups, lengths[i], inner).transpose(2, 1, 0, 3)
            for at in (4, 9)
        ], axis=1)  # fmt: skip
        expected[f"t{i}"] = taken if grouped else taken[:, :, 0]
        start += length
    before = {name: np.ascontiguousarray(array.T) if place == 0 else array for name, array in fused.items()}
    equal(carried_out(rules, dims, before, chunk_bytes), expected)
    equal(carried_out([rule.inverse(dims) for rule in rules], dims, expected, chunk_bytes), before)
