"""Real steps are read with their true shapes; every damage is a sentence; bytes land where they belong."""

import hashlib
import json
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
from tensorferry.mappings.tunix.migrate_tree import migrate_tree
from tensorferry.mappings.tunix.model_check import ModelTree, validate
from tensorferry.mappings.tunix.step_plan import MigrateOptions, StepPlan, TargetLeaf
from tensorferry.mappings.tunix.step_tree import StepTree
from tensorferry.mappings.words.problems import FerryError, PlanError
from tensorferry.pipelines.orbax.step_discovery import FoundStep, discover
from tensorferry.pipelines.orbax.step_source import array_spec, read_step, read_template
from tensorferry.pipelines.storage.tree_store import LocalTree, ObjectTree

DATA = Path(__file__).parents[2] / "data" / "tunix"
KEEP = MigrateOptions("keep")
BROKEN = "broken_steps/checkpoints"
REFUSED = ("5", "6", "22")


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("tunix")
    for archive in ("bucket.tar.xz", "expected.tar.xz"):
        with tarfile.open(DATA / archive) as packed:
            packed.extractall(where, filter="data")
    return where / "bucket"


def found_steps(bucket: Path) -> dict[str, FoundStep]:
    return {found.path: found for found in discover(LocalTree(str(bucket))).steps if found.status == "old"}


def read(bucket: Path, path: str) -> StepTree:
    return read_step(LocalTree(str(bucket)), found_steps(bucket)[path])


def expected_of(bucket: Path, found: FoundStep) -> dict[str, Any] | None:
    name = f"{found.run}__{found.role}" if found.role else found.run
    file = bucket.parent / "expected" / name / f"{found.step}.json"
    return json.loads(file.read_text()) if file.exists() else None


def digest(bucket: Path, path: str, step: StepTree, leaf: TargetLeaf) -> str:
    import numpy as np
    import tensorstore as ts

    if leaf.source is None:
        return hashlib.sha256(np.int32(leaf.constant).tobytes()).hexdigest()
    spec = array_spec(LocalTree(str(bucket)), path, step.items[leaf.source.item], leaf.source)
    array = ts.open(spec).result().read().result()
    assert array.shape == leaf.shape
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def told(bucket: Path, path: str, step: StepTree, leaf: TargetLeaf) -> dict[str, Any]:
    if leaf.kind == "none":
        return {"empty": "None"}
    described = {"shape": list(leaf.shape), "dtype": leaf.dtype, "sha256": digest(bucket, path, step, leaf)}
    if not leaf.prng_impl:
        return described
    words = {"key_data_shape": list(leaf.shape), "key_data_dtype": leaf.dtype, "prng_impl": leaf.prng_impl}
    return described | words | {"shape": list(leaf.shape[:-1]), "dtype": "key<fry>"}


def test_every_sample_is_read_and_becomes_the_expected_tree_byte_for_byte(bucket: Path) -> None:
    compared = 0
    for path, found in found_steps(bucket).items():
        expected = expected_of(bucket, found)
        if expected is None or found.run == "broken_steps":
            continue
        step = read(bucket, path)
        plan = migrate_tree(step, KEEP)
        assert plan.problems == (), path
        items = {leaf.name: told(bucket, path, step, leaf) for leaf in plan.leaves}
        wanted = expected["expected_items"]
        bias = "decoder/moe_layers/DeepSeekMoeBlock_0/MoeBlock_0/gate/bias"
        if f"nnx_aux/model/{bias}" in wanted:
            wanted[f"params/params/{bias}"] = wanted[f"nnx_aux/model/{bias}"]
        assert items == wanted, path
        compared += 1
    assert compared == 27


def test_a_critic_of_another_shape_is_read_and_planned_alone(bucket: Path) -> None:
    actor = migrate_tree(read(bucket, "rl_ppo/checkpoints/actor/4"), KEEP)
    critic = migrate_tree(read(bucket, "rl_ppo/checkpoints/critic/4"), KEEP)
    assert actor.problems == critic.problems == ()
    check = validate(critic.weights, ModelTree(actor.weights))
    assert list(check.different) == ["decoder/logits_dense/kernel"]


def test_custom_metadata_and_counters_are_read(bucket: Path) -> None:
    plan = migrate_tree(read(bucket, "rl_ppo/checkpoints/actor/4"), KEEP)
    assert plan.custom_metadata == {"global_step": 4, "scan_layers": True}
    assert plan.step == 4
    accumulated = migrate_tree(read(bucket, "sft_grad_accum/checkpoints/2"), KEEP)
    assert accumulated.step == 2
    assert not [warning for warning in accumulated.warnings if "micro-batches" in warning]


