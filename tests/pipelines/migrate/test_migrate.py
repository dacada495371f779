"""Every sample becomes exactly what MaxText itself would have written, and bad steps stop nothing."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorferry.pipelines.cli.main import main
from tensorferry.pipelines.migrate import copy_items as items
from tensorferry.pipelines.storage.tree_store import LocalTree
from tunix_samples import expected_tree, open_stored, snapshot, stored_tree, unpack

BROKEN = "broken_steps/checkpoints"
FORMATS = ("sft_llama_scan_adamw", "sharded_fsdp4", "tunix_main_v1", "pathways_no_ocdbt", "sft_skip_spikes")


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("migrate"))


def migrate(source: Path, output: Path, *args: str) -> tuple[int, dict[str, Any]]:
    """Runs the command and returns its exit code and its report."""
    told = output.with_name(f"{output.name}.json")
    code = main(["migrate", "--source", str(source), "--output", str(output), "--json", str(told), *args])
    return code, json.loads(told.read_text())


def outcomes(report: dict[str, Any]) -> dict[str, str]:
    return {step["path"]: step["outcome"] for step in report["steps"]}


def sections(report: dict[str, Any]) -> dict[str, Any]:
    return {step["path"]: step["sections"] for step in report["steps"] if step["outcome"] in ("planned", "migrated")}


@pytest.fixture(scope="module")
def dry(bucket: Path) -> dict[str, Any]:
    output = bucket.parent / "nothing"
    code, report = migrate(bucket, output, "--dry-run", "--structural", "--rng-impl", "keep")
    assert code == 4
    assert not output.exists()
    return report


@pytest.fixture(scope="module")
def kept(bucket: Path, dry: dict[str, Any]) -> dict[str, Any]:
    """All samples migrated with every PRNG key; the dry run comes before, the source must stay as it was."""
    before = snapshot(bucket)
    code, report = migrate(bucket, bucket.parent / "kept", "--structural", "--rng-impl", "keep")
    assert snapshot(bucket) == before
    assert code == 4
    return report


def test_every_sample_becomes_the_expected_tree(bucket: Path, kept: dict[str, Any]) -> None:
    compared = 0
    for step in kept["steps"]:
        wanted = expected_tree(bucket, step["run"], step["role"], step["step"])
        if wanted is None or step["outcome"] != "migrated" or step["run"] == "broken_steps":
            continue
        found = stored_tree(bucket.parent / "kept" / step["path"] / "items")
        for name, leaf in found.items():
            types = leaf.pop("key_types")
            is_list = name.startswith("opt_state/") and name.split("/")[1].isdigit()
            assert types == [2, 1, *[2] * (len(types) - 2)] if is_list else set(types) == {2}, name
        assert found == wanted, step["path"]
        compared += 1
    assert compared == 27


def test_verify_finds_every_sample_equal(bucket: Path, kept: dict[str, Any], capsys: pytest.CaptureFixture) -> None:
    assert main(["verify", "--source", str(bucket), "--output", str(bucket.parent / "kept")]) == 0
    told = capsys.readouterr().out
    arrays = sum(s["arrays"] for step in sections(kept).values() for name, s in step.items() if name != "dropped")
    assert f"39 steps, {arrays:,} arrays" in told
    left = {line.split(": ")[1] for line in told.splitlines() if line.startswith("not migrated: ")}
    assert left == {path for path, outcome in outcomes(kept).items() if outcome != "migrated"}


def test_the_dry_run_tells_what_the_run_does(dry: dict[str, Any], kept: dict[str, Any]) -> None:
    assert sections(dry) == sections(kept)
    assert len(sections(kept)) == 39
    planned = {path: "migrated" if outcome == "planned" else outcome for path, outcome in outcomes(dry).items()}
    assert planned == outcomes(kept)
    adam = sections(kept)["rl_ppo/checkpoints/actor/2"]
    assert {name: section["arrays"] for name, section in adam.items()} == {
        "weights": 12, "nnx_aux": 12, "opt_state": 26, "step": 1, "dropped": 2,
    }  # fmt: skip


def test_the_damaged_run(kept: dict[str, Any]) -> None:
    names = {path.removeprefix(f"{BROKEN}/"): out for path, out in outcomes(kept).items() if path.startswith(BROKEN)}
    whole = ("1", "7", "9", "11", "12", "13", "16", "17", "0018", "step_19")
    alone = ("2.orbax-checkpoint-tmp", "3.orbax-checkpoint-tmp-1750000000000000", "4", "10")
    assert names == {
        **dict.fromkeys(whole, "migrated"), **dict.fromkeys(alone, "left alone"), "15": "skipped",
        **dict.fromkeys(("5", "6", "8", "14", "22"), "refused"),
    }  # fmt: skip
    reasons = {step["path"]: step["reason"] for step in kept["steps"]}
    assert "not JSON" in reasons[f"{BROKEN}/5"]
    assert "expected 26912 bytes; found no such file" in reasons[f"{BROKEN}/22"]
    assert "the save did not finish" in reasons[f"{BROKEN}/4"]
    ignored = {each["path"] for each in kept["ignored"]}
    assert {f"{BROKEN}/21", f"{BROKEN}/export"} <= ignored


def test_nothing_but_steps_is_left_in_the_output(bucket: Path, kept: dict[str, Any]) -> None:
    output = bucket.parent / "kept"
    assert not list(output.rglob(".*"))
    published = {str(path.parent.relative_to(output)) for path in output.rglob("_CHECKPOINT_METADATA")}
    assert published == set(sections(kept))


def test_metadata_of_a_step(bucket: Path, kept: dict[str, Any]) -> None:
    step = bucket.parent / "kept" / "rl_ppo/checkpoints/actor/4"
    custom = json.loads((step / "_CHECKPOINT_METADATA").read_bytes())["custom_metadata"]
    assert (custom["global_step"], custom["scan_layers"]) == (4, True)
    assert custom["tensorferry"]["migrated_from"] == f"{bucket}/rl_ppo/checkpoints/actor/4"
    assert custom["tensorferry"]["validated"] is False
    grain = bucket.parent / "kept" / "distill_grain_iter/checkpoints/2"
    assert snapshot(grain / "iter") == snapshot(bucket / "distill_grain_iter/checkpoints/2/iter")
    handlers = json.loads((grain / "_CHECKPOINT_METADATA").read_bytes())["item_handlers"]
    assert set(handlers) == {"items", "iter"}


def test_the_manifest_accounts_for_every_leaf(bucket: Path, kept: dict[str, Any]) -> None:
    for path in ("sft_intermediates/checkpoints/2", "training_engine/checkpoints/2", "sft_grad_accum/checkpoints/2"):
        manifest = json.loads((bucket.parent / "kept" / path / "items/tensorferry.manifest.json").read_bytes())
        run, step = path.split("/")[0], path.split("/")[-1]
        source = json.loads((bucket.parent / "expected" / run / f"{step}.json").read_bytes())["source"]
        stored = {f"{item}/{name.replace('/', '.')}" for item, told in source.items() for name in told["leaves"]}
        gone = {f"{each['name'].split('/')[0]}/{'.'.join(each['name'].split('/')[1:])}" for each in manifest["dropped"]}
        moved = {array["source"] for array in manifest["arrays"].values()}
        assert stored <= gone | moved, path
        assert not gone & moved
        assert all(each["reason"] for each in manifest["dropped"])


def test_the_manifest_counts_nan_and_inf(bucket: Path, kept: dict[str, Any]) -> None:
    items = bucket.parent / "kept" / "sft_qwen3_dropout_bf16/checkpoints/3/items"
    arrays = json.loads((items / "tensorferry.manifest.json").read_bytes())["arrays"]
    assert {array["statistics"]["nan_count"] for array in arrays.values()} == {0}
    name = "params.params.token_embedder.embedding"
    values = open_stored(items, name).read().result().astype(np.float64)
    assert arrays[name]["dtype"] == "bfloat16"
    assert arrays[name]["statistics"]["max"] == values.max()
    assert arrays[name]["statistics"]["count"] == values.size


def test_chunks_move_as_they_are_stored(bucket: Path, kept: dict[str, Any]) -> None:
    items = bucket.parent / "kept" / "sharded_fsdp4/checkpoints/2/items"
    arrays = json.loads((items / "tensorferry.manifest.json").read_bytes())["arrays"]
    assert {name for name, array in arrays.items() if not array["moved_as_stored"]} == {"step"}
    name = "params.params.decoder.decoder_norm.scale"
    assert arrays[name]["chunk"] == [8]
    source = bucket / "sharded_fsdp4/checkpoints/2/model_params"
    import tensorstore as ts

    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{source}/"}).result()
    for chunk in range(4):
        stored = store.read(f"decoder.decoder_norm.scale.value/{chunk}").result().value
        assert (items / name / "c" / str(chunk)).read_bytes() == stored != b""


def test_zero_arrays_are_really_stored(bucket: Path, kept: dict[str, Any]) -> None:
    items = bucket.parent / "kept" / "sft_skip_spikes/checkpoints/2/items"
    assert not open_stored(items, "opt_state.is_skipped").read().result().any()
    assert (items / "opt_state.is_skipped/c").is_file()


def test_a_second_run_skips_what_is_done(bucket: Path, kept: dict[str, Any]) -> None:
    output = bucket.parent / "kept"
    before = snapshot(output)
    code, report = migrate(bucket, output, "--structural", "--rng-impl", "keep")
    assert code == 4
    expected = {path: "skipped" if out == "migrated" else out for path, out in outcomes(kept).items()}
    assert outcomes(report) == expected
    assert snapshot(output) == before
    reasons = [step["reason"] for step in report["steps"] if step["path"] == "sft_sgd/checkpoints/2"]
    assert reasons[0].startswith("already migrated from this source: ")
    _, report = migrate(bucket, output, "--structural", "--include", "sft_sgd")
    assert report["steps"][0]["reason"].startswith("already migrated from this source with other options: ")


@pytest.mark.parametrize("store_format", ["ocdbt", "zarr2"])
def test_other_formats_hold_the_same_tree(
    bucket: Path, kept: dict[str, Any], store_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(items, "GROUP_BYTES", 2000)
    output = bucket.parent / store_format
    includes = [arg for run in FORMATS for arg in ("--include", run)]
    code, report = migrate(bucket, output, "--structural", "--rng-impl", "keep", "--format", store_format, *includes)
    assert code == 0
    for path in sections(report):
        metadata = json.loads((output / path / "items/_METADATA").read_bytes())
        assert (metadata["use_ocdbt"], metadata["use_zarr3"]) == (store_format == "ocdbt", store_format != "zarr2")
        assert stored_tree(output / path / "items") == stored_tree(bucket.parent / "kept" / path / "items"), path
        manifest = json.loads((output / path / "items/tensorferry.manifest.json").read_bytes())
        moved = [array["moved_as_stored"] for array in manifest["arrays"].values()]
        assert any(moved) == (store_format == "ocdbt")
        if store_format == "ocdbt":
            # Several batches of chunks go into one file: its attempt is named after the first and the last.
            attempts = [folder.name for folder in (output / path / "items/parts").iterdir()]
            assert 1 < len(attempts) <= 2 * items.LEAST_FILES + 1
            assert any(len(name.split("-")) == 3 for name in attempts)
            assert {len(list((output / path / "items/parts" / name / "d").iterdir())) for name in attempts} == {1}
    assert len(sections(report)) == 6


def test_without_statistics_the_bytes_are_the_same(bucket: Path, kept: dict[str, Any]) -> None:
    output = bucket.parent / "unlooked"
    code, _ = migrate(bucket, output, "--structural", "--rng-impl", "keep", "--no-statistics", "--include", "sft_sgd")
    assert code == 0
    items = output / "sft_sgd/checkpoints/2/items"
    assert stored_tree(items) == stored_tree(bucket.parent / "kept/sft_sgd/checkpoints/2/items")
    array = json.loads((items / "tensorferry.manifest.json").read_bytes())["arrays"]["opt_state.1.count"]
    assert "statistics" not in array
    assert array["stored_digests"][0].startswith("xxh3-128:")


def test_by_default_keys_of_another_implementation_stay_behind(bucket: Path) -> None:
    output = bucket.parent / "rbg"
    code, report = migrate(bucket, output, "--structural", "--include", "sft_llama_scan_adamw")
    assert code == 0
    tree = stored_tree(output / "sft_llama_scan_adamw/checkpoints/3/items")
    aux = [name for name in tree if name.startswith("nnx_aux/")]
    assert aux
    assert {name.split("/")[-1] for name in aux} == {"count"}
    reasons = {gone["reason"] for gone in report["steps"][0]["dropped"]}
    assert reasons == {"a threefry2x32 key, and the reader runs unsafe_rbg; its count is kept"}


def test_orbax_restores_lists_gaps_and_typed_keys(bucket: Path, kept: dict[str, Any]) -> None:
    import jax
    import orbax.checkpoint as ocp

    items = bucket.parent / "kept" / "rl_grpo_qwen3/checkpoints/actor/3/items"
    checkpointer = ocp.PyTreeCheckpointer()
    restored = checkpointer.restore(items)
    assert isinstance(restored["opt_state"], list)
    assert (len(restored["opt_state"]), restored["opt_state"][1]) == (3, None)
    assert restored["step"].dtype == np.int32

    def target(path: Any, leaf: Any) -> Any:
        words = str(getattr(path[-1], "key", "")) == "key" and str(path[0].key) == "nnx_aux"
        return jax.random.wrap_key_data(np.zeros_like(leaf), impl="threefry2x32") if words else leaf

    typed = jax.tree_util.tree_map_with_path(target, restored)
    arguments = ocp.checkpoint_utils.construct_restore_args(typed)
    again = checkpointer.restore(items, item=typed, restore_args=arguments)
    keys = [
        leaf for leaf in jax.tree.leaves(again["nnx_aux"]) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]
    words = [leaf for leaf in jax.tree.leaves(restored["nnx_aux"]) if leaf.ndim and leaf.shape[-1] == 2]
    assert keys
    assert {str(jax.random.key_impl(key)) for key in keys} == {"threefry2x32"}
    stored = {np.asarray(jax.random.key_data(key)).tobytes() for key in keys}
    assert stored <= {np.asarray(word).tobytes() for word in words}


def test_an_unreadable_run_fails_alone(bucket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = bucket.parent / "two"
    for run in ("sft_sgd", "sft_llama_scan_clip"):
        shutil.copytree(bucket / run, source / run)
    real = LocalTree.sizes

    def denied(self: LocalTree, folder: str) -> dict[str, int]:
        if folder.startswith("sft_sgd/checkpoints/2/"):
            raise PermissionError(13, "Permission denied", folder)
        return real(self, folder)

    monkeypatch.setattr(LocalTree, "sizes", denied)
    code, report = migrate(source, bucket.parent / "two-out", "--structural")
    assert code == 4
    assert outcomes(report) == {"sft_llama_scan_clip/checkpoints/3": "migrated", "sft_sgd/checkpoints/2": "refused"}
    refused = next(step for step in report["steps"] if step["outcome"] == "refused")
    assert "permission denied" in refused["reason"]


def test_a_folder_that_cannot_be_listed_is_told(bucket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = bucket.parent / "listed"
    shutil.copytree(bucket / "sft_sgd", source / "sft_sgd")
    (source / "secret").mkdir()
    real = LocalTree.list

    def denied(self: LocalTree, folder: str) -> Any:
        if folder == "secret":
            raise PermissionError(13, "Permission denied", folder)
        return real(self, folder)

    monkeypatch.setattr(LocalTree, "list", denied)
    code, report = migrate(source, bucket.parent / "listed-out", "--structural")
    assert code == 4
    assert report["unreadable"] == [{"path": "secret", "reason": "permission denied"}]
    assert outcomes(report) == {"sft_sgd/checkpoints/2": "migrated"}


def test_a_chunk_that_vanishes_after_the_plan_refuses_its_step_alone(
    bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorferry.pipelines.migrate import copy_work
    from tensorferry.pipelines.migrate.step_reader import StepReader

    source = bucket.parent / "vanishing"
    for run in ("sft_sgd", "sft_llama_scan_clip"):
        shutil.copytree(bucket / run, source / run)
    real = copy_work.copy_item

    def after_loss(item: Any, reader: StepReader, *rest: Any) -> Any:
        if reader.step_path.startswith("sft_sgd"):
            for file in (source / "sft_sgd/checkpoints/2/model_params/ocdbt.process_0/d").iterdir():
                file.unlink()
        return real(item, reader, *rest)

    monkeypatch.setattr(copy_work, "copy_item", after_loss)
    output = bucket.parent / "vanishing-out"
    code, report = migrate(source, output, "--structural")
    assert code == 4
    assert outcomes(report) == {"sft_llama_scan_clip/checkpoints/3": "migrated", "sft_sgd/checkpoints/2": "refused"}
    assert not (output / "sft_sgd/checkpoints/2").exists()
    refused = next(step for step in report["steps"] if step["outcome"] == "refused")
    assert "this step is left out" in refused["reason"]


def test_a_changed_source_is_not_taken_for_the_old_one(bucket: Path) -> None:
    source, output = bucket.parent / "changing", bucket.parent / "changing-out"
    shutil.copytree(bucket / "sft_sgd", source / "sft_sgd")
    assert migrate(source, output, "--structural")[0] == 0
    before = snapshot(output)
    shutil.rmtree(source / "sft_sgd/checkpoints/2")
    shutil.copytree(bucket / "sft_llama_scan_clip/checkpoints/3", source / "sft_sgd/checkpoints/2")
    code, report = migrate(source, output, "--structural")
    assert code == 4
    assert "Move it away, or choose another output." in report["steps"][0]["reason"]
    assert snapshot(output) == before
