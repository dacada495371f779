"""The README runs: its table is the registry's, its commands are the tool's, its paths exist."""

import re
import shlex

import pytest
from readme_table import README, with_table
from tensorferry.pipelines.cli.main import COMMANDS, build_parser

ROOT = README.parent
# Prose that is no command line of ours.
COMMAND = re.compile(r"^(?:tensorferry .*|make \w+)$", re.MULTILINE)
TEXTS = [README, ROOT / "mappings" / "README.md"]


def commands() -> list[str]:
    blocks = re.findall(r"```\n(.*?)```", README.read_text(), re.DOTALL)
    return [line for block in blocks for line in COMMAND.findall(block)]


def test_table_of_families_is_the_registrys() -> None:
    text = README.read_text()
    assert with_table(text) == text, "run: python tests/readme_table.py --write"


def test_the_readme_shows_commands() -> None:
    assert {line.split()[1] for line in commands() if line.startswith("tensorferry")} >= {"plan", "convert", "verify"}
    assert "make demo" in commands()


@pytest.mark.parametrize("line", commands())
def test_commands_of_the_readme_parse(line: str) -> None:
    words = shlex.split(line)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    args, rest = build_parser().parse_known_args(words[1:])
    assert args.command in COMMANDS
    assert not rest


def test_options_that_the_readme_names_exist() -> None:
    known = {option for text in helps() for option in re.findall(r"--[a-z][a-z-]+", text)}
    known |= {"--runner"}
    named = set(re.findall(r"--[a-z][a-z-]+", README.read_text()))
    assert named <= known, named - known


def helps() -> list[str]:
    subparsers = next(a for a in build_parser()._actions if a.dest == "command")
    return [parser.format_help() for parser in subparsers.choices.values()]


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.parent.name)
def test_links_lead_somewhere(text) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", text.read_text())
    assert [link for link in links if not (text.parent / link).exists()] == []
