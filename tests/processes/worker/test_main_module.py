"""A script's globals in its worker: sent when they change and only then, and none of it grows."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sublet.processes.worker.local import LocalWorker
from sublet.processes.worker.main_module import FUNCTIONS_KEPT, Shipped
from tests.processes.channel.test_pickling import in_main
from tests.processes.conftest import script


def names(parcel: Any) -> list[str]:
    return sorted(name for name, _ in parcel.news if isinstance(name, str))


@pytest.mark.usefixtures("worker")
def test_a_global_is_sent_when_it_changed_and_only_then(folder: Path) -> None:
    said = in_main(
        folder,
        """
        import numpy as np
        number, text, items, table, array, zero, nothing = 1, "a", [1], {"k": 1}, np.zeros(3), 0.0, None
        def look(): return number, text, items, table, array, zero, nothing
        def sent(f=look):
            parcel = worker._shipped.parcel(f, ((), {}))
            return sorted(n for n, _ in parcel.news if isinstance(n, str))
        print(sent())
        run(look)
        print(sent())
        number = 2; print(sent()); run(look)
        number = 2.0; print(sent()); run(look)
        number = True; run(look); number = 1; print(sent()); run(look)
        items.append(2); print(sent()); print(run(look)[2])
        table["k"] = 2; print(sent()); print(run(look)[3])
        array[1] = 9; print(sent()); print(run(look)[4].tolist())
        zero = -0.0; print(sent(), run(look)[5])
        nothing = 0; print(sent(), run(look)[6])
        items = list(items); print(sent())
        """,
    )
    every = str(["array", "items", "nothing", "number", "table", "text", "zero"])
    assert said == [
        every, "[]", "['number']", "['number']", "['number']",
        "['items']", "[1, 2]", "['table']", "{'k': 2}", "['array']", "[0.0, 9.0, 0.0]",
        "['zero'] -0.0", "['nothing'] 0", "[]",
    ]  # fmt: skip


@pytest.mark.usefixtures("worker")
def test_what_the_worker_stored_stays(folder: Path) -> None:
    said = in_main(
        folder,
        """
        model, calls = None, []
        def work():
            global model
            loaded = model is None
            model = "loaded there"
            calls.append(1)
            return loaded, len(calls)
        print(run(work), run(work), run(lambda: model), model, calls)
        calls.append(5)  # changed here: ours counts again
        print(run(work))
        model = "other"
        print(run(work), run(lambda: model))
        """,
    )
    assert said == ["(True, 1) (False, 2) loaded there None []", "(False, 2)", "(False, 3) loaded there"]


@pytest.mark.usefixtures("worker")
def test_changes_are_seen_through_whatever_leads_to_them(folder: Path) -> None:
    """A global read by a method of a class, by a function under a decorator, in a list, by one that calls
    another."""
    said = in_main(
        folder,
        """
        def by_class(): return Derived(1).value()
        table = {"f": scaled, "g": [fact]}
        def by_table(): return table["f"](1)
        def by_function(): return direct()
        def direct(): return scale
        def by_decorator(): return scaled(1)
        partial = functools.partial(direct)
        def by_partial(): return partial()
        every = [by_class, by_table, by_function, by_decorator, by_partial]
        print([run(f) for f in every])
        scale = 20
        print([run(f) for f in every])
        def direct(): return -1
        partial = functools.partial(direct)
        Derived.value = lambda self: "patched"
        print([run(f) for f in every])
        direct.__code__ = (lambda: -2).__code__
        print([run(f) for f in every])
        """,
    )
    assert said == [
        "[11, 11, 10, 11, 10]",
        "[21, 21, 20, 21, 20]",
        "['patched', 21, -1, 21, -1]",
        "['patched', 21, -2, 21, -2]",
    ]


@pytest.mark.usefixtures("worker")
def test_a_deleted_global_is_gone_there_too(folder: Path) -> None:
    said = in_main(
        folder,
        """
        len = lambda x: -1  # hides the builtin
        def measure(): return len([1, 2])
        def own():
            global only_there
            only_there = 1
        def see(): return only_there
        print(run(measure))
        del len
        print(run(measure), run(measure))
        run(own)
        print(run(see), run(see))
        """,
    )
    assert said == ["-1", "2 2", "1 1"]


@pytest.mark.usefixtures("worker")
def test_what_cannot_be_sent_is_named_and_harms_nothing(folder: Path) -> None:
    """The parcel was not sent: nothing of it may count as sent."""
    said = in_main(
        folder,
        """
        import threading
        from sublet.core.errors import BadInput
        other, lock = 5, threading.Lock()
        def locked(): return other, lock
        for _ in range(2):
            try: run(locked)
            except BadInput as e: print("'lock'" in str(e), "_thread.lock" in str(e))
        lock = 3
        print(run(locked))
        try: run(print, threading.Lock())
        except BadInput as e: print("cannot be sent" in str(e))
        print(run(locked))
        """,
    )
    assert said == ["True True", "True True", "(5, 3)", "True", "(5, 3)"]


@pytest.mark.usefixtures("worker")
def test_what_the_worker_could_not_unpack_is_sent_again(folder: Path) -> None:
    """A module is missing there at first: the next call is not told of a function that the worker never
    got."""
    said = in_main(
        folder,
        """
        import types, tempfile
        place = tempfile.mkdtemp()
        Path(place, "arrives_late.py").write_text("def f(): return 'here'\\n")
        sys.path.append(place)
        import arrives_late
        number = 4
        def use(): return arrives_late.f(), number
        for _ in range(2):
            try: run(use)
            except ModuleNotFoundError as e: print(e)
        run(lambda p: sys.path.append(p), place)
        print(run(use))
        import shutil; shutil.rmtree(place)
        """,
    )
    assert said == ["No module named 'arrives_late'"] * 2 + ["('here', 4)"]


@pytest.mark.usefixtures("worker")
def test_redefined_functions(folder: Path) -> None:
    said = in_main(
        folder,
        """
        def f(x): return x
        print(run(f, 1))
        old = f
        def f(x): return -x
        print(run(f, 1), run(old, 1))
        f.__defaults__ = (7,)
        print(run(f))
        f.__code__ = (lambda x: x * 100).__code__
        print(run(f))
        """,
    )
    assert said == ["1", "-1 1", "-7", "700"]


def test_calls_without_number_do_not_pile_up(worker: LocalWorker) -> None:
    """A lambda in a loop is a new function each time: neither side keeps them all."""
    for n in range(2 * FUNCTIONS_KEPT):
        assert worker.call(lambda n=n: n, (), {}) == n
    assert len(worker._shipped._functions) <= FUNCTIONS_KEPT
    assert len(worker._shipped._forgotten) <= 2

    def kept_there() -> int:
        import gc
        import types

        return sum(
            isinstance(f, types.FunctionType) and f.__qualname__.endswith("pile_up.<locals>.<lambda>")
            for f in gc.get_objects()
        )

    assert worker.call(kept_there, (), {}) <= FUNCTIONS_KEPT


def test_a_known_function_costs_nothing_to_send_again() -> None:
    shipped = Shipped()
    functions: list[Callable[..., Any]] = [os.getpid, script, lambda: 1, in_main]
    for function in functions:
        first = shipped.parcel(function, ())
        assert len(first.news) == 1
        again = shipped.parcel(function, ())
        assert len(again.news) == 1  # it was not taken yet
        shipped.took(again)
        third = shipped.parcel(function, ())
        assert (third.news, third.number) == ([], again.number)


def test_the_one_used_last_is_forgotten_last() -> None:
    shipped = Shipped()

    def call(function: Callable[..., Any]) -> tuple[int, list[int]]:
        parcel = shipped.parcel(function, ())
        shipped.took(parcel)
        return parcel.number, [n for n, blob in parcel.news if isinstance(n, int) and not blob]

    def favourite() -> None:
        pass

    number, _ = call(favourite)
    told: list[int] = []
    made = []
    for n in range(FUNCTIONS_KEPT + 10):
        made.append(lambda n=n: n)
        told += call(made[-1])[1]
        same, more = call(favourite)
        assert same == number
        told += more
    assert told == list(range(number + 1, number + 1 + len(told)))
    assert len(told) == 11


def test_a_closure_is_compared_by_what_it_holds() -> None:
    shipped = Shipped()
    box = [1]

    def closure() -> list[int]:
        return box

    first = shipped.parcel(closure, ())
    shipped.took(first)
    assert shipped.parcel(closure, ()).news == []
    box.append(2)
    changed = shipped.parcel(closure, ())
    assert changed.number != first.number
    shipped.took(changed)
    # The worker is told to forget what it was before.
    assert (first.number, b"") in shipped.parcel(closure, ()).news
