"""Exceptions that a program keeps have the tracebacks that they had."""

from __future__ import annotations

import pytest

from tests.training.program_state.carried import assert_carried, carry

FAILING = """
import json, sys, traceback
class Kept:
    def __init__(s, n): s.n = n
def fail(n):
    inside = [n, n * 2]
    held = Kept(n)
    def reads(): return held.n
    try:
        {}['no']
    except KeyError as before:
        raise ArithmeticError(n, inside) from before
def caught(call, *given):
    try: call(*given)
    except Exception as error: return error
def deep(n):
    if n: deep(n - 1)
    else: raise RecursionError('deep')
def many():
    group = ExceptionGroup('several', [caught(fail, n) for n in range(2)])
    group.add_note('noted')
    raise group
def shown(error): return ''.join(traceback.format_exception(error))
"""
PROGRAMS = {
    "what is shown of them": """
def run():
    early = caught(fail, 0), caught(deep, 150), caught(json.loads, '{'), caught(many)
    try: int('x')
    except ValueError: info = sys.exc_info()
    kept = None
    begin()
    for n in range(5):
        try:
            fail(n)
        except ArithmeticError as error:
            if n == 1: kept = error, caught(many)
        step()
        for error in (*early, info[1], *(kept or ())):
            print(shown(error))
    try:
        raise kept[0]
    except ArithmeticError as again:
        print(shown(again))
run()
""",
    "the variables of their frames": """
early, kept = caught(fail, 0), None
begin()
for n in range(5):
    if n == 1: kept = caught(fail, n)
    step()
    for error in (early, kept) if kept else (early,):
        frame = error.__traceback__.tb_next.tb_frame
        there = frame.f_locals
        there['held'].n += 1
        print(frame.f_lineno, frame.f_code.co_name, there['inside'] is error.args[1], there['reads']())
        print(error.__cause__.__traceback__.tb_frame is frame, error.__traceback__.tb_frame.f_globals is globals())
""",
    "a generator that waits in an except": """
def stream():
    for n in range(9):
        try:
            fail(n)
        except ArithmeticError as error:
            yield shown(error), traceback.format_exc()
it = stream()
next(it)
begin()
for n in range(5):
    said = next(it)
    step()
    print(said)
""",
    "what only a traceback holds is gone with it": """
import weakref
error = caught(fail, 1)
held = weakref.ref(error.__traceback__.tb_next.tb_frame.f_locals['held'])
begin()
for n in range(5):
    if n == 3: error = None
    step()
    print(held() is None)
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_they_are_as_they_were_elsewhere(name: str) -> None:
    assert_carried(FAILING + PROGRAMS[name])


def test_a_frame_that_is_kept_while_it_runs_is_refused_in_words() -> None:
    text = (
        "import sys\ndef go():\n    mine = sys._getframe()\n    begin()\n    step()\n    print(mine)\ngo()\n"
    )
    assert "a frame that is running" in carry(text).refused
