"""What goes along with a `%%gpu` cell and what comes back: the notebook's variables, whatever holds the
GPU."""

from __future__ import annotations

from tests.homes import wait_until
from tests.notebook.conftest import Kernel, Lab
from tests.notebook.test_output import gpu


def test_names_go_along_and_come_back(kernel: Kernel) -> None:
    kernel.fine("import numpy as np\na = np.arange(4.0)\nscale = 3")
    kernel.fine(gpu("b = a * scale\nc, d = b.sum(), {'b': b}"))
    assert kernel.value("b.tolist(), float(c), d['b'] is b") == "([0.0, 3.0, 6.0, 9.0], 18.0, True)"


def test_what_the_notebook_changes_in_between_is_seen(kernel: Kernel) -> None:
    kernel.fine("box = {'n': 1}\nsmall = [1]")
    kernel.fine(gpu("seen = box['n'], small[0]"))
    kernel.fine("box['n'] = 2\nsmall.append(5)")
    assert kernel.fine(gpu("box['n'], small")).result == "(2, [1, 5])"


def test_what_the_cell_changes_inside_an_object_comes_back(kernel: Kernel) -> None:
    kernel.fine("import numpy as np\nlarge = np.zeros(1_000_000)\nnested = {'list': []}")
    kernel.fine(gpu("large[7] = 1\nnested['list'].append('x')"))
    assert (
        kernel.value("large[7], large.sum(), nested") == "(np.float64(1.0), np.float64(1.0), {'list': ['x']})"
    )


def test_two_names_of_one_object_stay_one(kernel: Kernel) -> None:
    kernel.fine("first = [1]\nsecond = first")
    kernel.fine(gpu("second.append(2)\nsame = first is second\nfirst"))
    assert kernel.value("same, first, second, first is second") == "(True, [1, 2], [1, 2], True)"


def test_functions_and_classes_of_the_notebook(kernel: Kernel) -> None:
    kernel.fine(
        "from dataclasses import dataclass\nfactor = 10\n"
        "def scaled(x): return x * factor\n"
        "@dataclass\nclass Point:\n    x: int\n    def far(self): return scaled(self.x)\n"
        "p = Point(2)"
    )
    kernel.fine(gpu("q = Point(p.far())\nmine = isinstance(p, Point)"))
    assert kernel.value("q, mine, isinstance(q, Point)") == "(Point(x=20), True, True)"
    kernel.fine("factor = 100")
    assert kernel.fine(gpu("p.far()")).result == "200"
    kernel.fine(gpu("def made_there(x):\n    return scaled(x) + 1\nclass There:\n    n = 5"))
    assert kernel.value("made_there(1), There().n") == "(101, 5)"


def test_deleting(kernel: Kernel) -> None:
    kernel.fine("doomed = 1\nspared = 2")
    kernel.fine(gpu("del doomed"))
    assert kernel.value("'doomed' in globals(), spared") == "(False, 2)"
    kernel.fine("del spared")
    assert kernel.run(gpu("spared")).error == "NameError"


def test_exactly_what_in_and_out_say(kernel: Kernel) -> None:
    kernel.fine("x, y, z = 1, 2, 3")
    shown = kernel.run(gpu("total = x + y\nother = 9", "--in x,y --out total"))
    assert shown.status == "ok"
    assert kernel.value("total, 'other' in globals()") == "(3, False)"
    assert kernel.run(gpu("z", "--in x")).error in ("", "NameError")
    shown = kernel.run(gpu("w", "--in x"))
    assert shown.error == "NameError"


def test_what_cannot_travel_is_named_before_anything_is_leased(kernel: Kernel, shared_lab: Lab) -> None:
    kernel.fine("%gpu release")
    wait_until(lambda: shared_lab.leases() == [])
    kernel.fine("import threading\nlock = threading.Lock()\ngen = (i for i in range(3))")
    for name, kind in (("lock", "lock"), ("gen", "generator")):
        shown = kernel.run(gpu(f"print({name})"))
        assert shown.error == "CannotTravel"
        assert f"{name} ({kind})" in shown.said.replace("_thread.", "")
        assert f"make {name} inside the %%gpu cell" in shown.trace
        assert "sublet/" not in shown.trace
    assert shared_lab.leases() == []
    assert kernel.fine(gpu("lock = 5\nlock")).result == "5"  # bound before it is read: nothing has to travel


def test_what_cannot_come_back_stays_for_the_next_cell(kernel: Kernel) -> None:
    shown = kernel.fine(gpu("stream = (i * i for i in range(10))\nnext(stream)"))
    assert shown.result == "0"
    assert any("stream (cannot pickle" in text for text in shown.texts)
    assert kernel.fine(gpu("next(stream), next(stream)")).result == "(1, 4)"
    assert "stream" in kernel.fine("%gpu").texts[0]
    kernel.fine("%gpu release")
    shown = kernel.run(gpu("next(stream)"))
    assert shown.error == "NameError"
    assert "was only in the worker of lease" in shown.trace


def test_what_can_only_be_made_in_the_worker_keeps_nothing_else_from_coming_back(kernel: Kernel) -> None:
    kernel.fine("import os\nos.makedirs('there', exist_ok=True)\nseen = [0]")
    kernel.fine("open('there/only_there.py', 'w').write('class Thing:\\n    n = 7')")
    shown = kernel.run(
        gpu(
            "import sys; sys.path.insert(0, os.path.abspath('there'))\nfrom only_there import Thing\n"
            "seen.append(1)\nthings, other = [Thing()], seen\n1 / 0"
        )
    )
    assert shown.error == "ZeroDivisionError"  # the cell's own, not ours
    assert any("things (it cannot be made here: ModuleNotFoundError" in text for text in shown.texts)
    assert shown.line
    assert kernel.value("seen, other is seen, 'things' in globals()") == "([0, 1], True, False)"
    assert kernel.fine(gpu("things[0].n, seen")).result == "(7, [0, 1])"
    assert kernel.fine(gpu("things")).result.startswith("[<only_there.Thing")


