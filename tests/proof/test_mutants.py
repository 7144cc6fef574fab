"""The seeded bugs still fit the source, cover every invariant, and one of them, another each day, is seen."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from proof.mutants import (
    MUTANTS,
    ROOT,
    RULES,
    SOURCE,
    Edit,
    Mutant,
    Rotten,
    applied,
    coverage,
    coverage_table,
    guards,
    ids_in,
    try_out,
)

#: Which of them this run tries. The proof tries all.
ONE = int(os.environ.get("SUBLET_MUTANT", "0"))
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
    assert len(RULES) == 39
    assert [c.rule for c in coverage() if not c.mutants or not c.tests] == []
    assert len(MUTANTS) >= 60
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.replace(" ", "-"))
def test_the_test_that_sees_it_names_what_it_breaks(mutant: Mutant) -> None:
    assert any(mutant.rule in guards(test) for test in mutant.test.split()), f"{mutant.test}: {mutant.rule}"


def test_invariants_are_read_from_words_and_ranges() -> None:
    assert ids_in("L2, S1-S3 and test_k1 K1") == {"L2", "S1", "S2", "S3", "K1"}
    assert ids_in("L9 C22 S") == set()


def test_the_coverage_says_which_were_killed_and_which_were_not_tried() -> None:
    first, *rest = [m for m in MUTANTS if m.rule == "L1"]

    def of_l1(killed: dict[str, bool]) -> str:
        lines = coverage_table(killed)
        assert len(lines) == 2 + len(RULES)
        return next(line for line in lines if line.startswith("| L1 |"))

    assert f"| 1 of 1, {len(rest)} not tried |" in of_l1({first.name: True})
    assert f"| {len(rest)} of {len(rest) + 1} |" in of_l1({first.name: False} | {m.name: True for m in rest})
    assert "| not tried |" in of_l1({})


def test_a_text_that_is_gone_or_stands_twice_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\ny = 1\n")
    for old in ("z = 1", "= 1"):
        with pytest.raises(Rotten):
            applied(Mutant("m", "L1", (Edit("a.py", old, ""),), "t"), tmp_path)


def test_one_is_killed() -> None:
    mutant = QUICK[ONE % len(QUICK)]
    print(f"SUBLET_MUTANT={ONE}: {mutant.name}")
    assert try_out(mutant).verdict == "killed", mutant.name
