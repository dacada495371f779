"""Stretches: whole lines, every item once, and the longest items first where workers get fixed shares."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorferry.pipelines.engine.stretches import dealt_stretches, even_stretches


def _lines(stretch):
    path, offset, length = stretch
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(length).splitlines()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("plan")


def _plan(directory, sizes, last_newline=True):
    path = directory / "items.jsonl.in"
    text = "".join(f"{index} {'é' * (index % 4)}\n" for index in range(len(sizes)))
    path.write_text(text if last_newline else text[:-1])
    return str(path)


def _numbers(stretch):
    return [int(line.split()[0]) for line in _lines(stretch)]


@given(st.lists(st.integers(0, 99), min_size=1, max_size=30), st.integers(1, 5), st.booleans())
def test_dealt_stretches_hold_every_item_once_longest_first(directory, sizes, workers, last_newline):
    stretches = dealt_stretches(_plan(directory, sizes, last_newline), sizes, workers, str(directory))
    shares = [_numbers(stretch) for stretch in stretches]
    assert sorted(item for share in shares for item in share) == list(range(len(sizes)))
    assert len(shares) <= workers
    for share in shares:
        assert [sizes[item] for item in share] == sorted((sizes[item] for item in share), reverse=True)


@given(st.integers(1, 40), st.integers(1, 9))
def test_even_stretches_tile_the_plan_in_order(directory, items, stretches):
    cut = even_stretches(_plan(directory, [1] * items), items, stretches)
    shares = [_numbers(stretch) for stretch in cut]
    assert [item for share in shares for item in share] == list(range(items))
    assert len(shares) == min(items, stretches)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_another_number_of_lines_than_sizes_is_refused(directory):
    with pytest.raises(ValueError, match="has 3 work items, but 4 sizes were given"):
        dealt_stretches(_plan(directory, [1, 2, 3]), [1, 2, 3, 4], 2, str(directory))
