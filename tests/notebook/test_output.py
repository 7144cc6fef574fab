"""A `%%gpu` cell looks like a normal one: streams, displays, results, tracebacks, in the order in which they
were made."""

from __future__ import annotations

import re
from pathlib import Path

from tests.notebook.conftest import Kernel, Shown


def gpu(code: str, options: str = "") -> str:
    return f"%%gpu {options}\n{code}"


def without_line(shown: Shown) -> list[str]:
    return [text for text in shown.texts if "GPU-s" not in text]


def test_print_and_the_last_value(kernel: Kernel) -> None:
    shown = kernel.fine(gpu("import sys\nprint('out')\nprint('err', file=sys.stderr)\n6 * 7"))
    assert (shown.stdout, shown.stderr, shown.result) == ("out\n", "err\n", "42")
    assert kernel.value("_") == "42"
    assert kernel.value("Out[max(Out)] if Out else None") == "42"
    assert "GPU-s" in shown.line
    assert shown.line.startswith(kernel.value("__import__('os').environ['SUBLET_HOST']").strip("'"))


def test_a_semicolon_silences_the_value_and_none_is_not_shown(kernel: Kernel) -> None:
    assert kernel.fine(gpu("7;")).result == ""
    assert kernel.fine(gpu("None")).result == ""


def test_everything_appears_in_the_order_in_which_it_was_made(kernel: Kernel) -> None:
    code = """
from IPython.display import display, HTML
import sys
print("1")
display(HTML("<b>2</b>"))
print("3", file=sys.stderr)
display("4")
print("5")
"six"
"""
    shown = kernel.fine(gpu(code))
    assert shown.order[:6] == [
        "stream",
        "display_data",
        "stream",
        "display_data",
        "stream",
        "execute_result",
    ]
    assert shown.displays[0]["data"]["text/html"] == "<b>2</b>"
    assert shown.texts[1] == "'4'"


def test_output_is_live(kernel: Kernel, tmp_path: Path) -> None:
    """The first line is there while the cell still waits for what comes after it."""
    gate = tmp_path / "open"
    kernel.fine(f"gate = {str(gate)!r}")
    kernel.begin(
        gpu(
            "import os, time\nprint('first')\nwhile not os.path.exists(gate): time.sleep(0.01)\nprint('second')"
        )
    )
    shown = kernel.finish(until=lambda s: "first" in s.stdout)
    assert "second" not in shown.stdout
    gate.touch()
    assert kernel.finish().stdout == "second\n"


def test_displays_are_updated_and_cleared(kernel: Kernel) -> None:
    code = """
from IPython.display import display, clear_output
handle = display("waiting", display_id=True)
handle.update("done")
clear_output(wait=True)
print("after")
"""
    shown = kernel.fine(gpu(code))
    assert shown.displays[0]["transient"]["display_id"] == shown.updates[0]["transient"]["display_id"]
    assert shown.updates[0]["data"]["text/plain"] == "'done'"
    assert shown.cleared == 1
    assert shown.stdout == "after\n"


def test_a_plot(kernel: Kernel) -> None:
    shown = kernel.fine(
        gpu("%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.plot([1, 2, 3])\nplt.title('loss');")
    )
    images = [d for d in shown.displays if "image/png" in d["data"]]
    assert len(images) == 1
    assert images[0]["data"]["image/png"].startswith("iVBOR")


def test_a_plot_without_saying_inline(kernel: Kernel) -> None:
    shown = kernel.fine(gpu("import matplotlib.pyplot as plt\nplt.plot([3, 2, 1])\nplt.show()"))
    assert any("image/png" in d["data"] for d in shown.displays)


def test_progress_bars(kernel: Kernel) -> None:
    shown = kernel.fine(gpu("from tqdm import tqdm\nfor _ in tqdm(range(3), desc='steps'): pass"))
    assert "steps: 100%" in shown.stderr
    shown = kernel.fine(gpu("from tqdm.auto import tqdm\nfor _ in tqdm(range(3), desc='auto'): pass"))
    assert "auto: 100%" in shown.stderr + "".join(without_line(shown))
    shown = kernel.fine(
        gpu("from rich.progress import track\nfor _ in track(range(3), description='rich'): pass")
    )
    drawn = "".join(
        [*without_line(shown), *(u["data"].get("text/plain", "") for u in shown.updates), shown.stdout]
    )
    assert "rich" in drawn


def test_rich_values(kernel: Kernel) -> None:
    code = """
class Table:
    def _repr_html_(self): return "<table></table>"
    def __repr__(self): return "a table"
Table()
"""
    shown = kernel.fine(gpu(code))
    assert shown.data["text/html"] == "<table></table>"
    assert shown.result == "a table"


def test_an_error_shows_the_cells_own_lines_and_nothing_of_ours(kernel: Kernel) -> None:
    shown = kernel.run(gpu("def f(x):\n    return 1 / x\n\nf(0)", "--ttl 4m"))
    assert shown.error == "ZeroDivisionError"
    assert "%%gpu --ttl 4m" in shown.trace
    assert "----> 5 f(0)" in shown.trace.replace("      ", " ")
    assert "3     return 1 / x" in shown.trace
    assert "sublet" not in shown.trace
    assert "GPU-s" in shown.line  # an error costs too, and the cell says what


