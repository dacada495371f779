"""Steps are found at any depth, and what is not a whole old step is named with its reason."""

import json
import os
import shutil
import tarfile
from pathlib import Path

import pytest
from tensorferry.mappings.words.problems import FerryError
from tensorferry.pipelines.orbax.step_discovery import Discovery, FoundStep, discover, select
from tensorferry.pipelines.storage.tree_store import LocalTree, ObjectTree, open_tree

DATA = Path(__file__).parents[2] / "data" / "tunix" / "bucket.tar.xz"
BROKEN = "broken_steps/checkpoints"


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("tunix")
    with tarfile.open(DATA) as archive:
        archive.extractall(where, filter="data")
    (where / "bucket" / BROKEN / "14" / "model_params").mkdir()
    (where / "bucket" / BROKEN / "20").mkdir()
    return where / "bucket"


@pytest.fixture(scope="module")
def everything(bucket: Path) -> Discovery:
    return discover(LocalTree(str(bucket)))


def step_of(discovery: Discovery, name: str) -> FoundStep:
    return next(found for found in discovery.steps if found.path == f"{BROKEN}/{name}")


def make_step(folder: Path, *, committed: bool = True, items: tuple[str, ...] = ("model_params",)) -> Path:
    for item in items:
        (folder / item).mkdir(parents=True)
        (folder / item / "_METADATA").write_text('{"tree_metadata": {"a": 1}}')
    metadata = {"commit_timestamp_nsecs": 7 if committed else None}
    (folder / "_CHECKPOINT_METADATA").write_text(json.dumps(metadata))
    return folder


STATUS = {
    "1": ("old", ""),
    "2.orbax-checkpoint-tmp": ("unfinished", "temporary name"),
    "3.orbax-checkpoint-tmp-1750000000000000": ("unfinished", "temporary name"),
    "4": ("unfinished", "commit"),
    "5": ("old", ""),
    "6": ("old", ""),
    "7": ("old", ""),
    "8": ("damaged", "model_params is missing"),
    "9": ("old", ""),
    "10": ("unfinished", "optimizer_state is still under its temporary name"),
    "11": ("old", ""),
    "12": ("old", ""),
    "13": ("old", ""),
    "14": ("damaged", "model_params has no _METADATA"),
    "15": ("new", "already in the new layout"),
    "16": ("old", "a new-layout conversion was left unfinished beside it"),
    "17": ("old", "its items/ folder is half-written"),
    "0018": ("old", ""),
    "step_19": ("old", ""),
    "20": ("damaged", "an empty folder"),
    "22": ("old", ""),
}


@pytest.mark.parametrize("name", STATUS)
def test_a_damaged_step_is_what_its_manifest_says(everything: Discovery, name: str) -> None:
    status, reason = STATUS[name]
    found = step_of(everything, name)
    assert found.status == status
    assert reason in found.reason
    assert bool(found.reason) == bool(reason)


def test_every_damage_of_the_manifest_is_accounted_for(bucket: Path, everything: Discovery) -> None:
    manifest = json.loads((bucket / "broken_steps" / "manifest.json").read_text())
    seen = {found.path for found in everything.steps} | {ignored.path for ignored in everything.ignored}
    assert {f"{BROKEN}/{name}" for name in manifest} <= seen


def test_what_is_no_step_is_ignored_with_a_reason(everything: Discovery) -> None:
    assert {ignored.path.removeprefix(f"{BROKEN}/"): ignored.reason for ignored in everything.ignored} == {
        "export": "looks like a step, but there is no step number in its name",
        "21": "a file, not a step",
        "events.out.tfevents.1": "a file, not a step",
    }


def test_runs_roles_and_numbers(everything: Discovery) -> None:
    series = {(found.run, found.role, found.step): found.status for found in everything.steps}
    assert series["rl_ppo", "actor", 4] == "old"
    assert series["rl_ppo", "critic", 2] == "old"
    assert series["broken_steps", "", 19] == "old"
    assert series["mixed_layout", "", 2] == "old"
    assert series["mixed_layout", "", 3] == "new"
    assert len({found.run for found in everything.steps}) == 25


def test_depth_does_not_matter(tmp_path: Path) -> None:
    for place in ("5", "run/checkpoints/7", "team/2024/run/critic/9", "a/1/checkpoints/actor/3"):
        make_step(tmp_path / place)
    found = {(s.path, s.run, s.role, s.step) for s in discover(LocalTree(str(tmp_path))).steps}
    assert found == {
        ("5", "", "", 5),
        ("run/checkpoints/7", "run", "", 7),
        ("team/2024/run/critic/9", "team/2024/run", "critic", 9),
        ("a/1/checkpoints/actor/3", "a/1", "actor", 3),
    }


def test_two_spellings_of_one_step_are_ambiguous(tmp_path: Path) -> None:
    for name in ("0018", "18", "step_19", "20"):
        make_step(tmp_path / name)
    steps = {found.path: found for found in discover(LocalTree(str(tmp_path))).steps}
    assert [steps[name].status for name in ("0018", "18", "step_19", "20")] == ["ambiguous"] * 2 + ["old"] * 2
    assert steps["18"].reason == "0018 and 18 are the same step: remove or rename one"


