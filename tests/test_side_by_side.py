"""The runs of `make test`: every file is in one of them, and none can end badly unnoticed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked, side_by_side

BAD = {
    "fails": ("def test_it(): assert not 'this line is shown'", "1 failed"),
    "killed": ("import os\ndef test_it(): os.kill(os.getpid(), 9)", "killed by SIGKILL"),
    "leaves": ("import os\ndef test_it(): os._exit(0)", "code 0 and no summary"),
}
#: In a process of its own: what is forked from this one would have this test in it.
MAIN = """
import sys
from pathlib import Path
from tests import side_by_side
side_by_side.RUNS, side_by_side.ENOUGH = 2, 1
sys.exit(side_by_side.main(Path(sys.argv[1]), ["-p", "no:hypothesispytest", f"--rootdir={sys.argv[1]}"]))
"""


def run(tests: Path) -> subprocess.CompletedProcess[str]:
    """Each file in a run of its own, two at once."""
    return forked.run([sys.executable, "-c", MAIN, str(tests)], timeout=120)


def test_every_file_is_in_one_run() -> None:
    runs = side_by_side.split(side_by_side.TESTS)
    files = [file for run in runs for file in run.files]
    there = {
        file.relative_to(side_by_side.TESTS).as_posix() for file in side_by_side.TESTS.rglob("test_*.py")
    }
    assert {
        file.relative_to(side_by_side.TESTS).as_posix() for file in files
    } == there - side_by_side.OF_THE_LINTERS
    assert len(files) == len(set(files))
    assert there >= side_by_side.OF_THE_LINTERS
    expected = [run.seconds for run in runs]
    assert expected[0] < sum(expected) / side_by_side.RUNS, (
        "one place is too long: the others would wait for it"
    )
    known = {part for place in side_by_side.SECONDS for part in place.split()}
    assert not [p for p in known if not list(side_by_side.TESTS.glob(f"{p}*"))], "a place that is not there"


def test_the_longest_begins_first() -> None:
    expected = [run.seconds for run in side_by_side.split(side_by_side.TESTS)]
    long = [seconds for seconds in expected if seconds >= 2 * side_by_side.ENOUGH]
    assert long == sorted(long, reverse=True)
    assert expected[: len(long)] == long


def test_a_run_begins_when_another_is_over(tmp_path: Path) -> None:
    """Never more than so many at once, each file once."""
    for name in "abcde":
        (tmp_path / f"test_{name}.py").write_text(
            f"import pathlib, time\nhere = pathlib.Path({str(tmp_path)!r})\n"
            "def test_it():\n"
            f"    (here / 'now-{name}').touch()\n"
            "    assert len(list(here.glob('now-*'))) <= 2\n"
            "    time.sleep(0.5)\n"
            f"    (here / 'now-{name}').rename(here / 'done-{name}')\n"
        )
    ended = run(tmp_path)
    assert ended.returncode == 0, ended.stdout
    assert sorted(f.name for f in tmp_path.glob("*-*")) == [f"done-{name}" for name in "abcde"]


def test_whatever_goes_wrong_is_named(tmp_path: Path) -> None:
    """Each in a run of its own, beside one that is well."""
    (tmp_path / "test_good.py").write_text("def test_it(): pass")
    for name, (code, _) in BAD.items():
        (tmp_path / f"test_{name}.py").write_text(code)
    ended = run(tmp_path)
    assert ended.returncode == 1
    assert "this line is shown" in ended.stdout
    verdicts = {line.split("(")[-1].rstrip(")"): line for line in ended.stdout.splitlines()[-5:-1]}
    good = verdicts.pop("test_good.py")
    assert good.startswith("ok ")
    assert "1 passed in" in good
    for name, (_, words) in BAD.items():
        assert verdicts[f"test_{name}.py"].startswith("FAILED ")
        assert words in verdicts[f"test_{name}.py"]


@pytest.mark.parametrize("name", BAD)
def test_one_is_enough(name: str) -> None:
    """Without running anything: what each of them ended with is bad by itself."""
    code, text = {"fails": (1, "1 failed in 0.1s"), "killed": (-9, "."), "leaves": (0, "..")}[name]
    ended = side_by_side.Run(code=code)
    ended.output.write(text.encode())
    ended.output.flush()
    assert ended.verdict([])[0] is False


def test_a_run_that_was_not_waited_for_is_bad() -> None:
    assert side_by_side.Run().verdict([])[0] is False
