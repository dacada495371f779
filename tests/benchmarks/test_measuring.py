"""The benchmark's measurements: they count what they say, and leave out mapped files."""

import sys

import pytest

from benchmarks import convert
from benchmarks.measure import CommandFailed, Measured, measure
from benchmarks.report import Contender, figures, ratios, write_section

MB = 1_000_000
HOLD = "import sys, time; held = bytearray(int(sys.argv[1])); time.sleep(0.7)"
TREE = """
import mmap, subprocess, sys, time
file = open(sys.argv[2], "rb")
mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
sum(mapped[i] for i in range(0, len(mapped), 4096))
subprocess.run([sys.executable, "-c", sys.argv[1], "60000000"], check=True)
"""


def test_memory_of_children_counts_and_mapped_files_do_not(tmp_path):
    (tmp_path / "file").write_bytes(bytes(200 * MB))
    run = measure([sys.executable, "-c", TREE, HOLD, str(tmp_path / "file")], tmp_path / "log")
    assert 60 * MB < run.peak_bytes < 150 * MB
    assert run.wall_seconds > 0.7


def test_cpu_time_of_children_counts(tmp_path):
    burn = "import time\nwhile time.process_time() < 0.4: pass"
    run = measure(["sh", "-c", f"{sys.executable} -c '{burn}'; true"], tmp_path / "log")
    assert 0.4 <= run.cpu_seconds < 3


def test_a_failed_command_shows_the_end_of_its_output(tmp_path):
    with pytest.raises(CommandFailed, match=r"exit code 3: sh(.|\n)*no space left"):
        measure(["sh", "-c", "echo no space left; exit 3"], tmp_path / "log")


def test_ratios_and_net_figures():
    ours = Contender("ours", [Measured(5, 8, 2**29)], [Measured(3, 2, 2**28)])
    other = Contender("other", [Measured(20, 32, 2**31), Measured(10, 32, 2**31)], [Measured(1, 0, 0)])
    assert "| ours | 1 | 5.0 | 8.0 | 3.0 | 2.0 | 3.00 | 0.50 |" in figures([ours, other], gigabytes=2)
    assert "| other | 2 | 15.0 (10.0–20.0) | 32.0 |" in figures([ours, other], gigabytes=2)
    assert "| other | 3.00 | 0.13 | 4.00 | 4.00 |" in ratios(ours, [other])


def test_a_section_is_replaced_and_its_neighbours_stay(tmp_path):
    page = tmp_path / "BENCHMARKS.md"
    page.write_text("# Benchmarks\n\nWords.\n")
    for name, text in (("a", "first"), ("b", "other"), ("a", "second")):
        write_section(page, name, text)
    assert page.read_text() == (
        "# Benchmarks\n\nWords.\n\n<!-- bench a -->\nsecond\n<!-- end of bench a -->\n\n"
        "<!-- bench b -->\nother\n<!-- end of bench b -->\n"
    )


def test_a_whole_run_with_a_stand_in(tmp_path, monkeypatch):
    monkeypatch.delenv("TENSORFERRY_MAXTEXT_PYTHON", raising=False)
    monkeypatch.setattr(convert.LlamaShapes, "of_size", lambda *_: convert.LlamaShapes(layers=1).tiny())
    options = ["--rounds", "2", "--directory", str(tmp_path), "--command", "cp -r {source} {output}"]
    report = convert.bench(convert.parse(options))
    assert report.count("| cp -r |") == 2
    assert "| tensorferry convert | 2 |" in report
    assert list(tmp_path.iterdir()) == []
