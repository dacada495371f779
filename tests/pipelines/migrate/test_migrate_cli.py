"""The command line of migrate: what it refuses before it reads anything, what it shows, which steps it takes."""

import json
import shutil
from pathlib import Path

import pytest
from tensorferry.pipelines.cli.main import main
from tensorferry.pipelines.cli.migrate_command import step_numbers
from tensorferry.pipelines.migrate.migration_options import is_inside
from tunix_samples import snapshot, unpack

TINY_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 32,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2, "vocab_size": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("cli"))


def run(*args: object) -> int:
    return main(["migrate", *map(str, args)])


def test_without_a_model_it_names_the_four_ways(bucket: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run("--source", bucket, "--output", tmp_path / "o") == 2
    told = capsys.readouterr().err
    for way in ("--template", "--config", "--maxtext", "--structural"):
        assert way in told
    assert not (tmp_path / "o").exists()


def test_two_models_are_one_too_many(bucket: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run("--source", bucket, "--output", tmp_path / "o", "--structural", "--config", "x.json") == 2
    assert "found 2 of them" in capsys.readouterr().err


def test_an_output_is_needed_for_more_than_a_dry_run(bucket: Path, capsys: pytest.CaptureFixture) -> None:
    assert run("--source", bucket, "--structural") == 2
    assert "--output: expected a folder" in capsys.readouterr().err
    assert run("--source", bucket, "--dry-run", "--include", "sft_sgd") == 0


@pytest.mark.parametrize("inside", ["", "new", "sft_sgd/checkpoints"])
def test_in_place_is_refused(bucket: Path, capsys: pytest.CaptureFixture, inside: str) -> None:
    before = snapshot(bucket)
    assert run("--source", bucket, "--output", bucket / inside, "--structural") == 2
    assert "The source is never touched" in capsys.readouterr().err
    assert snapshot(bucket) == before


def test_a_link_into_the_source_is_in_place_too(bucket: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(bucket / "sft_sgd")
    assert run("--source", bucket, "--output", tmp_path / "link", "--structural") == 2


def test_an_output_above_the_source_is_fine_until_a_step_would_land_in_it(bucket: Path, tmp_path: Path) -> None:
    source = tmp_path / "runs"
    shutil.copytree(bucket / "sft_sgd", source / "runs" / "sft_sgd")
    before = snapshot(source)
    assert run("--source", source, "--output", tmp_path, "--structural") == 2
    assert snapshot(source) == before
    assert run("--source", source / "runs", "--output", tmp_path, "--structural") == 0
    assert snapshot(source) == before


def test_urls_are_compared_without_their_last_slash() -> None:
    assert is_inside("gs://b/runs", "gs://b/runs/")
    assert is_inside("gs://b/runs/new", "gs://b/runs")
    assert not is_inside("gs://b/runs-new", "gs://b/runs")


def test_the_dry_run_shows_every_section(bucket: Path, capsys: pytest.CaptureFixture) -> None:
    assert run("--source", bucket, "--dry-run", "--include", "sft_intermediates") == 0
    lines = capsys.readouterr().out.splitlines()
    shown = "\n".join(lines)
    assert "sft_intermediates/checkpoints/2  (planned)" in lines
    for section in ("weights", "nnx_aux", "opt_state", "step", "dropped"):
        assert any(line.startswith(f"  {section} ") and line.endswith(" bytes") for line in lines), section
    assert "a value sown by one forward pass" in shown
    assert "not checked against a model" in shown
    assert lines[-1] == "planned 1"


def test_the_dry_run_shows_every_problem_and_exits_with_four(bucket: Path, capsys: pytest.CaptureFixture) -> None:
    template = bucket / "mixed_layout/checkpoints/3"
    code = run("--source", bucket, "--dry-run", "--template", template, "--include", "sft_llama_*")
    told = capsys.readouterr().out
    assert code == 4
    assert "the step has unrolled layers, the model scanned layers; otherwise they agree exactly" in told
    assert f"as in the template {template}" in told
    assert told.splitlines()[-1] == "planned 2, refused 1"


def test_an_unknown_optimizer_is_refused_unless_dropped(bucket: Path, tmp_path: Path) -> None:
    template = bucket / "mixed_layout/checkpoints/3"
    args = ("--source", bucket, "--template", template, "--include", "sft_sgd", "--output", tmp_path / "o")
    assert run(*args) == 4
    assert run(*args, "--drop-optimizer") == 0


@pytest.mark.parametrize("run_name", ["sft_llama_scan_adamw", "sft_llama_unscan_adamw"])
def test_a_config_validates_both_layer_modes(bucket: Path, tmp_path: Path, run_name: str) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY_LLAMA))
    told = tmp_path / "told.json"
    code = run("--source", bucket, "--dry-run", "--config", config, "--include", run_name, "--json", told)
    step = json.loads(told.read_text())["steps"][0]
    assert (code, step["model"]["validated"]) == (0, True)
    assert step["model"]["origin"] == f"{config} (llama)"


def test_a_config_of_another_vocabulary_says_so(bucket: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**TINY_LLAMA, "vocab_size": 65}))
    told = tmp_path / "told.json"
    code = run("--source", bucket, "--dry-run", "--config", config, "--include", "sft_sgd", "--json", told)
    step = json.loads(told.read_text())["steps"][0]
    assert code == 4
    assert "only the vocabulary differs: 64 in the step, 65 in the model" in step["reason"]


