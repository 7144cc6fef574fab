"""Magics, shell lines and code in texts, as IPython transforms and runs them."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from sublet.core.cells.magics import identifiers, magic_call_of
from sublet.core.cells.names import CellNames, names_of
from sublet.notebook.cells.messages import is_users


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InteractiveShell]:
    config = Config()
    config.HistoryManager.enabled = False
    folder = str(tmp_path_factory.mktemp("ipython"))
    display = builtins.__dict__.get("display")
    made = InteractiveShell(config=config, ipython_dir=folder, user_module=None, user_ns={})
    yield made
    made.restore_sys_module_state()
    if display is None:
        builtins.__dict__.pop("display", None)


def names(shell: InteractiveShell, cell: str) -> CellNames:
    return names_of(shell.transform_cell(cell))


def users(found: tuple[str, ...]) -> set[str]:
    return {name for name in found if is_users(name) and name not in dir(builtins)}


# --- as it runs ---

NOTEBOOK: Mapping[str, Any] = {"x": 3, "y": [1, 2], "z": 5, "out": "kept", "f": abs, "n": 2, "word": "hello"}


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def ran(shell: InteractiveShell, cell: str, space: Mapping[str, Any]) -> dict[str, str]:
    shell.reset(new_session=False)
    shell.user_ns.update(space)
    shell.run_cell(cell, store_history=False)
    return {n: _ADDRESS.sub("", repr(v)) for n, v in shell.user_ns.items() if is_users(n)}


@pytest.mark.parametrize(
    "cell",
    [
        "%time a = f(x)\nb = a + z",
        "%time x",
        "%time -x + z",
        "a = %time f(x)\nb = a",
        "%time --no-raise-error a = f(nothing)\nb = z",
        "%time --no-raise-error x = f(nothing)\nb = x",
        "%timeit -n1 -r1 y.append(x)",
        "%timeit -n 1 -r 1 -q y.append(len(y) and x)",
        "a = %timeit -n1 -r1 -q -o f(x)\ndel a",
        "%prun -q a = f(x)",
        "%prun -q -s cumulative a = f(x)",
        "%%time\na = f(x)\nb = a + z",
        "%%time\nfrom __future__ import annotations\na = f(x)",
        "%%time\nlines = !echo {x} $n\na = z",
        "%%timeit -n1 -r1 a = x\ny.append(a + z)",
        "%%timeit -n1 -r1\nx = 1\ny.append(x)",
        "%%capture out\na = f(x)\nprint(a)",
        "%%capture --no-stderr out\na = x",
        "%%capture out --no-display\na = x",
        "%%capture out\na = x;",
        "%%capture\ndel x",
        "%%prun -q\na = f(x)",
        "lines = !echo {x} $n ${word} {y[0] + z}",
        "lines = !echo '{f(x)}' $$n {{z}}",
        "lines = %sx echo {x}",
        "%%sx\necho {x}",
        "for i in y:\n    %time a = i + x\nb = a",
        "if n:\n    %time a = x\nb = z",
        "def g():\n    %time a = x\ng()",
        "def g():\n    return get_ipython().getoutput('echo {x}')\na = g()",
        "a = [get_ipython().getoutput('echo {x}') for x in y]",
        "a = n and get_ipython().run_line_magic('time', 'x + z')",
        "get_ipython().run_cell('a = x')",
        "get_ipython().ex('a = x')\nb = a",
        "a = get_ipython().ev('x + z')",
        "%xdel x",
        "%reset_selective -f ^x$",
        "%env NAME={word}",
        "%%html\n<b>{x}</b>",
        "import asyncio\nawait asyncio.sleep(0)\na = x",
        "async def several():\n    for i in y:\n        yield i + x\nasync for i in several():\n    a = i",
        "exec('a = x')\nb = a",
        "a = eval('x + z')",
        "a = eval(f'x + {n}')",
    ],
)
def test_a_cell_with_magics_does_the_same_with_nothing_but_what_it_reads(
    shell: InteractiveShell, cell: str, capfd: pytest.CaptureFixture[str]
) -> None:
    found = names(shell, cell)
    here = ran(shell, cell, dict(NOTEBOOK) | {"y": [1, 2]})
    sent = {name: value for name, value in (dict(NOTEBOOK) | {"y": [1, 2]}).items() if name in found.reads}
    away = ran(shell, cell, sent)
    kept = {name: repr(value) for name, value in NOTEBOOK.items() if name not in sent}
    assert kept | away == here
    before = {name: repr(value) for name, value in NOTEBOOK.items()}
    rebound = {name for name in here if before.get(name) != here[name]} - {"y"}  # y is changed inside
    assert rebound <= set(found.writes)
    assert before.keys() - here.keys() <= set(found.deletes)


# --- what is said about names ---


@pytest.mark.parametrize(
    ("cell", "reads", "writes"),
    [
        ("%time a = f(x)\nprint(a)", "f x", "a"),
        ("%time import torch\ntorch.ones(n)", "n", "torch"),
        ("%time for i in y: print(i)", "y", "i"),
        ("%time {x}", "x", ""),
        ("%time get_ipython().system('echo {x}')", "x", ""),
        ("%time --no-raise-error a = x\na", "x a", "a"),
        ("%timeit f(x)", "f x", ""),
        ("%timeit -n 3 -r5 f(x)", "f x", ""),
        ("%prun -l 5 f(x)", "f x", ""),
        ("%prun -s cumulative f(x)", "s cumulative f x", "s cumulative f x"),
        ("%%time\na = x\nprint(a)", "x", "a"),
        ("%%time\n  a = x\n  print(a)", "x", "a"),
        ("%%timeit a = x\na + z", "a x z", "a x"),
        ("%%capture out\na = x\nprint(a)", "x", "a out"),
        ("%%capture --no-stderr out\nprint(x)", "x", "out"),
        ("%%capture\nprint(x)", "x", ""),
        ("%%capture out\nprint(x);", "x out", ""),
        ("%%capture out\n%cd x", "cd x", "cd x out"),
        ("!echo {x} model", "x", ""),
        ("!echo {x['k']} {w} $n ${m} words", "x k w n m", ""),
        ("!echo plain words", "", ""),
        ("!echo $n words", "n", ""),
        ("!echo $if $² $n", "n", ""),  # neither a keyword nor a superscript is a name
        ("get_ipython().system('echo {x +\\n z}')", "x z", ""),
        ("for i in v:\n    !echo {i}", "v", "i"),
        ("a = !ls {d}\nprint(a)", "d", "a"),
        ("!!ls {d}", "d", ""),
        ("%cd {d}", "cd d", "cd d"),
        ("x?", "pinfo x", "pinfo x"),
        ("%%bash --out a\necho $x {y}", "out a", "out a"),
        ("%%writefile name.py\nprint(model)", "name py", "name py"),
        ("%%sx\necho {x} model", "x", ""),
        ("%%mine b\nc d", "mine b c d", "mine b c d"),
        ("%matplotlib inline", "matplotlib inline", "matplotlib inline"),
        ("print('x {y} $z')", "", ""),
        ("if c:\n    %time a = x\na", "c x a", "a"),
        ("a = f(get_ipython().run_line_magic('time', 'b = x'))\nb", "f x b", "a b"),
        ("get_ipython().run_line_magic('time', code)", "code time", "time"),
        ("get_ipython().run_line_magic('time', '²x __debug__ None if')", "", ""),
        ("get_ipython().run_line_magic('time', 'return x')", "x", "x"),
        ("get_ipython().run_line_magic('time', 'x\\0y')", "x y", "x y"),
        ("get_ipython().run_line_magic('time', 'x\\ud800y')", "x y", "x y"),
        (f"get_ipython().run_line_magic('time', '{'x+' * 20_000}y')", "x y", "x y"),
        (f"get_ipython().run_line_magic('time', '{'-' * 100_000}y')", "y", "y"),
        ("get_ipython().history", "", ""),
        ("mine().run_line_magic('time', 'x')", "mine", ""),
        ("class A:\n    !echo {x}", "x", "A"),
        ("get_ipython().system('echo {x}')\nglobal x", "x", ""),
    ],
)
def test_what_a_magic_says_about_names(shell: InteractiveShell, cell: str, reads: str, writes: str) -> None:
    found = names(shell, cell)
    assert users(found.reads) == set(reads.split())
    assert users(found.writes) == set(writes.split())


@given(st.text())
def test_whatever_a_text_is_its_identifiers_are_names(text: str) -> None:
    for word in identifiers(text):
        ast.parse(f"{word} = 1; del {word}")
    for method in ("system", "getoutput", "run_line_magic", "ex"):
        names_of(f"get_ipython().{method}({text!r})")
        names_of(f"get_ipython().{method}('time', {text!r})")
    names_of(f"get_ipython().run_cell_magic('capture', {text!r}, {text!r})")


def test_a_call_that_is_no_magic_says_nothing() -> None:
    for source in ("f('x')", "a.b('x')", "get_ipython('x')", "get_ipython.system('x')"):
        call = ast.parse(source).body[0].value  # type: ignore[attr-defined]
        assert magic_call_of(call) is None
