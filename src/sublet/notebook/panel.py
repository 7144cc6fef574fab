"""What a notebook shows of its GPU: the line under a cell, and the panel.

Rules of this file:
- Every figure is the ledger's. Nothing here decides anything.
"""

from __future__ import annotations

import html

from sublet.core.values import format_size
from sublet.notebook.front import Front
from sublet.notebook.workbench import Workbench
from sublet.runtime.cell import Ran, Wish
from sublet.runtime.holding import Lease


class Panel:
    def __init__(self, front: Front, bench: Workbench) -> None:
        self._front, self._bench = front, bench

    def under_cell(self, wish: Wish, ran: Ran) -> None:
        if ran.line is None:
            return
        line = ran.line
        parts = [
            line.device,
            format_size(line.vram_bytes),
            f"{line.gpu_us / 1e6:.3f} GPU-s",
            f"{line.launches} launches",
        ]
        if line.checkpoint_bytes:
            parts.append(f"saved {format_size(line.checkpoint_bytes)}")
        self._say(" · ".join(parts))

    def released(self, lease: Lease | None) -> None:
        self._say("GPU given back." if lease is not None else "There was no GPU to give back.")

    def restored(self, names: tuple[str, ...]) -> None:
        self._say(f"Restored: {', '.join(names)}")

    def status(self) -> None:
        self._say(repr(self._bench.cells.lease))

    def _say(self, text: str) -> None:
        if self._front.kind == "terminal":
            self._front.text("stdout", f"{text}\n")
            return
        self._front.publish(
            {"text/plain": text, "text/html": f"<small style='opacity:.7'>{html.escape(text)}</small>"}
        )
