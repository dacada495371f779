import itertools

from pairs import covering


def test_every_pair_is_met_by_fewer_cases():
    axes = ("abcd", (True, False), "xy")
    cases = list(itertools.product(*axes))
    chosen = covering(cases)
    assert len(chosen) == 8 < len(cases)
    for one, other in itertools.combinations(range(3), 2):
        met = {(case[one], case[other]) for case in chosen}
        assert met == set(itertools.product(axes[one], axes[other]))


def test_two_choices_are_all_pairs():
    assert len(covering(list(itertools.product("ab", "xyz")))) == 6
