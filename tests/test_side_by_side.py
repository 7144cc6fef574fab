"""The runs of `make test`: every file is in one of them, and none can end badly unnoticed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import side_by_side

BAD = {
    "fails": ("def test_it(): assert not 'this line is shown'", "1 failed"),
    "killed": ("import os\ndef test_it(): os.kill(os.getpid(), 9)", "killed by SIGKILL"),
    "leaves": ("import os\ndef test_it(): os._exit(0)", "code 0 and no summary"),
}


def test_every_file_is_in_one_run() -> None:
    runs = side_by_side.split(side_by_side.TESTS, side_by_side.RUNS)
    files = [file for run in runs for file in run.files]
    assert sorted(files) == sorted(side_by_side.TESTS.rglob("test_*.py"))
    first, later = runs[: side_by_side.RUNS], runs[side_by_side.RUNS :]
    longest, shortest = (f([r.seconds for r in first]) for f in (max, min))
    assert longest - shortest < sum(r.seconds for r in later) / 2, (
        "the numbers of SECONDS are out of date, or one place is too long"
    )
    assert later[-1].seconds <= later[0].seconds < shortest / 2, "what fills the gaps is short"


def test_a_short_run_begins_when_another_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more than so many at once, each file once."""
    monkeypatch.setattr(side_by_side, "RUNS", 2)
    monkeypatch.setattr(side_by_side, "UNKNOWN", side_by_side.ENOUGH)
    for name in "abcde":
        (tmp_path / f"test_{name}.py").write_text(
            f"import pathlib, time\nhere = pathlib.Path({str(tmp_path)!r})\n"
            "def test_it():\n"
            f"    (here / 'now-{name}').touch()\n"
            "    assert len(list(here.glob('now-*'))) <= 2\n"
            "    time.sleep(0.5)\n"
            f"    (here / 'now-{name}').rename(here / 'done-{name}')\n"
        )
    assert run(tmp_path) == 0
    assert sorted(f.name for f in tmp_path.glob("*-*")) == [f"done-{name}" for name in "abcde"]


def run(tests: Path) -> int:
    return side_by_side.main(tests, ["-p", "no:hypothesispytest", f"--rootdir={tests}"])


def test_all_is_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_good.py").write_text("def test_it(): pass")
    assert run(tmp_path) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("ok ")
    assert "1 passed in" in last


def test_whatever_goes_wrong_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in a run of its own, beside one that is well."""
    monkeypatch.setattr(side_by_side, "UNKNOWN", side_by_side.ENOUGH)
    (tmp_path / "test_good.py").write_text("def test_it(): pass")
    for name, (code, _) in BAD.items():
        (tmp_path / f"test_{name}.py").write_text(code)
    assert run(tmp_path) == 1
    said = capsys.readouterr().out
    assert "this line is shown" in said
    verdicts = {line.split("(")[-1].rstrip(")"): line for line in said.splitlines()[-4:]}
    assert verdicts.pop("test_good.py").startswith("ok ")
    for name, (_, words) in BAD.items():
        assert verdicts[f"test_{name}.py"].startswith("FAILED ")
        assert words in verdicts[f"test_{name}.py"]


@pytest.mark.parametrize("name", BAD)
def test_one_is_enough(name: str) -> None:
    """Without running anything: what each of them ended with is bad by itself."""
    code, text = {"fails": (1, "1 failed in 0.1s"), "killed": (-9, "."), "leaves": (0, "..")}[name]
    ended = side_by_side.Run(process=SimpleNamespace(returncode=code))  # type: ignore[arg-type]
    ended.output.write(text.encode())
    ended.output.flush()
    assert ended.verdict([])[0] is False
