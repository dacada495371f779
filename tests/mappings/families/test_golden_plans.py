"""Golden plans: what a change of a mapping does to the plan of a real model shows as a diff of text."""

import pytest
from golden import FOLDER, MODELS, golden_plans
from tensorferry.mappings.families.registry import family_names

# MaxText publishes no tree of these; their plans are tested by formula.
WITHOUT_TREE = {"mistral"}


@pytest.fixture(scope="module")
def plans() -> dict[str, str]:
    return dict(golden_plans())


def test_every_family_has_a_golden_plan() -> None:
    assert set(family_names()) == MODELS.keys() | WITHOUT_TREE


def test_golden_plans_are_what_the_tool_prints(plans: dict[str, str]) -> None:
    stored = {path.name: path.read_text() for path in FOLDER.iterdir()}
    assert stored.keys() == plans.keys(), "run: python tests/golden.py --write"
    changed = [name for name, text in plans.items() if stored[name] != text]
    assert not changed, f"{changed}: run python tests/golden.py --write and read the diff"


def test_golden_plans_add_up(plans: dict[str, str]) -> None:
    assert not [name for name, text in plans.items() if "does not add up" in text]
