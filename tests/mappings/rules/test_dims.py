"""What words stand for: sizes, labels, grids, uneven parts."""

import pytest
from tensorferry.mappings.families.family import make_dims
from tensorferry.mappings.rules.dims import Concat, Dims, Grid, Index


def dims() -> Dims:
    return Dims({
        "embed": 7, "layer": range(3, 6), "part": ("wi_0", "wi_1"), "block": range(0, 12, 4), "local": range(3),
        "place": Grid(("block", "local")), "qkv": Concat.of(q=8, k=2, v=3),
    })  # fmt: skip


def test_sizes() -> None:
    found = {word: dims().size(word) for word in ("embed", "layer", "part", "1")}
    assert found == {"embed": 7, "layer": 3, "part": 2, "1": 1}
    assert dims().volume(("embed", "layer", "1")) == 21


def test_labels_are_the_checkpoints_positions_count_from_zero() -> None:
    assert [dims().label("layer", {"layer": at}) for at in range(3)] == [3, 4, 5]
    assert [dims().position("layer", {"layer": at}) for at in range(3)] == [0, 1, 2]
    assert dims().label("part", {"part": 1}) == "wi_1"


def test_a_grid_names_layers_by_the_sum_of_its_dims() -> None:
    every = dims().positions(dims().atoms_of("place"))
    assert [dims().label("place", at) for at in every] == [0, 1, 2, 4, 5, 6, 8, 9, 10]
    assert [dims().position("place", at) for at in every] == list(range(9))


def test_positions_run_row_major() -> None:
    assert dims().positions(("part", "local"))[:4] == [
        {"part": 0, "local": 0}, {"part": 0, "local": 1}, {"part": 0, "local": 2}, {"part": 1, "local": 0},
    ]  # fmt: skip
    assert dims().positions(()) == [{}]


def test_parts_lie_one_after_the_other() -> None:
    concat = dims().concat("qkv")
    assert (concat.length, concat.span("q"), concat.span("k"), concat.span("v")) == (13, (0, 8), (8, 2), (10, 3))
    with pytest.raises(KeyError, match=r"no part 'w' among \['q', 'k', 'v'\]"):
        concat.span("w")


def test_words_used_for_what_they_are_not() -> None:
    with pytest.raises(TypeError, match="'place' is a Grid, which has no single size"):
        dims().size("place")
    with pytest.raises(TypeError, match="'qkv' is a Concat, which has no single size"):
        dims().size("qkv")
    with pytest.raises(TypeError, match="'embed' is not a concatenation"):
        dims().concat("embed")
    with pytest.raises(TypeError, match="'embed' enumerates no tensors: it has no labels"):
        dims().label("embed", {"embed": 0})


def test_dims_of_size_zero_are_no_dims() -> None:
    made = make_dims({"embed": 7, "expert_mlp": 0})
    assert "embed" in made
    assert "expert_mlp" not in made


def test_an_index_may_be_given_as_itself() -> None:
    assert Dims({"layer": Index((2, 4))})["layer"] == Index((2, 4))