def test_a_shard_is_not_taken_for_the_array(bucket: Path) -> None:
    step = read(bucket, "sharded_fsdp4/checkpoints/2")
    norm = next(leaf for leaf in step.leaves() if leaf.array_name == "decoder.decoder_norm.scale.value")
    assert (norm.shape, norm.chunk_shape) == ((32,), (8,))


def test_storage_is_read_from_each_item(bucket: Path) -> None:
    forms = {
        "tunix_main_v1/checkpoints/3": (True, True),
        "sft_sgd/checkpoints/2": (True, False),
        "pathways_no_ocdbt/checkpoints/2": (False, False),
    }
    for path, form in forms.items():
        item = read(bucket, path).items["model_params"]
        assert (item.use_ocdbt, item.use_zarr3) == form


def test_other_items_are_copied_or_reported(bucket: Path) -> None:
    assert read(bucket, "distill_grain_iter/checkpoints/2").copied_items == ("iter",)
    plan = migrate_tree(read(bucket, "training_engine/checkpoints/2"), KEEP)
    assert {gone.leaf.item for gone in plan.dropped} == {"accumulated_grads"}
    assert any("item accumulated_grads has no place" in warning for warning in plan.warnings)


DAMAGE = {
    "5": r"_METADATA \(in .*/5/model_params\): expected the tree of an Orbax item as JSON; found text that is not JSON",
    "6": r"ocdbt\.process_0/d/\w+ \(in .*/6/model_params\): expected 26912 bytes; found no such file",
    "22": r"ocdbt\.process_0/d/\w+ \(in .*/22/model_params\): expected 26912 bytes; found no such file",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_damaged_step_is_a_sentence(bucket: Path, name: str) -> None:
    with pytest.raises(PlanError, match=DAMAGE[name]):
        read(bucket, f"{BROKEN}/{name}")


def test_the_other_steps_of_the_damaged_run_give_the_same_plan(bucket: Path) -> None:
    good = moves(migrate_tree(read(bucket, f"{BROKEN}/1"), KEEP))
    for path in (path for path in found_steps(bucket) if path.startswith(BROKEN)):
        name = path.rpartition("/")[2]
        if name in REFUSED:
            continue
        plan = migrate_tree(read(bucket, path), KEEP)
        assert plan.problems == (), path
        kept = ("params", "nnx_aux") if name == "9" else ("params", "nnx_aux", "opt_state", "step")
        assert moves(plan) == {target: move for target, move in good.items() if move[0] in kept}


def moves(plan: StepPlan) -> dict[str, tuple]:
    return {
        leaf.name: (leaf.section, leaf.kind, leaf.shape, leaf.dtype, leaf.prng_impl, str(leaf.source))
        for leaf in plan.leaves
        if leaf.constant is None
    }


def test_lost_key_marks_are_guessed_and_told(bucket: Path) -> None:
    plan = migrate_tree(read(bucket, f"{BROKEN}/11"), KEEP)
    assert plan.warnings == ("unmarked PRNG keys of two words are taken for threefry2x32 (6 keys)",)


def test_a_flipped_byte_is_invisible_to_the_plan_and_changes_the_array(bucket: Path) -> None:
    """The reason why digests go into the manifest: no checksum of the source speaks up."""
    digests = []
    for path in (f"{BROKEN}/1", f"{BROKEN}/7"):
        step = read(bucket, path)
        leaves = [leaf for leaf in migrate_tree(step, KEEP).leaves if leaf.section == "params"]
        digests.append([digest(bucket, path, step, leaf) for leaf in leaves])
    assert sum(one != other for one, other in zip(*digests, strict=True)) == 1


def test_the_fingerprint_follows_the_step_and_not_its_place(bucket: Path, tmp_path: Path) -> None:
    path = "mixed_layout/checkpoints/1"
    shutil.copytree(bucket / path, tmp_path / "elsewhere" / "1")
    assert read(tmp_path, "elsewhere/1").fingerprint == read(bucket, path).fingerprint
    assert read(bucket, path).fingerprint != read(bucket, "mixed_layout/checkpoints/2").fingerprint


def test_a_truncated_data_file_is_found(bucket: Path, tmp_path: Path) -> None:
    step = shutil.copytree(bucket / "sft_sgd/checkpoints/2", tmp_path / "2")
    largest = max(step.glob("model_params/ocdbt.process_0/d/*"), key=lambda file: file.stat().st_size)
    os.truncate(largest, 100)
    with pytest.raises(PlanError, match=r"expected \d+ bytes; found 100 bytes"):
        read(tmp_path, "2")


@pytest.mark.parametrize(
    ("file", "found"),
    [
        ("decoder.decoder_norm.scale.value/0", "expected 1 chunks; found 0"),
        ("decoder.decoder_norm.scale.value/.zarray", "expected the metadata of its array; found nothing"),
    ],
)
def test_a_lost_file_of_a_plain_array_is_found(bucket: Path, tmp_path: Path, file: str, found: str) -> None:
    step = shutil.copytree(bucket / "pathways_no_ocdbt/checkpoints/2", tmp_path / "2")
    (step / "model_params" / file).unlink()
    with pytest.raises(PlanError, match=found):
        read(tmp_path, "2")


def test_every_damage_of_both_items_is_listed(bucket: Path, tmp_path: Path) -> None:
    step = shutil.copytree(bucket / "pathways_no_ocdbt/checkpoints/2", tmp_path / "2")
    (step / "model_params" / "token_embedder.embedding.value" / ".zarray").write_text("{")
    (step / "optimizer_state" / "_METADATA").unlink()
    with pytest.raises(PlanError) as refusal:
        read(tmp_path, "2")
    assert len(refusal.value.problems) == 2


def test_metadata_of_the_item_is_the_quiet_fallback(bucket: Path, tmp_path: Path) -> None:
    step = shutil.copytree(bucket / "sft_sgd/checkpoints/2", tmp_path / "2")
    metadata = json.loads((step / "model_params" / "_METADATA").read_text())
    metadata["custom_metadata"] = {"note": 3}
    (step / "model_params" / "_METADATA").write_text(json.dumps(metadata))
    for raw in (None, b"{torn"):
        (step / "_CHECKPOINT_METADATA").unlink()
        if raw:
            (step / "_CHECKPOINT_METADATA").write_bytes(raw)
        assert read(tmp_path, "2").custom_metadata == {"note": 3}
        (step / "_CHECKPOINT_METADATA").touch()


def test_an_object_store_reads_the_same_tree(bucket: Path) -> None:
    found = found_steps(bucket)["tunix_main_v1/checkpoints/3"]
    assert read_step(ObjectTree(f"file://{bucket}"), found) == read_step(LocalTree(str(bucket)), found)


def test_a_template_validates_its_own_run_and_refuses_others(bucket: Path) -> None:
    template = read_template(str(bucket / "mixed_layout/checkpoints/4"))
    assert read_template(str(bucket / "mixed_layout/checkpoints/4/items")).weights == template.weights
    plan = migrate_tree(read(bucket, "mixed_layout/checkpoints/2"), KEEP, template)
    assert plan.problems == ()
    assert plan.check.validated
    refusals = {
        "sft_llama_unscan_adamw/checkpoints/3": "the step has unrolled layers, the model scanned layers; otherwise",
        "sharded_fsdp4/checkpoints/2": "",
        "sft_gpt3_52k_dropout/checkpoints/2": "",
        "rl_grpo_qwen3/checkpoints/actor/3": "",
    }
    for path, explanation in refusals.items():
        refused = migrate_tree(read(bucket, path), KEEP, template)
        assert refused.problems, path
        assert explanation in refused.check.explanation


def test_a_template_does_not_mind_other_random_streams(bucket: Path) -> None:
    template = read_template(str(bucket / "mixed_layout/checkpoints/4"))
    without = ModelTree(template.weights, aux=frozenset(["decoder/rngs/new/key"]), origin="the template")
    plan = migrate_tree(read(bucket, "mixed_layout/checkpoints/2"), KEEP, without)
    assert plan.problems == ()
    assert "12 random-number leaves are not in the template: ignored by it" in plan.warnings


def test_an_adapter_is_checked_against_its_base(bucket: Path) -> None:
    template = read_template(str(bucket / "mixed_layout/checkpoints/4"))
    plan = migrate_tree(read(bucket, "lora_qwix/checkpoints/2"), KEEP, template)
    assert plan.adapter_only
    assert plan.problems == ()


def test_no_template_there_is_a_sentence(bucket: Path) -> None:
    with pytest.raises(FerryError, match=r"expected a MaxText checkpoint with items/ for the template"):
        read_template(str(bucket / "sft_sgd/checkpoints/2"))
    with pytest.raises(FerryError, match=r"expected a MaxText checkpoint for the template; found"):
        read_template(str(bucket / "nowhere"))
