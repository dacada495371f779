"""The command line as a user meets it: help, exit codes, sentences instead of tracebacks, progress."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoints import llama_config, llama_tensors, write_checkpoint
from commands import environment, python, tensorferry
from tensorferry.pipelines.cli.main import COMMANDS, main

EXIT_CODES = {"plan": "02", "convert": "012", "verify": "013", "inspect": "01"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), llama_config(), llama_tensors())


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_shows_examples_and_exit_codes(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    told = capsys.readouterr().out
    assert f"\n  tensorferry {command} " in told.split("examples:")[1]
    codes = told.split("exit codes:")[1]
    for code in EXIT_CODES.get(command, "0"):
        assert re.search(rf"\b{code} ", codes), f"exit code {code} is not told"


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    told = capsys.readouterr().out
    assert all(f"    {command} " in told for command in COMMANDS)
    assert all(f"tensorferry {command} " in told for command in COMMANDS)


def test_a_command_that_is_not_known_is_a_sentence(capsys):
    with pytest.raises(SystemExit) as end:
        main(["convrt"])
    assert end.value.code == 2
    assert "convrt" in capsys.readouterr().err


# plan


def test_plan_writes_what_it_shows_as_json(llama, tmp_path, capsys):
    file = tmp_path / "plan.json"
    assert main(["plan", "--source", str(llama), "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    plan = json.loads(file.read_text())
    assert [array["path"][-1] for array in plan["arrays"]].count("kernel") == 8
    assert plan["digest"] in shown
    assert f"{plan['totals']['write_bytes']:,}" in shown

    assert main(["plan", "--source", str(llama), "--json", "-"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == plan
    assert plan["digest"] in told.err


def test_plan_writes_nothing_and_reads_headers_only(llama, capsys):
    before = {path: path.stat().st_atime_ns for path in llama.iterdir()}
    assert main(["plan", "--source", str(llama)]) == 0
    assert before.keys() == set(llama.iterdir())
    told = capsys.readouterr().out
    for words in ("target array", "model.layers.{0..2}.mlp.gate_proj.weight", "[10, 3, 14]", "disk needed",
                  "work items", "largest item", "worker memory"):  # fmt: skip
        assert words in told


def test_plan_json_into_a_folder_that_is_not_there_is_a_sentence(llama, tmp_path, capsys):
    assert main(["plan", "--source", str(llama), "--json", str(tmp_path / "no" / "plan.json")]) == 1
    told = capsys.readouterr().err
    assert str(tmp_path / "no" / "plan.json") in told
    assert "Traceback" not in told


@pytest.mark.parametrize("command", ["plan", "convert"])
def test_a_plan_that_does_not_add_up_lists_every_problem(command, tmp_path, capsys):
    tensors = llama_tensors()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.2.self_attn.q_proj.bias_of_nobody"] = tensors["model.norm.weight"]
    source = write_checkpoint(tmp_path / "hf", llama_config(intermediate_size=15), tensors)
    output = ["--output", str(tmp_path / "out")] if command == "convert" else []
    assert main([command, "--source", str(source), *output]) == 2
    told = capsys.readouterr()
    words = told.out + told.err
    assert "model.layers.1.mlp.up_proj.weight" in words
    assert "bias_of_nobody" in words
    assert "intermediate_size" in words
    assert "The plan does not add up" in words
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("args", [("plan",), ("convert", "--output", "out"), ("verify", "--output", "out")])
def test_a_source_that_is_not_there_is_a_sentence(args, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = main([*args, "--source", "nowhere"])
    told = capsys.readouterr().err
    assert code == (1 if args[0] == "verify" else 2)
    assert "Traceback" not in told
    assert ("out" if args[0] == "verify" else "nowhere") in told
    assert list(tmp_path.iterdir()) == []


def test_inspect_of_nothing_is_a_sentence(tmp_path, capsys):
    assert main(["inspect", str(tmp_path / "nowhere")]) == 1
    assert capsys.readouterr().err.startswith(f"tensorferry: {tmp_path}/nowhere: expected ")
    assert main(["inspect", str(tmp_path)]) == 1
    assert "found an empty folder" in capsys.readouterr().err


# Options of ours and of Beam.


@pytest.mark.parametrize(("args", "words"), [
    (("--chunk-bytes", "many"), "'many' is not a number of bytes"),
    (("--worker-memory-bytes", "0"), "'0' is not a number of bytes"),
    (("--vocab-size", "-3"), "'-3' is not a whole number above zero"),
    (("--dtype", "int8"), "invalid choice: 'int8'"),
    (("--scan-layers", "--no-scan-layers"), "not allowed with"),
])  # fmt: skip
def test_a_malformed_option_is_a_sentence(args, words, llama, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["convert", "--source", str(llama), "--output", str(tmp_path / "out"), *args])
    assert end.value.code == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_option_that_neither_knows_is_a_sentence_and_nothing_is_left(llama, tmp_path, capsys):
    output = tmp_path / "out"
    assert main(["convert", "--source", str(llama), "--output", str(output), "--direct_num_wokers=2"]) == 1
    told = capsys.readouterr().err
    assert "--direct_num_wokers is neither an option of Tensorferry nor of Apache Beam" in told
    assert "Did you mean --direct_num_workers?" in told
    assert "Traceback" not in told
    assert main(["convert", "--source", str(llama), "--output", str(output), "--direct_num_workers=2"]) == 0


def test_plan_takes_no_options_of_beam(llama, capsys):
    with pytest.raises(SystemExit) as end:
        main(["plan", "--source", str(llama), "--runner", "DirectRunner"])
    assert end.value.code == 2
    assert "unrecognized arguments: --runner DirectRunner" in capsys.readouterr().err


def test_the_default_runner_may_be_named(llama, tmp_path):
    assert main(["convert", "--source", str(llama), "--output", str(tmp_path), "--runner", "DirectRunner"]) == 0


# As a process.


@pytest.fixture(scope="module")
def session(llama, tmp_path_factory) -> tuple[Path, dict]:
    """A conversion and its verification, each in a process of its own, without a terminal."""
    output = tmp_path_factory.mktemp("session")
    common = ("--source", llama, "--output", output)
    done = {"convert": tensorferry("convert", *common), "verify": tensorferry("verify", *common)}
    return output, done


def test_without_a_terminal_there_are_lines_of_progress_and_nothing_of_orbax_or_beam(session):
    for name, done in session[1].items():
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(r"(.* of .* \(\d+ %\), \d of 1 work items.*\n)+", done.stderr), (name, done.stderr)
        assert done.stderr.splitlines()[-1].startswith("11.8 kB of 11.8 kB (100 %), 1 of 1 work items")


def test_standard_output_is_the_result(session):
    output, done = session
    assert done["convert"].stdout.startswith(f"12 arrays, 11.54 KiB, in {output}/0/items\n")
    assert done["verify"].stdout.startswith(f"verified {output}/0/items: 12 arrays")


def test_a_failure_shows_its_traceback_only_when_asked_to(llama, session):
    args = ("convert", "--source", llama, "--output", session[0])
    plain, debug = tensorferry(*args), tensorferry(*args, "--debug")
    assert (plain.returncode, debug.returncode) == (1, 1)
    assert "Traceback" not in plain.stdout + plain.stderr
    assert plain.stderr.startswith("tensorferry: ")
    assert "Traceback" in debug.stderr
    assert debug.stderr.endswith(plain.stderr)


def test_a_reader_that_goes_away_is_no_fault(llama, tmp_path):
    code = """
