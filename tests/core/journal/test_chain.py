"""The journal: an edit, a removal, a swap, a cut and an insertion are each found and named (S7)."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.core.errors import SubletError
from sublet.core.journal.chain import (
    GENESIS,
    MAIN,
    Chain,
    Entry,
    Fault,
    StrandEnd,
    body_text,
    entry_hash,
    job_strand,
    lease_strand,
)
from tests.core.pool import NOW

quick = settings(max_examples=150, deadline=None)


def hashed(previous: str, entry: Entry) -> Entry:
    return replace(
        entry,
        hash=entry_hash(
            previous, entry.strand, entry.seq, entry.at, entry.kind, entry.tenant, entry.subject, entry.body
        ),
    )


def chain(rows: int, *, strand: str = MAIN, anchor: str = GENESIS) -> list[Entry]:
    made: list[Entry] = []
    for seq in range(1, rows + 1):
        previous = made[-1].hash if made else anchor
        row = Entry(
            strand, seq, NOW + seq, "lease.granted", "ann", f"lease-{seq}", body_text({"epoch": seq}), ""
        )
        made.append(hashed(previous, row))
    return made


def end_of(rows: list[Entry], anchor: str = GENESIS) -> StrandEnd:
    return StrandEnd(rows[-1].seq, rows[-1].hash) if rows else StrandEnd(0, anchor)


def faults(rows: list[Entry], end: StrandEnd, *, strand: str = MAIN, anchor: str = GENESIS) -> list[Fault]:
    walked = Chain(strand, anchor)
    return [fault for row in rows for fault in walked.add(row)] + list(walked.close(end))


@quick
@given(st.integers(0, 12), st.sampled_from([MAIN, lease_strand("x"), job_strand("lab/train")]))
def test_s7_an_untouched_strand_verifies(rows: int, strand: str) -> None:
    made = chain(rows, strand=strand, anchor="ab" * 32)
    end = end_of(made, "ab" * 32)
    assert faults(made, end, strand=strand, anchor="ab" * 32) == []


FIELDS = {
    "at": lambda e: replace(e, at=e.at + 1),
    "kind": lambda e: replace(e, kind="lease.refused"),
    "tenant": lambda e: replace(e, tenant="bob"),
    "subject": lambda e: replace(e, subject="lease-99"),
    "body": lambda e: replace(e, body=e.body.replace("epoch", "epocH")),
    "hash": lambda e: replace(e, hash="f" * 64),
}


@pytest.mark.parametrize("position", [0, 2, 4])
@pytest.mark.parametrize("field", FIELDS)
def test_s7_an_edit_of_any_field_is_named_at_its_row(field: str, position: int) -> None:
    made = chain(5)
    end = end_of(made)
    made[position] = FIELDS[field](made[position])
    found = faults(made, end)
    assert found
    assert found[0] == Fault(MAIN, position + 1, "the row was edited, or does not follow the one before it")


@pytest.mark.parametrize("position", [0, 2, 4])
def test_s7_an_edit_with_its_hash_made_new_is_named_at_the_next_row_or_the_end(position: int) -> None:
    made = chain(5)
    end = end_of(made)
    previous = made[position - 1].hash if position else GENESIS
    made[position] = hashed(previous, replace(made[position], tenant="mallory"))
    found = faults(made, end)
    assert len(found) == 1
    assert found[0].seq == min(position + 2, 5)
    assert ("does not follow" if position < 4 else "last row") in found[0].what


def test_s7_an_edit_with_every_later_hash_made_new_is_caught_by_the_stored_end() -> None:
    made = chain(5)
    end = end_of(made)
    made[1] = replace(made[1], tenant="mallory")
    for i in range(1, 5):
        made[i] = hashed(made[i - 1].hash, made[i])
    assert [f.what for f in faults(made, end)] == ["its last row is not the one the stored end names"]


@pytest.mark.parametrize("position", [0, 1, 3])
def test_s7_a_removal_is_named_with_the_rows_that_are_missing(position: int) -> None:
    made = chain(5)
    end = end_of(made)
    del made[position]
    found = faults(made, end)
    assert found[0] == Fault(MAIN, position + 1, f"rows {position + 1} to {position + 1} are missing")


def test_s7_a_removal_of_several_rows_names_them_all() -> None:
    made = chain(8)
    end = end_of(made)
    assert faults([*made[:2], *made[5:]], end)[0].what == "rows 3 to 5 are missing"


def test_s7_a_removal_with_the_rest_renumbered_is_named() -> None:
    made = chain(5)
    end = end_of(made)
    del made[2]
    made = [replace(row, seq=i) for i, row in enumerate(made, 1)]
    found = faults(made, end)
    assert found[0].seq == 3
    assert "edited, or does not follow" in found[0].what


@pytest.mark.parametrize("i", range(4))
def test_s7_two_rows_that_changed_places_are_named_as_reordered(i: int) -> None:
    made = chain(5)
    end = end_of(made)
    made[i], made[i + 1] = made[i + 1], made[i]
    assert any("reordered" in f.what for f in faults(made, end))


def test_s7_two_rows_that_changed_places_and_numbers_are_named() -> None:
    made = chain(5)
    end = end_of(made)
    made[1], made[2] = replace(made[2], seq=2), replace(made[1], seq=3)
    assert [f.seq for f in faults(made, end)][:2] == [2, 3]


@pytest.mark.parametrize("left", [0, 1, 4])
def test_s7_a_cut_end_is_named(left: int) -> None:
    made = chain(5)
    found = faults(made[:left], end_of(made))
    assert found == [Fault(MAIN, left + 1, f"it ends at row {left}, its stored end is row 5")]


@pytest.mark.parametrize("position", [0, 2, 5])
def test_s7_an_insertion_is_named(position: int) -> None:
    made = chain(5)
    end = end_of(made)
    previous = made[position - 1].hash if position else GENESIS
    forged = hashed(previous, Entry(MAIN, position + 1, NOW, "lease.granted", "mallory", "x", "{}", ""))
    found = faults([*made[:position], forged, *made[position:]], end)
    assert found
    assert found[0].seq == position + 2 if position < 5 else found[0].seq == 7


def test_s7_a_strand_that_begins_at_another_anchor_is_named() -> None:
    made = chain(3, strand=lease_strand("x"), anchor="a" * 64)
    assert faults(made, end_of(made), strand=lease_strand("x"), anchor="b" * 64)[0].seq == 1


def test_s7_a_row_of_another_strand_does_not_pass() -> None:
    made = chain(3, strand=lease_strand("x"))
    assert faults(made, end_of(made), strand=lease_strand("y"))


def test_s7_an_empty_strand_must_end_at_its_anchor() -> None:
    assert faults([], StrandEnd(0, GENESIS)) == []
    assert faults([], StrandEnd(0, "a" * 64))


@quick
@given(st.data())
def test_s7_no_tampering_at_random_goes_unseen(data: st.DataObject) -> None:
    made = chain(data.draw(st.integers(1, 8)))
    end = end_of(made)
    rows = list(made)
    for _ in range(data.draw(st.integers(1, 3))):
        kind = data.draw(st.sampled_from(["edit", "remove", "swap", "repeat"]))
        if not rows:
            break
        i = data.draw(st.integers(0, len(rows) - 1))
        if kind == "edit":
            rows[i] = FIELDS[data.draw(st.sampled_from(sorted(FIELDS)))](rows[i])
        elif kind == "remove":
            del rows[i]
        elif kind == "swap":
            j = data.draw(st.integers(0, len(rows) - 1))
            rows[i], rows[j] = rows[j], rows[i]
        else:
            rows.insert(i, rows[i])
    assert bool(faults(rows, end)) is (rows != made)


def test_s7_two_rows_that_differ_never_have_one_hash() -> None:
    rows = [("x\n{}", "{}"), ("x", "{}\n{}")]
    hashes = []
    for subject, body in rows:
        try:
            hashes.append(entry_hash(GENESIS, MAIN, 1, NOW, "lease.refused", "ann", subject, body))
        except SubletError:
            continue  # such a row is never written, so it cannot stand for another
    assert len(hashes) == len(set(hashes))


def test_strands_of_leases_jobs_and_main_never_share_a_name() -> None:
    assert (
        len({MAIN, lease_strand("main"), job_strand("main"), lease_strand("job:x"), job_strand("lease:x")})
        == 5
    )


def test_a_body_is_one_line_of_ascii_in_one_order() -> None:
    text = body_text({"b": "é\n", "a": 1})
    assert text == '{"a":1,"b":"\\u00e9\\n"}'
    assert text.isascii()
    assert json.loads(text) == {"a": 1, "b": "é\n"}