def test_a_model_that_cannot_be_had_stops_before_anything(
    bucket: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = ("--source", bucket, "--output", tmp_path / "o")
    assert run(*output, "--template", tmp_path / "none") == 2
    assert "--template" in capsys.readouterr().err
    (tmp_path / "bad.json").write_text("{")
    assert run(*output, "--config", tmp_path / "bad.json") == 2
    assert "--config: expected a Hugging Face config.json" in capsys.readouterr().err
    (tmp_path / "odd.json").write_text('{"model_type": "no-such"}')
    assert run(*output, "--config", tmp_path / "odd.json") == 2
    assert "no-such" in capsys.readouterr().err
    monkeypatch.delenv("TENSORFERRY_MAXTEXT_PYTHON", raising=False)
    assert run(*output, "--maxtext", "model_name=llama3.1-8b") == 2
    assert "Install maxtext here" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_which_steps(bucket: Path, tmp_path: Path) -> None:
    def paths(*args: str) -> list[str]:
        told = tmp_path / "told.json"
        run("--source", bucket, "--dry-run", "--json", told, *args)
        return [step["path"] for step in json.loads(told.read_text())["steps"]]

    critic = [f"rl_ppo/checkpoints/critic/{step}" for step in (2, 4)]
    assert paths("--include", "rl_ppo/checkpoints/critic") == critic
    assert paths("--include", "rl_ppo", "--exclude", "*/actor", "--steps", "4,9") == critic[1:]
    assert paths("--include", "rl_ppo", "--latest") == ["rl_ppo/checkpoints/actor/4", critic[1]]


def test_step_numbers_are_a_list(capsys: pytest.CaptureFixture) -> None:
    assert step_numbers("100, 200") == (100, 200)
    with pytest.raises(SystemExit) as error:
        run("--source", "x", "--steps", "1-3")
    assert error.value.code == 2
    assert "is not a list of step numbers" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("--source", "x", "--steps", "1", "--latest")


def test_uncommitted_steps_are_taken_on_demand(bucket: Path, tmp_path: Path) -> None:
    args = ("--source", bucket, "--output", tmp_path / "o", "--structural", "--include", "broken_steps/checkpoints/4")
    assert run(*args) == 0
    assert not (tmp_path / "o/broken_steps").exists()
    assert run(*args, "--accept-uncommitted") == 0
    assert (tmp_path / "o/broken_steps/checkpoints/4/items/_METADATA").is_file()


def test_a_source_that_is_not_there_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run("--source", tmp_path / "none", "--output", tmp_path / "o", "--structural") == 1
    assert "expected a folder of runs" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_workers_elsewhere_need_buckets(bucket: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    cloud = ("--runner", "DataflowRunner", "--project", "p", "--region", "r", "--temp_location", "gs://b/t")
    assert run("--source", bucket, "--output", tmp_path / "o", "--structural", *cloud) == 1
    assert "Dataflow's workers cannot write here" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
    assert run("--source", bucket, "--dry-run", "--include", "sft_sgd", *cloud) == 0


def test_an_output_that_is_a_file_is_a_sentence(bucket: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "o").write_text("")
    code = run("--source", bucket, "--output", tmp_path / "o", "--structural", "--include", "sft_sgd")
    assert code == 2
    assert "expected a directory for the converted runs" in capsys.readouterr().err