import subprocess, sys
words = [sys.executable, "-m", "tensorferry", "plan", "--source", sys.argv[1]]
process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
process.stdout.close()
print(repr(process.stderr.read()), process.wait())
"""
    assert python(code, llama).strip() == "'' 0"


def test_on_a_terminal_the_bar_ends_with_a_line_of_its_own(llama, tmp_path):
    code = """
import os, pty, sys
words = [sys.executable, "-m", "tensorferry", "convert", "--source", sys.argv[1], "--output", sys.argv[2]]
sys.exit(os.waitstatus_to_exitcode(pty.spawn(words)))
"""
    said = python(code, llama, tmp_path / "out").replace("\r\n", "\n")
    bar, result = said.split("12 arrays, ", 1)
    assert "100%" in bar
    assert re.search(r"\n(\x1b\[[?0-9;]*[a-zA-Z])*$", bar), "the result should begin on a new line"
    assert result.startswith("11.54 KiB")


def test_a_path_of_the_home_directory_is_expanded(llama, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    os.symlink(llama, tmp_path / "model")
    assert main(["convert", "--source", "~/model", "--output", "~/out"]) == 0
    assert (tmp_path / "out" / "0" / "items" / "_METADATA").is_file()


_STARTING = """
from tensorferry.pipelines.engine import interrupts
from tensorferry.pipelines.cli import start
real = interrupts.install
interrupts.install = lambda: (real(), print("ready", flush=True))
start.entry()
"""


@pytest.mark.parametrize("seconds", [0.0, 0.03, 0.1, 0.25, 0.5])
def test_ctrl_c_is_a_sentence_from_the_first_line_on(llama, tmp_path, seconds):
    """While it imports, reads its arguments, plans, and starts Beam."""
    words = [sys.executable, "-c", _STARTING, "convert", "--source", str(llama), "--output", str(tmp_path)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    assert process.stdout.readline() == "ready\n"
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, complaints = process.communicate(timeout=60)
    assert process.returncode == 1, complaints
    assert complaints.splitlines()[-1].startswith("tensorferry: Interrupted.")
    assert "Traceback" not in complaints
