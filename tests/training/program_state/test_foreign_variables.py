"""What a program keeps in modules and classes of others is its state; what they keep there for themselves is not."""

from __future__ import annotations

import json.decoder

from sublet.training.program_state.process_state import added_attributes, names_set
from tests.training.program_state.carried import assert_carried


def test_it_goes_on_elsewhere() -> None:
    assert_carried("""
import string, json
string.early = [1]
string.late = None
json.JSONEncoder.seen = kept = {}
class State: n = 0
string.own = State()
begin()
for n in range(6):
    string.early.append(n)
    string.own.n += n
    kept[n] = n
    if n == 1: string.late = [1]
    if n > 0: string.late.append(n)
    step()
    print(string.early, string.late, string.own.n, json.JSONEncoder.seen is kept, kept)
""")


def test_what_a_library_speaks_of_is_its_own() -> None:
    def program() -> None:
        json.decoder.BACKSLASH = {}  # type: ignore[attr-defined]
        json.decoder.mine = {}  # type: ignore[attr-defined]

    names = names_set([program.__code__], [__file__])
    assert {"BACKSLASH", "mine"} <= names
    there = {"BACKSLASH": {}, "mine": {}, "others": {}, "program": program}
    assert added_attributes("json.decoder", there, names) == ["mine"]
