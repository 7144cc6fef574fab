"""The seeded bugs still fit the source, cover every invariant, and one of them, another each day, is seen."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from proof.mutants import MUTANTS, ROOT, SOURCE, Edit, Mutant, Rotten, applied, try_out

RULES = [
    "L1",
    "L2",
    "L3",
    "L4",
    "L5",
    "L6",
    "L7",
    "S1",
    "S2",
    "S3",
    "S4",
    "S5",
    "S6",
    "S7",
    "S8",
    "C1",
    "C2",
    "C3",
    "C4",
    "C5",
    "C6",
    "C7",
    "T1",
    "T2",
    "T3",
    "T4",
    "K1",
    "K2",
    "K3",
    "A1",
]
#: Which of them this run tries: another tomorrow. `SUBLET_MUTANT_DAY=N` tries that of another day.
DAY = int(os.environ.get("SUBLET_MUTANT_DAY", "0")) or int(time.time() // 86400)
QUICK = [m for m in MUTANTS if m.quick]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.replace(" ", "-"))
def test_it_still_fits(mutant: Mutant) -> None:
    for path, text in applied(mutant, SOURCE).items():
        assert text != path.read_text()
        compile(text, str(path), "exec")
    for test in mutant.test.split():
        file, _, name = test.partition("::")
        assert (ROOT / file).exists(), test
        assert not name or re.search(rf"def {re.escape(name.split('[')[0])}\b", (ROOT / file).read_text()), (
            test
        )


def test_every_invariant_has_one() -> None:
    assert [rule for rule in RULES if not any(m.rule == rule for m in MUTANTS)] == []
    assert len(MUTANTS) >= 30
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)


def test_a_text_that_is_gone_or_stands_twice_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\ny = 1\n")
    for old in ("z = 1", "= 1"):
        with pytest.raises(Rotten):
            applied(Mutant("m", "L1", (Edit("a.py", old, ""),), "t"), tmp_path)


def test_todays_is_killed() -> None:
    mutant = QUICK[DAY % len(QUICK)]
    print(f"SUBLET_MUTANT_DAY={DAY}: {mutant.name}")
    assert try_out(mutant).verdict == "killed", mutant.name
