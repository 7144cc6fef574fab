"""What a script is, and what of it changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sublet.training.scripts.identity import changes, digest_of_identity, identity_of

TEXT = "import os\nRATE = 0.1\n\ndef f(x):\n    return x + 1\n\ndef g():\n    return {1, 2} & {2}\n"


def identity(
    tmp_path: Path, text: str = TEXT, arguments: tuple[str, ...] = (), **environment: str
) -> dict[str, Any]:
    file = tmp_path / "train.py"
    file.write_text(text)
    return identity_of({"train.py": str(file)}, arguments, environment)


SAME = {
    "a comment": TEXT.replace("    return x", "    # why\n    return x"),
    "an empty line": TEXT.replace("def f", "\n\n\ndef f"),
}


@pytest.mark.parametrize("name", SAME)
def test_what_is_no_change(name: str, tmp_path: Path) -> None:
    before, now = identity(tmp_path), identity(tmp_path, SAME[name])
    assert changes(before, now) == []
    assert digest_of_identity(before) == digest_of_identity(now)


CHANGED = {
    "a function": (TEXT.replace("x + 1", "x + 2"), "train.py: f() changed"),
    "a number outside of them": (TEXT.replace("0.1", "0.2"), "train.py changed"),
    "a new function": (f"{TEXT}\ndef h():\n    pass\n", "train.py: h() is new"),
    "one that is gone": (TEXT.replace("def g", "def f"), "train.py: g() is gone"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_change_is_named(name: str, tmp_path: Path) -> None:
    text, words = CHANGED[name]
    before, now = identity(tmp_path), identity(tmp_path, text)
    assert words in changes(before, now)
    assert digest_of_identity(before) != digest_of_identity(now)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    before = identity(tmp_path)
    (tmp_path / "train.py").unlink()
    now = identity_of({"train.py": str(tmp_path / "train.py")}, (), {})
    assert changes(before, now) == ["train.py is gone"]


def test_arguments_environment_and_versions(tmp_path: Path) -> None:
    text = f"{TEXT}os.environ['MINE']; os.environ.get('ALSO'); os.getenv('THIRD')\n"
    before = identity(tmp_path, text, ("--lr", "1"), MINE="1", ALSO="2", OMP_NUM_THREADS="1", UNREAD="1")
    now = identity(tmp_path, text, ("--lr", "2"), MINE="3", THIRD="4", OMP_NUM_THREADS="2", UNREAD="2")
    assert changes(before, now) == [
        "the arguments were --lr 1, and are --lr 2",
        "ALSO was 2, and is not set",
        "MINE was 1, and is 3",
        "OMP_NUM_THREADS was 1, and is 2",
        "THIRD was not set, and is 4",
    ]
    newer = {**before, "versions": {**before["versions"], "python": "3.99", "brand-new": "1"}}
    assert [words.partition(" ")[0] for words in changes(before, newer)] == ["python"]


def test_what_the_lease_sets_is_no_part_of_it(tmp_path: Path) -> None:
    text = f"{TEXT}os.environ['SUBLET_LEASE_ID']\n"
    assert identity(tmp_path, text, SUBLET_LEASE_ID="1")["environment"] == {}
