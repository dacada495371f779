"""Work items that go into one data file together."""

import doctest
import json

from hypothesis import example, given
from hypothesis import strategies as st
from tensorferry.mappings.plan import groups
from tensorferry.mappings.plan.array_spec import ArraySpec
from tensorferry.mappings.plan.groups import DATA_FILE_BYTES, LEAST_FILES, Group, aim_bytes, grouped, runs
from tensorferry.mappings.plan.work import Part, WorkItem

MIB = 1 << 20


def item(number: int, nbytes: int) -> WorkItem:
    spec = ArraySpec(("w", str(number)), "uint8", (nbytes,), (nbytes,), (nbytes,))
    return WorkItem(f"{number:07d}", (), (Part(spec, (0,), 0.0),), (), 2 * nbytes)


def files(sizes: list[int], **how: int) -> list[Group]:
    return list(grouped([item(*one) for one in enumerate(sizes)], sum(sizes), **how))


def test_examples():
    assert doctest.testmod(groups).failed == 0


def test_a_large_model_in_files_of_about_400_megabytes():
    found = files([64 * MIB] * 250)
    assert {group.write_bytes for group in found[:-1]} == {6 * 64 * MIB}
    assert len(found) == 42
    assert 0.9 * DATA_FILE_BYTES < found[0].write_bytes < 1.1 * DATA_FILE_BYTES


def test_a_small_model_has_a_file_for_each_of_several_workers():
    assert len(files([3 * MIB] * 80)) == LEAST_FILES
    assert [len(group.items) for group in files([7, 5, 9])] == [1, 1, 1]


def test_a_group_is_known_by_its_first_and_last_item_and_survives_json():
    first, second, *_ = files([10, 10, 30, 5, 5, *[10] * 30], file_bytes=20)
    assert (first.id, second.id) == ("0000000-0000001", "0000002-0000002")
    assert [part.spec.key for part in first.parts] == ["w.0", "w.1"]
    assert (first.write_bytes, first.read_bytes) == (20, 40)
    assert Group.from_json(json.loads(json.dumps(first.to_json()))) == first


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 2000))
@example([], 1)
@example([0, 0, 5], 5)
def test_runs_keep_every_thing_in_its_order_and_come_near_the_aim(sizes, aim):
    found = list(runs(enumerate(sizes), lambda one: one[1], aim))
    assert [thing for run in found for thing in run] == list(enumerate(sizes))
    assert all(found)
    totals = [sum(size for _, size in run) for run in found]
    for run, following, total in zip(found, found[1:], totals, strict=False):
        assert abs(total - aim) <= abs(total + following[0][1] - aim)  # one more would be no nearer
        assert len(run) == 1 or total <= aim + run[-1][1] / 2


@given(st.integers(0, 10**13), st.integers(1, 10**10))
def test_the_aim_leaves_files_enough(total, file_bytes):
    assert 1 <= aim_bytes(total, file_bytes) <= file_bytes
    assert aim_bytes(total, file_bytes) * LEAST_FILES <= max(total, LEAST_FILES)
