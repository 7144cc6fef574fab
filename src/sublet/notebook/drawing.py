"""How things look in a notebook and in a terminal: a quiet line, a table, the time that is left.

Rules of this file:
- Everything is drawn twice, as text and as HTML; a front end shows what it can.
- HTML has no script, no colour of its own and no address: it looks right on light and on dark, in a notebook that is not trusted, and
  without a network. The countdown is CSS.
"""

from __future__ import annotations

import html
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

QUIET = "font-size:.85em;opacity:.75"
_CELL = "padding:.15em .9em .15em 0;text-align:{side};vertical-align:top;white-space:{wrap}"
#: Texts longer than this may be broken.
_LONG = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    text: str
    html: str

    def __add__(self, other: Drawn) -> Drawn:
        return Drawn(text=f"{self.text}\n{other.text}", html=self.html + other.html)

    @property
    def data(self) -> dict[str, str]:
        """As a display wants it."""
        return {"text/plain": self.text, "text/html": self.html}


def line(text: str) -> Drawn:
    return Drawn(text=text, html=f'<div style="{QUIET}">{html.escape(text)}</div>')


def title(text: str) -> Drawn:
    return Drawn(text=text, html=f'<div style="font-weight:600;margin-top:.3em">{html.escape(text)}</div>')


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, total: Sequence[str] = ()) -> Drawn:
    """Columns that hold only figures stand to the right. `total` is a last row, set apart."""
    body = [*rows, total] if total else list(rows)
    figures = [all(_is_figure(row[i]) for row in body) for i in range(len(columns))]
    widths = [max(len(row[i]) for row in [columns, *body]) for i in range(len(columns))]
    lines = [
        "  ".join(
            cell.rjust(width) if figure else cell.ljust(width)
            for cell, width, figure in zip(row, widths, figures, strict=True)
        ).rstrip()
        for row in [columns, *body]
    ]
    head = "".join(_cell("th", column, figure) for column, figure in zip(columns, figures, strict=True))
    drawn = [f"<tr>{head}</tr>"]
    for number, row in enumerate(body):
        apart = ' style="border-top:1px solid currentColor"' if total and number == len(rows) else ""
        cells = "".join(_cell("td", cell, figure) for cell, figure in zip(row, figures, strict=True))
        drawn.append(f"<tr{apart}>{cells}</tr>")
    style = "font-size:.9em;border-collapse:collapse;font-variant-numeric:tabular-nums;margin:.2em 0"
    return Drawn(text="\n".join(lines), html=f'<table style="{style}">{"".join(drawn)}</table>')


def _cell(tag: str, text: str, figure: bool) -> str:
    style = _CELL.format(side="right" if figure else "left", wrap="normal" if len(text) > _LONG else "nowrap")
    return f'<{tag} style="{style}">{html.escape(text)}</{tag}>'


def _is_figure(text: str) -> bool:
    return text in ("", "-") or text[0].isdigit()


def fields(pairs: Sequence[tuple[str, str]]) -> Drawn:
    width = max(len(name) for name, _ in pairs)
    text = "\n".join(f"{name.ljust(width)}  {value}" for name, value in pairs)
    rows = "".join(f"<tr>{_cell('th', name, False)}{_cell('td', value, False)}</tr>" for name, value in pairs)
    return Drawn(text=text, html=f'<table style="font-size:.9em;border-collapse:collapse">{rows}</table>')


def countdown(left_s: float, whole_s: float) -> Drawn:
    """A bar that empties by itself while it is looked at, and the minutes and seconds that are left."""
    text = f"{_clock(left_s)} left of {_clock(whole_s)}"
    part = 100 * min(1.0, left_s / whole_s) if whole_s > 0 else 0.0
    name = f"sublet-{secrets.token_hex(4)}"  # styles are the page's: two panels must not share one
    seconds = int(left_s)
    css = (
        f"@property --{name}{{syntax:'<integer>';inherits:false;initial-value:0}}"
        f"@keyframes {name}-bar{{from{{width:{part:.2f}%}}to{{width:0}}}}"
        f"@keyframes {name}-count{{from{{--{name}:{seconds}}}to{{--{name}:0}}}}"
        f".{name}-bar{{height:100%;width:0;background:currentColor;opacity:.55;animation:{name}-bar {left_s:.1f}s linear}}"
        f".{name}-left::after{{content:counter(sublet);counter-reset:sublet var(--{name});"
        f"animation:{name}-count {seconds}s linear}}"
    )
    track = "height:.35em;border:1px solid currentColor;border-radius:.2em;max-width:24em;margin:.2em 0"
    drawn = (
        f"<style>{css}</style>"
        f'<div role="timer" aria-label="{text}" style="font-size:.9em;font-variant-numeric:tabular-nums">'
        f'<span class="{name}-left"></span> s left of {int(whole_s)} s'
        f'<div aria-hidden="true" style="{track}"><div class="{name}-bar"></div></div></div>'
    )
    return Drawn(text=text, html=drawn)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"