def test_an_unfinished_twin_takes_nothing_away(tmp_path: Path) -> None:
    make_step(tmp_path / "18")
    make_step(tmp_path / "18.orbax-checkpoint-tmp")
    assert {found.status for found in discover(LocalTree(str(tmp_path))).steps} == {"old", "unfinished"}


def test_uncommitted_steps_can_be_accepted(bucket: Path) -> None:
    found = step_of(discover(LocalTree(str(bucket)), accept_uncommitted=True), "4")
    assert found.status == "old"


def test_an_object_store_needs_the_commit_file(tmp_path: Path) -> None:
    make_step(tmp_path / "run" / "3")
    make_step(tmp_path / "run" / "4")
    (tmp_path / "run" / "4" / "commit_success.txt").touch()
    steps = {found.step: found for found in discover(ObjectTree(f"file://{tmp_path}")).steps}
    assert (steps[3].status, steps[3].reason) == ("unfinished", "no commit_success.txt: the save did not finish")
    assert steps[4].status == "old"


def test_an_object_store_gives_the_same_steps(bucket: Path, everything: Discovery) -> None:
    seen = {found.path: found.status for found in discover(ObjectTree(f"file://{bucket}")).steps}
    assert seen == {found.path: found.status for found in everything.steps}


def test_a_new_layout_step_without_its_commit_is_unfinished(tmp_path: Path) -> None:
    make_step(tmp_path / "3", committed=False, items=("items",))
    make_step(tmp_path / "4", items=("items",))
    assert [found.status for found in discover(LocalTree(str(tmp_path))).steps] == ["unfinished", "new"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_without_permission_stops_nothing(tmp_path: Path) -> None:
    make_step(tmp_path / "a" / "1")
    make_step(tmp_path / "b" / "2")
    (tmp_path / "a").chmod(0)
    try:
        _assert_only_b_is_readable(discover(LocalTree(str(tmp_path))))
    finally:
        (tmp_path / "a").chmod(0o700)


def test_a_folder_that_cannot_be_listed_stops_nothing(tmp_path: Path) -> None:
    class Denied(LocalTree):
        def list(self, folder: str):
            if folder == "a":
                raise PermissionError(13, "Permission denied")
            return super().list(folder)

    make_step(tmp_path / "a" / "1")
    make_step(tmp_path / "b" / "2")
    _assert_only_b_is_readable(discover(Denied(str(tmp_path))))


def _assert_only_b_is_readable(discovery: Discovery) -> None:
    assert [found.path for found in discovery.steps] == ["b/2"]
    assert [(folder.path, folder.reason) for folder in discovery.unreadable] == [("a", "permission denied")]


def test_a_link_to_a_folder_above_is_not_followed(tmp_path: Path) -> None:
    make_step(tmp_path / "run" / "3")
    (tmp_path / "run" / "up").symlink_to(tmp_path)
    (tmp_path / "again").symlink_to(tmp_path / "run")
    paths = {found.path for found in discover(LocalTree(str(tmp_path))).steps}
    assert paths == {"run/3", "again/3"}


def test_the_root_must_be_there_and_not_a_step(tmp_path: Path) -> None:
    with pytest.raises(FerryError, match=r"nowhere: expected a folder of runs; found no such folder\."):
        discover(open_tree(str(tmp_path / "nowhere")))
    step = make_step(tmp_path / "12")
    with pytest.raises(FerryError, match=r"12 is one step\. Give the folder above it"):
        discover(open_tree(str(step)))


def test_an_unknown_scheme_is_a_sentence() -> None:
    with pytest.raises(
        FerryError, match=r"ftp://x: expected a local path, file://, gs://, hf:// or https://; found ftp://\."
    ):
        open_tree("ftp://x")


def paths_of(discovery: Discovery) -> set[str]:
    return {found.path for found in discovery.steps}


def test_include_and_exclude_match_a_step_or_a_folder_above_it(everything: Discovery) -> None:
    assert paths_of(select(everything, include=["rl_ppo"])) == {
        f"rl_ppo/checkpoints/{role}/{step}" for role in ("actor", "critic") for step in (2, 4)
    }
    kept = paths_of(select(everything, include=["rl_*", "dpo_llama/"], exclude=["*/critic"]))
    assert kept == {
        "dpo_llama/checkpoints/2",
        "rl_grpo_qwen3/checkpoints/actor/3",
        "rl_ppo/checkpoints/actor/2",
        "rl_ppo/checkpoints/actor/4",
    }


def test_steps_are_numbers_whatever_their_spelling(everything: Discovery) -> None:
    chosen = select(everything, include=["broken_steps"], steps=[18, 19])
    assert paths_of(chosen) == {f"{BROKEN}/0018", f"{BROKEN}/step_19"}


def test_latest_is_the_highest_finished_step_of_each_run_and_role(everything: Discovery) -> None:
    chosen = select(everything, include=["rl_ppo", "mixed_layout", "broken_steps"], latest=True)
    assert paths_of(chosen) == {
        "rl_ppo/checkpoints/actor/4",
        "rl_ppo/checkpoints/critic/4",
        "mixed_layout/checkpoints/4",
        f"{BROKEN}/22",
    }


def test_nothing_in_the_bucket_is_touched(bucket: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(bucket / "mixed_layout", tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    discover(LocalTree(str(tmp_path)))
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before