def test_where_the_notebook_is_a_warm_worker_is_too(kernel: Kernel) -> None:
    kernel.fine(gpu("import os, sys\nsys.path.insert(0, 'the-cells')\nos.environ['CELL'] = 'its own'"))
    kernel.fine(
        "import os, sys\nhome = os.getcwd()\nos.makedirs('deeper', exist_ok=True)\nos.chdir('deeper')\n"
        "open('beside.py', 'w').write('value = 11')\nsys.path.insert(0, os.getcwd())\n"
        "os.environ.update(LATER='yes', CUDA_VISIBLE_DEVICES='7', SUBLET_LEDGER='sqlite:elsewhere.db')"
    )
    kernel.fine(
        gpu(
            "import beside\nthere = (os.getcwd() == home + '/deeper', beside.value, os.environ['LATER'], os.environ['CELL'],\n"
            "         'the-cells' in sys.path, os.environ['CUDA_VISIBLE_DEVICES'], 'SUBLET_LEDGER' in "
            "os.environ)"
        )
    )
    assert kernel.value("there") == "(True, 11, 'yes', 'its own', True, '', False)"
    kernel.fine(gpu("os.chdir('/')"))  # stays there, and the next cell finds it so
    assert kernel.fine(gpu("os.getcwd()")).result == "'/'"
    kernel.fine(
        "sys.path.remove(os.getcwd())\nos.chdir(home)\nfor name in ('LATER', 'CUDA_VISIBLE_DEVICES', 'SUBLET_LEDGER'): "
        "del os.environ[name]"
    )
    kernel.fine(
        gpu(
            "there = os.getcwd() == home, 'LATER' in os.environ, home + '/deeper' in sys.path, 'the-cells' "
            "in sys.path"
        )
    )
    assert kernel.value("there, 'CELL' in os.environ") == "((True, False, False, True), False)"


def test_an_array_that_is_a_file_is_written_to_the_file(kernel: Kernel) -> None:
    kernel.fine(
        "import numpy as np\nmapped = np.memmap('mapped.bin', 'f8', 'w+', shape=(300_000,))\nown = mapped"
    )
    kernel.fine(gpu("mapped[5] = 9"))
    assert (
        kernel.value("own is mapped, float(own[5]), float(np.fromfile('mapped.bin')[5])")
        == "(True, 9.0, 9.0)"
    )


def test_a_working_folder_that_is_gone_stops_nothing(kernel: Kernel) -> None:
    kernel.fine("%gpu release")
    kernel.fine(
        "import os\nhome = os.getcwd()\nos.mkdir('doomed')\nos.chdir('doomed')\nos.rmdir('../doomed')"
    )
    try:
        assert kernel.fine(gpu("1 + 1")).result == "2"
    finally:
        kernel.fine("os.chdir(home)")


def test_modules_are_imported_when_they_are_first_used(kernel: Kernel) -> None:
    kernel.fine(gpu("import sched\nimport json.decoder\nfrom math import tau"))
    assert kernel.value("'sched' in __import__('sys').modules") == "False"
    assert kernel.value("sched.scheduler.__name__, json.decoder.JSONDecoder.__name__, round(tau, 2)") == (
        "('scheduler', 'JSONDecoder', 6.28)"
    )


def test_random_numbers_go_on_where_the_notebook_left_them(kernel: Kernel) -> None:
    """One stream of random numbers, wherever its next number is drawn."""
    draw = "import random\nimport numpy as np\n"
    kernel.fine(
        draw
        + "random.seed(1); np.random.seed(1)\nplain = [(random.random(), np.random.rand()) for _ in range(3)]"
    )
    kernel.fine("random.seed(1); np.random.seed(1)\nfirst = (random.random(), np.random.rand())")
    kernel.fine(gpu(draw + "second = (random.random(), np.random.rand())"))
    kernel.fine("third = (random.random(), np.random.rand())")
    assert kernel.value("[first, second, third] == plain") == "True"


def test_two_hundred_megabytes_come_back(kernel: Kernel) -> None:
    kernel.fine(gpu("import numpy as np\nbig = np.arange(25_000_000, dtype='float64')"))
    assert kernel.value("big.nbytes, float(big[-1]), big.flags.writeable") == "(200000000, 24999999.0, True)"
    kernel.fine("big[0] = 7")
    assert kernel.fine(gpu("float(big[0])")).result == "7.0"
    kernel.fine("del big")


def test_a_cell_that_fails_half_way_leaves_what_it_did(kernel: Kernel) -> None:
    kernel.fine("done = []")
    assert kernel.run(gpu("done.append(1)\nnew = 5\nraise KeyError('x')\ndone.append(2)")).error == "KeyError"
    assert kernel.value("done, new") == "([1], 5)"


def test_objects_that_refuse_in_their_own_way(kernel: Kernel) -> None:
    kernel.fine("class Odd:\n    def __reduce__(self): raise RuntimeError('never')\nodd = Odd()")
    shown = kernel.run(gpu("odd"))
    assert shown.error == "CannotTravel"
    assert "odd (Odd)" in shown.said


def test_many_names(kernel: Kernel) -> None:
    kernel.fine("for i in range(2000): globals()[f'n{i}'] = i")
    total = " + ".join(f"n{i}" for i in range(0, 2000, 100))
    assert kernel.fine(gpu(total)).result == str(sum(range(0, 2000, 100)))
