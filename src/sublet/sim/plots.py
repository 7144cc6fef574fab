"""Bar charts of the schemes compared: as text, as SVG, as PNG where matplotlib is installed. Pure except for
the PNG.

Rules of this file:
- A panel is one figure of merit, with its unit and whether more or less is better; a bar is one scheme. Bars
  begin at 0.
- An SVG needs nothing else: no font, script or link, so it opens anywhere and always looks the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from sublet.core.errors import BadInput

WIDTH, NAMES, BAR, GAP = 760, 190, 18, 6
EIGHTHS = " ▏▎▍▌▋▊▉█"
COLOURS = ("#2f6f9f", "#9db8c9")  # ours, others


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotPanel:
    title: str
    unit: str = ""
    bars: tuple[tuple[str, float], ...]  # name and value
    digits: int = 0

    def said(self, value: float) -> str:
        return f"{value:,.{self.digits}f}{self.unit}"


def as_text(panels: Sequence[PlotPanel], width: int = 40) -> str:
    lines: list[str] = []
    for panel in panels:
        most = max((v for _, v in panel.bars), default=0) or 1
        name_width = max(len(name) for name, _ in panel.bars)
        lines.append(panel.title)
        for name, value in panel.bars:
            eighths = round(width * 8 * max(0.0, value) / most)
            bar = EIGHTHS[8] * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else "")
            lines.append(f"  {name.ljust(name_width)}  {bar} {panel.said(value)}")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def as_svg(title: str, panels: Sequence[PlotPanel]) -> str:
    y = 34
    parts: list[str] = []
    for panel in panels:
        most = max((v for _, v in panel.bars), default=0) or 1
        y += 26
        parts.append(f'<text x="12" y="{y}" font-weight="bold">{escape(panel.title)}</text>')
        y += 8
        for name, value in panel.bars:
            length = (WIDTH - NAMES - 130) * max(0.0, value) / most
            colour = COLOURS[0 if name.startswith(("ours", "every=auto")) else 1]
            middle = y + BAR - 5
            parts.append(f'<text x="{NAMES - 8}" y="{middle}" text-anchor="end">{escape(name)}</text>')
            parts.append(f'<rect x="{NAMES}" y="{y}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>')
            parts.append(
                f'<text x="{NAMES + length + 6:.1f}" y="{middle}">{escape(panel.said(value))}</text>'
            )
            y += BAR + GAP
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 14}" '
        f'font-family="sans-serif" font-size="13">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n'
        f'<text x="12" y="24" font-size="16" font-weight="bold">{escape(title)}</text>\n{body}\n</svg>\n'
    )


def write(path: Path, title: str, panels: Sequence[PlotPanel]) -> None:
    kind = path.suffix.lower()
    if kind not in (".svg", ".png"):
        raise BadInput(f"a plot is written to a file that ends in .svg or .png, not {path.name!r}")
    try:
        if kind == ".svg":
            path.write_text(as_svg(title, panels), encoding="utf-8")
        else:
            _png(path, title, panels)
    except OSError as e:
        raise BadInput(f"the plot {path} cannot be written: {e.strerror}") from e


def _png(path: Path, title: str, panels: Sequence[PlotPanel]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise BadInput(
            "a PNG needs matplotlib, which is not installed", remedy="pip install matplotlib, or write .svg"
        ) from e
    figure = Figure(figsize=(8, 0.9 + sum(0.5 + 0.28 * len(p.bars) for p in panels)), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False)
    figure.suptitle(title)
    for panel, axis in zip(panels, axes[:, 0], strict=True):
        names = [name for name, _ in panel.bars]
        shown = axis.barh(range(len(names)), [v for _, v in panel.bars], color=COLOURS[0])
        axis.bar_label(shown, [panel.said(v) for _, v in panel.bars], padding=3)
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.set_title(panel.title, loc="left")
        axis.margins(x=0.15)
    figure.savefig(path, dpi=120)
