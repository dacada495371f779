"""Listing ahead finds what the plain walk finds, and looks into no array's folder."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tensorferry.pipelines.orbax.listing_ahead import AheadTree, listed_ahead
from tensorferry.pipelines.orbax.step_discovery import discover
from tensorferry.pipelines.storage.tree_store import Listed, LocalTree
from tunix_samples import unpack


class Watched(LocalTree):
    """A tree that remembers what was listed, and refuses one folder."""

    listed: list[str]

    def list(self, folder: str) -> Listed:
        self.listed.append(folder)
        if folder == "sft_sgd/checkpoints":
            raise PermissionError(13, "permission denied", folder)
        return super().list(folder)


def watched(root: Path) -> Watched:
    store = Watched(str(root))
    object.__setattr__(store, "listed", [])
    return store


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("ahead"))


def test_the_same_is_found(bucket: Path) -> None:
    plain = discover(watched(bucket))
    store = watched(bucket)
    with ThreadPoolExecutor(8) as pool:
        assert discover(AheadTree(store, pool)) == plain
    assert [each.path for each in plain.unreadable] == ["sft_sgd/checkpoints"]
    assert len(plain.steps) > 40


def test_hardly_more_is_listed_than_the_walk_needs(bucket: Path) -> None:
    plain, ahead = watched(bucket), watched(bucket)
    discover(plain)
    with ThreadPoolExecutor(8) as pool:
        discover(AheadTree(ahead, pool))
    assert set(plain.listed) <= set(ahead.listed)
    assert len(ahead.listed) == len(set(ahead.listed))
    below_items = [path for path in ahead.listed if "/model_params/" in path or "/items/" in path]
    assert below_items == []
    assert len(ahead.listed) <= len(plain.listed) + 12


def test_a_local_tree_is_walked_as_it_is(bucket: Path) -> None:
    store = LocalTree(str(bucket))
    with listed_ahead(store) as tree:
        assert tree is store
