"""Reading layouts: what is understood, and the words of every refusal."""

import pytest
from tensorferry.mappings.rules.layout import Layout, LayoutError, Slice, parse_layout, side_atoms


def test_words_axes_and_merged_axes() -> None:
    layout = parse_layout("(heads head_dim) embed -> embed layer heads head_dim")
    assert layout.source == (("heads", "head_dim"), ("embed",))
    assert layout.target == (("embed",), ("layer",), ("heads",), ("head_dim",))


def test_a_part_of_an_axis() -> None:
    layout = parse_layout("(group qkv.q(heads lane)) embed -> embed group heads lane")
    assert layout.source[0] == ("group", Slice("qkv", "q", ("heads", "lane")))
    assert side_atoms(layout.source) == ("group", "heads", "lane", "embed")
    assert parse_layout("qkv.k(heads) embed -> embed heads").source[0] == (Slice("qkv", "k", ("heads",)),)


@pytest.mark.parametrize("text", [
    "mlp embed -> embed layer mlp",
    "expert embed (mlp part) -> expert layer embed mlp",
    "(group qkv.q(heads lane)) embed -> embed layer group heads lane",
    "place embed -> 1 place embed",
    " -> layer",
])  # fmt: skip
def test_text_and_layout_are_one(text: str) -> None:
    assert str(parse_layout(text)) == text


def test_spaces_do_not_matter() -> None:
    assert parse_layout("  ( heads   lane )embed->embed heads lane ") == parse_layout(
        "(heads lane) embed -> embed heads lane"
    )


@pytest.mark.parametrize(("text", "words"), [
    ("mlp embed", "no '->'"),
    ("a -> b -> c", "more than one '->'"),
    ("(a b -> a b", "'->' inside parentheses"),
    ("((a b) c) -> a b c", "'(' inside parentheses"),
    ("a) -> a", "')' without '('"),
    ("(a b", "'(' is not closed"),
    ("qkv.q(a -> a", "'qkv.q(' is not closed"),
    ("a, b -> b a", "cannot read ', b -> b a'"),
    ("a a -> a", "a dim stands twice on one side"),
    ("a -> b (c b)", "a dim stands twice on one side"),
])  # fmt: skip
def test_refusals_show_the_text_and_the_mistake(text: str, words: str) -> None:
    with pytest.raises(LayoutError) as error:
        parse_layout(text)
    assert str(error.value) == f"layout {text!r}: {words}"


def test_one_may_stand_twice() -> None:
    assert parse_layout("a -> 1 a 1").target == (("1",), ("a",), ("1",))


def test_the_inverse_exchanges_the_sides() -> None:
    layout = parse_layout("(a b) c -> c a b")
    assert str(layout.inverse) == "c a b -> (a b) c"
    assert layout.inverse.inverse == layout


def test_unrolling_takes_dims_out_of_the_target_alone() -> None:
    layout = parse_layout("mlp embed -> embed block (local mlp)")
    assert str(layout.without(frozenset({"block", "local"}))) == "mlp embed -> embed mlp"


def test_a_grids_word_spreads_over_its_dims() -> None:
    layout = parse_layout("mlp embed -> embed layer mlp")
    assert str(layout.spread({"layer": ("block", "local")})) == "mlp embed -> embed block local mlp"
    assert layout.spread({"other": ("x", "y")}) == layout


def test_layouts_are_equal_by_value() -> None:
    assert Layout((("a",),), (("a",),)) == parse_layout("a -> a")
