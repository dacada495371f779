"""What migrate writes is opened by MaxText's own readers: parameters alone, and a full resume of pre-training.

Runs where TENSORFERRY_MAXTEXT_PYTHON names an interpreter that can import maxtext 0.2.5.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tensorferry.pipelines.cli.main import main
from tunix_samples import stored_tree, unpack

PROBE = Path(__file__).parents[2] / "helpers" / "maxtext_resume_probe.py"
# With the reader's own implementation (post-training wrote threefry): the key leaves stay behind and start fresh.
RUNS = (
    "sft_llama_scan_adamw", "sft_llama_unscan_adamw", "sft_llama_scan_clip", "distill_inject_clip", "dpo_llama",
    "sft_grad_accum", "sft_sgd", "sft_skip_spikes", "sft_qwen3_dropout_bf16", "sft_gpt3_52k_adam_pax",
    "sft_moe_bias_deepseek3", "rl_grpo_qwen3", "rl_ppo", "old_tunix_010", "tunix_main_v1", "pathways_no_ocdbt",
    "sharded_fsdp4", "distill_grain_iter",
)  # fmt: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "TENSORFERRY_MAXTEXT_PYTHON" not in os.environ,
        reason="TENSORFERRY_MAXTEXT_PYTHON names no interpreter with maxtext",
    ),
]


def settings_of(bucket: Path, step: dict[str, Any]) -> list[str] | None:
    name = f"{step['run']}__{step['role']}" if step["role"] else step["run"]
    file = bucket.parent / "expected" / name / f"{step['step']}.json"
    if not file.exists():
        return None
    overrides = json.loads(file.read_text())["config_overrides"]
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in overrides.items()]


def cases(bucket: Path, output: Path, report: dict[str, Any], impl: str) -> list[dict[str, Any]]:
    found = []
    for step in report["steps"]:
        settings = settings_of(bucket, step)
        if settings is None:
            continue
        path = output / step["path"]
        expected = {name: leaf["sha256"] for name, leaf in stored_tree(path / "items").items() if "sha256" in leaf}
        # Resuming takes the latest step of a folder, so each gets a folder of its own.
        alone = output / "alone" / step["path"].replace("/", "-")
        shutil.copytree(path, alone / path.name)
        found.append({"impl": impl, "run": str(alone), "step": path.name, "settings": settings, "expected": expected})
    return found


def probe(folder: Path, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    file = folder / "cases.json"
    file.write_text(json.dumps(cases))
    python = os.environ["TENSORFERRY_MAXTEXT_PYTHON"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([python, str(PROBE), str(file)], env=environment, capture_output=True, text=True, timeout=900)
    told = [json.loads(line.removeprefix("TOLD ")) for line in done.stdout.splitlines() if line.startswith("TOLD ")]
    assert len(told) == len(cases), done.stderr[-3000:]
    for case, answer in zip(cases, told, strict=True):
        assert "error" not in answer, (case["run"], answer["error"], done.stderr[-6000:])
    return told


@pytest.mark.parametrize(("reader", "kept"), [("unsafe_rbg", "unsafe_rbg"), ("threefry2x32", "keep")])
@pytest.mark.parametrize("store_format", ["zarr3", "ocdbt"])
def test_maxtext_loads_and_resumes(tmp_path: Path, reader: str, kept: str, store_format: str) -> None:
    bucket = unpack(tmp_path)
    runs = RUNS if (reader, store_format) == ("unsafe_rbg", "zarr3") else RUNS[::5]
    told = tmp_path / "told.json"
    code = main([
        "migrate", "--source", str(bucket), "--output", str(tmp_path / "o"), "--structural", "--rng-impl", kept,
        "--format", store_format, "--json", str(told), *(arg for run in runs for arg in ("--include", run)),
    ])  # fmt: skip
    assert code == 0
    wanted = cases(bucket, tmp_path / "o", json.loads(told.read_text()), reader)
    assert len(wanted) >= len(runs)
    for case, answer in zip(wanted, probe(tmp_path, wanted), strict=True):
        fresh = [name for name in answer["fresh"] if kept == "keep" or not name.endswith("/key")]
        print(Path(case["run"]).name, answer["weights"], answer["resumed"], fresh)
        assert answer["weights"] > 0
        assert answer["resumed"] + len(answer["fresh"]) >= answer["weights"]
        params_only = not any(name.startswith("opt_state/") for name in case["expected"])
        assert fresh == [] or params_only


def test_the_models_of_maxtext_and_of_config_json_agree(tmp_path: Path) -> None:
    """--maxtext validates the same steps as --config does."""
    bucket = unpack(tmp_path)
    sizes = (
        "base_emb_dim=16 base_mlp_dim=32 base_num_decoder_layers=2 base_num_kv_heads=2 base_num_query_heads=2 "
        "head_dim=8 vocab_size=64 override_model_config=true"
    )
    told = tmp_path / "told.json"
    for run, more in (("sft_llama_scan_adamw", ""), ("sft_llama_unscan_adamw", "scan_layers=false")):
        settings = f"model_name=llama3.1-8b {sizes} {more}"
        args = ("--source", str(bucket), "--dry-run", "--include", run, "--json", str(told), "--maxtext", settings)
        assert main(["migrate", *args]) == 0
        step = json.loads(told.read_text())["steps"][0]
        assert step["model"]["validated"] is True
        assert step["model"]["notes"] == []
    code = main(["migrate", *args[:-1], f"model_name=llama3.1-8b {sizes}"])
    assert code == 4