def test_a_function_defined_in_one_cell_fails_in_another(kernel: Kernel) -> None:
    kernel.fine("def twice(x):\n    return 2 / x")
    shown = kernel.run(gpu("twice(0)"))
    assert "2     return 2 / x" in shown.trace
    kernel.fine(gpu("def thrice(x):\n    return 3 / x"))
    shown = kernel.run(gpu("thrice(0)"))
    assert "return 3 / x" in shown.trace
    shown = kernel.run("thrice(0)")
    assert shown.error == "ZeroDivisionError"


def test_errors_can_be_caught_and_their_causes_are_shown(kernel: Kernel) -> None:
    kernel.fine("class Mine(Exception): pass")
    shown = kernel.run(gpu("try:\n    [][1]\nexcept IndexError as e:\n    raise Mine('no') from e"))
    assert shown.error == "Mine"
    assert "IndexError" in shown.trace
    assert "direct cause" in shown.trace


def test_syntax_errors_are_told_before_anything_is_leased(kernel: Kernel) -> None:
    kernel.fine("%gpu release")
    shown = kernel.run(gpu("x = = 1"))
    assert shown.error == "SyntaxError"
    assert "x = = 1" in shown.trace
    assert "No GPU is leased" in kernel.fine("%gpu").texts[0]


def test_exception_groups(kernel: Kernel) -> None:
    shown = kernel.run(gpu("raise ExceptionGroup('several', [ValueError(1), TypeError(2)])"))
    assert "ExceptionGroup" in shown.error + shown.trace
    assert "TypeError: 2" in shown.trace


def test_input_is_refused(kernel: Kernel) -> None:
    shown = kernel.run(gpu("input('name? ')"))
    assert shown.error == "StdinNotImplementedError"
    assert "ask in a normal cell" in shown.trace
    shown = kernel.run(gpu("breakpoint()"))
    assert shown.error == "StdinNotImplementedError"
    assert "take %%gpu away" in shown.said
    assert "pdb.py" not in shown.trace


def test_exit_does_not_end_anything(kernel: Kernel) -> None:
    shown = kernel.run(gpu("import sys\nsys.exit(3)"))
    assert shown.error == "SystemExit"
    assert kernel.fine(gpu("1 + 1")).result == "2"


def test_magics_and_the_shell(kernel: Kernel) -> None:
    kernel.fine("word = 'sublet'")
    shown = kernel.fine(
        gpu("%time x = sum(range(10))\n!echo hello {word}\nlines = !printf 'a\\nb'\nx, list(lines)")
    )
    assert "hello sublet" in shown.stdout
    assert "CPU times" in shown.stdout
    assert shown.result == "(45, ['a', 'b'])"
    assert kernel.value("x") == "45"
    shown = kernel.fine(gpu("%%timeit -n1 -r1\nsum(range(10))"))
    assert "per loop" in shown.stdout
    shown = kernel.fine(gpu("%%capture caught\nprint('inside')"))
    assert shown.stdout == ""
    shown = kernel.run(gpu("%nonsense"))
    assert "nonsense" in shown.trace + shown.stderr


def test_async_cells(kernel: Kernel) -> None:
    code = """
import asyncio
async def later(x):
    await asyncio.sleep(0.01)
    return x
got = await later(5)
both = await asyncio.gather(later(1), later(2))
got, both
"""
    assert kernel.fine(gpu(code)).result == "(5, [1, 2])"
    assert kernel.value("got") == "5"


def test_threads(kernel: Kernel) -> None:
    """Each thread's output is whole and in its order, and so is each write. A `print` is two, here as in a notebook without us: between a
    text and its newline there may be another thread's."""
    code = """
import sys, threading
def work(n):
    for i in range(200):
        print(f"t{n}-{i}")
        sys.stdout.write(f"line {n} {i}\\n")
threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
usual = sys.getswitchinterval()
sys.setswitchinterval(1e-6)
try:
    for t in threads: t.start()
    for t in threads: t.join()
finally:
    sys.setswitchinterval(usual)
del threads, t
print("joined")
"""
    shown = kernel.fine(gpu(code))
    for n in range(4):
        for wanted in (rf"t{n}-(\d+)", rf"line {n} (\d+)\n"):
            assert re.findall(wanted, shown.stdout) == [str(i) for i in range(200)]
    assert shown.stdout.endswith("joined\n")
    assert re.sub(r"t\d-\d+|line \d \d+", "", shown.stdout) == "\n" * 1600 + "joined\n"


def test_twenty_thousand_lines(kernel: Kernel) -> None:
    shown = kernel.fine(gpu("for i in range(20_000): print(i)"))
    assert shown.stdout == "".join(f"{i}\n" for i in range(20_000))


def test_what_programs_and_c_code_write(kernel: Kernel) -> None:
    shown = kernel.fine(
        gpu("import os, subprocess\nos.write(1, b'from C\\n')\nsubprocess.run(['echo', 'from a child'])")
    )
    assert "from C\n" in shown.stdout
    assert "from a child\n" in shown.stdout


def test_warnings_and_logging(kernel: Kernel) -> None:
    shown = kernel.fine(gpu("import warnings, logging\nwarnings.warn('old')\nlogging.warning('careful')"))
    assert "UserWarning: old" in shown.stderr
    assert "careful" in shown.stderr


def test_widgets_say_that_they_belong_elsewhere(kernel: Kernel) -> None:
    shown = kernel.run(gpu("from ipywidgets import IntSlider"))
    assert shown.error == "ImportError"
    assert "normal cell" in shown.said
