"""`%%gpu` and `%gpu`.

Rules of this file:
- It turns a line and a cell into a run: `cells/notebook_lease.py` runs the cell, and `panel.py` shows the
  outcome.
- A cell that cannot run costs nothing: it is parsed, and its options are checked, before a GPU is requested.
"""

from __future__ import annotations

import ast
import contextlib
import re
from functools import partial
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand

from sublet.core.cells.names import names_of
from sublet.core.errors import SubletError
from sublet.notebook.cells.notebook_lease import CellOutcome, CellSource
from sublet.notebook.cells.source import commented, enter, texts_of
from sublet.notebook.options import CELL_HELP, LINE_HELP, BadOption, parse_cell, parse_line
from sublet.notebook.panel import GpuPanel
from sublet.notebook.screen import Frontend, brief, cell_error, rendered, syntax_error
from sublet.notebook.workbench import Workbench

_MISSING_NAME = re.compile(r"name '(\w+)' is not defined")


@magics_class
class GpuMagics(Magics):
    shell: Any

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.front = Frontend(shell)
        self.bench = Workbench(self.front)
        self.panel = GpuPanel(self.front, self.bench)

    @no_var_expand
    @line_cell_magic
    def gpu(self, line: str, cell: str | None = None) -> Any:
        """Run the cell on a leased GPU (%%gpu), or look after it (%gpu). `%%gpu --help` lists the options."""
        try:
            if cell is None:
                return self._line(line)
            if self.bench.runs_in_process():
                return print(CELL_HELP) if parse_cell(line) is None else self._here(cell)
            raised = self._cell(line, cell)
        except BadOption as e:
            raise UsageError(f"{e.message}\n  → {e.remedy}") from None
        except SubletError as e:
            raise brief(e) from None
        except KeyboardInterrupt as e:
            raise rendered(e, ("KeyboardInterrupt",)) from None
        if raised is not None:  # raised by the cell itself: not an error of ours, whatever its class
            raise raised
        return None

    # the cell

    def as_it_is(self, lines: list[str]) -> list[str]:
        """An input transformer: where cells run without a lease, a %%gpu cell becomes a plain cell."""
        if lines and re.match(r"%%gpu\b", lines[0]) and self.bench.runs_in_process():
            with contextlib.suppress(BadOption):  # the magic says so
                if parse_cell(lines[0].removeprefix("%%gpu")) is not None:
                    return [f"#{lines[0]}", *lines[1:]]
        return lines

    def _cell(self, line: str, cell: str) -> BaseException | None:
        """Runs the cell; returns what to raise, if anything."""
        wish = parse_cell(line)
        if wish is None:
            print(CELL_HELP)
            return None
        source = self._source(line, cell)
        if not isinstance(source, CellSource):
            return source
        return self._show(self.bench.run(wish, source, self.shell.user_ns))

    def _source(self, line: str, cell: str) -> CellSource | BaseException:
        header = f"%%gpu {line}".rstrip()
        # One line for the magic, so that a traceback names the notebook's own lines. A magic of the whole
        # cell must be its first.
        nested = cell.lstrip().startswith("%%")
        body = cell.lstrip() if nested else f"{commented(header)}\n{cell}"
        count = len(self.shell.user_ns.get("In", [""])) - 1
        python = self.shell.transform_cell(body)
        name = enter(self.shell.compile, python, body, header, count)
        try:
            names = names_of(python)
        except SyntaxError as e:
            e.filename = name
            lines = self.shell.SyntaxTB.structured_traceback(SyntaxError, e, None)
            return syntax_error(str(e.msg), tuple(lines))
        return CellSource(
            body=body,
            header=header,
            name=name,
            texts=partial(texts_of, self.shell.compile),
            count=count,
            reads=names.reads,
            front=self.front.kind,
            colors=str(self.shell.colors),
        )

    def _show(self, ran: CellOutcome) -> BaseException | None:
        report = ran.report
        if report is not None and report.result and ran.error is None:
            self.front.remember_result(ran.result)
        self.panel.under_cell(ran)
        if report is not None and report.failure is not None:
            failure = report.failure
            error = cell_error(failure)
            missing = _MISSING_NAME.match(failure.text) if failure.kind == "NameError" else None
            hint = self.bench.cells.hint(missing[1]) if missing else ""
            return rendered(error, (*failure.trace, hint)) if hint else error
        return brief(ran.error) if ran.error is not None else None

    def _here(self, cell: str) -> Any:
        """Runs the cell in this process, which has its GPU already or has SUBLET_DISABLE=1."""
        tree = ast.parse(self.shell.transform_cell(cell), "<%%gpu>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        space = self.shell.user_ns
        exec(compile(tree, "<%%gpu>", "exec"), space)
        return (
            eval(compile(ast.Expression(last.value), "<%%gpu>", "eval"), space) if last is not None else None
        )

    # the line

    def _line(self, line: str) -> Any:
        verb, rest = parse_line(line)
        if verb == "help":
            print(LINE_HELP)
        elif verb == "release":
            self.panel.released(self.bench.release())
        elif verb == "restore":
            self.panel.restored(self.bench.restore(self.shell.user_ns, rest[0] if rest else ""))
        else:
            getattr(self.panel, verb)()
        return None
