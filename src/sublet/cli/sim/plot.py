"""`--plot` of `sublet sim …`: a file, or the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from sublet.sim.plots import PlotPanel, as_text, write

TERMINAL = "-"

plot_option = click.option(
    "--plot",
    type=click.Path(path_type=Path),
    help="Also draw it: into a file .svg (or .png, with matplotlib), or '-' for the terminal.",
)


def show_plot(plot: Path | None, title: str, panels: Sequence[PlotPanel], as_json: bool) -> None:
    if plot is None:
        return
    if str(plot) == TERMINAL:
        if not as_json:
            click.echo("")
            click.echo(as_text(panels), nl=False)
        return
    write(plot, title, panels)
    click.echo(f"drawn: {plot}", err=True)
