"""What a notebook shows of its GPU: the line under a cell, the panel, the cost, the quota.

Rules of this file:
- Every figure is the ledger's, or adds up to the ledger's. Nothing here decides anything.
- The last panel is redrawn when something changes: a cell ran, or the GPU was warned, lost or released.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from sublet.core.billing.meter import of_ended
from sublet.core.cells.costs import CellCost
from sublet.core.errors import SubletError
from sublet.core.leasing.lease import LeaseState
from sublet.core.values import format_duration, format_size, parse_price
from sublet.notebook.cells.keep import KeptValues
from sublet.notebook.cells.notebook_lease import CellOutcome
from sublet.notebook.screen import Frontend, Rendering, countdown, fields, line, table, title
from sublet.notebook.workbench import Workbench
from sublet.ports.held_lease import HeldLease

_MICRO = 1_000_000


class GpuPanel:
    def __init__(self, front: Frontend, bench: Workbench) -> None:
        self._front, self._bench = front, bench
        self._id = ""
        bench.cells.on_change = self.draw_anew

    # under a cell

    def under_cell(self, ran: CellOutcome) -> None:
        if ran.line is not None:
            self._say(line(self._figures(ran.line, ran.before, kept=ran.kept is not None)))
        if ran.stayed:
            self._say(line(_stayed(ran.stayed)))

    def _figures(self, cell: CellCost, before: str, *, kept: bool) -> str:
        account = self._bench.cells.account
        lines = account.lines()
        place = lines.index(cell)
        parts = [
            cell.device,
            format_size(cell.vram_bytes),
            f"{in_seconds([item.gpu_us for item in lines])[place]} GPU-s{_warm(cell)}",
        ]
        if cell.launches:  # of GpuSessions only: what a framework launches by itself is not seen
            parts.append(f"{cell.launches} launches" if cell.launches != 1 else "1 launch")
        if cell.checkpoint_bytes:
            parts.append(f"saved {format_size(cell.checkpoint_bytes)}")
        elif kept:  # nothing was written: the store had all its chunks already
            parts.append("saved")
        price = self._price()
        if price is not None:
            parts.append(f"price {_money(account.prices(price)[place])}")
        if before:
            parts.append(f"a new session: the last one ended ({before})")
        return " · ".join(parts)

    # the verbs of %gpu: magics.py calls the method of that name, or draws what it did itself

    def status(self) -> None:
        """Draws the live panel."""
        if self._front.kind == "terminal":
            self._say(self._status())
            return
        self._id = f"sublet-panel-{secrets.token_hex(4)}"
        self._front.publish(self._status().data, transient={"display_id": self._id})

    def draw_anew(self) -> None:
        if self._id:
            with contextlib.suppress(
                Exception
            ):  # from any thread, at any moment: a panel is not worth an error
                self._front.publish(self._status().data, transient={"display_id": self._id}, update=True)

    def _status(self) -> Rendering:
        if self._bench.runs_in_process():
            return line(
                "This process has its GPU already, or SUBLET_DISABLE is set: %%gpu cells run here, plainly."
            )
        cells = self._bench.cells
        lease = cells.lease
        if lease is None or lease.status == "ended":
            drawn = title("No GPU is leased") + line("The next %%gpu cell takes one.")
        else:
            drawn = self._held(lease)
        about = []
        if cells.kept.last is not None:
            about.append(("kept", _kept(cells.kept.last, cells.kept.job)))
        if cells.only_there:
            about.append(("only in the worker", ", ".join(cells.only_there)))
        spent = cells.account.gpu_us()
        if spent:
            about.append(("so far", f"{_seconds(spent)} GPU-s{self._priced()}"))
        return drawn + fields(about) if about else drawn

    def _held(self, lease: HeldLease) -> Rendering:
        where = f"{format_size(lease.vram_bytes)} on {', '.join(lease.devices)}"
        whose = f"lease {lease.id}, tenant {lease.tenant}"
        if lease.status == "revoking" and lease.notice is not None:
            head = title(f"{where}: going away ({lease.notice.reason})")
            return head + countdown(lease.seconds_left, lease.seconds_left) + line(whose)
        if self._bench.cells.computing:
            return title(f"{where}: computing") + line(f"{whose}, renewed for as long as the cell computes")
        head = title(f"{where}: warm, until nobody has used it for {format_duration(lease.warm_us)}")
        return head + countdown(lease.seconds_to_go, lease.warm_us / _MICRO) + line(whose)

    def cost(self) -> None:
        cells = self._bench.cells
        cells.settle_account()
        lines, price = cells.account.lines(), self._price()
        if not lines:
            self._say(line("Nothing was leased yet."))
            return
        columns = ["cell", "device", "VRAM", "GPU-s", "of it computing", "launches", "saved"]
        held = in_seconds([item.gpu_us for item in lines])
        computed = in_seconds([item.busy_us * item.devices for item in lines])
        rows = [
            [
                f"In [{item.cell}]" if item.cell else "warm",
                item.device,
                format_size(item.vram_bytes),
                held[number],
                computed[number],
                str(item.launches),
                format_size(item.checkpoint_bytes) if item.checkpoint_bytes else "-",
            ]
            for number, item in enumerate(lines)
        ]
        total = [
            "total",
            "",
            "",
            _seconds(cells.account.gpu_us()),
            _seconds(sum(item.busy_us * item.devices for item in lines)),
            str(sum(item.launches for item in lines)),
            format_size(saved) if (saved := sum(item.checkpoint_bytes for item in lines)) else "-",
        ]
        if price is not None:
            columns.append("price")
            for row, part in zip(rows, cells.account.prices(price), strict=True):
                row.append(_money(part))
            total.append(_money(cells.account.price_micro(price)))
        self._say(table(columns, rows, total=total) + line(self._compared()))

    def _compared(self) -> str:
        """Compares the account with the ledger's own usage, lease by lease."""
        cells = self._bench.cells
        ours = theirs = ended = 0
        parts = []
        for lease_id in cells.account.leases():
            try:
                row = self._bench.cells.look(lease_id).lease
            except SubletError:
                return "The ledger cannot be asked now; the lines are its own clock's."
            if cells.account.is_settled(lease_id):
                ours += cells.account.gpu_us(lease_id)
                theirs += of_ended(row).gpu_us
                ended += 1
            elif row.state is LeaseState.ENDED:  # after the lines above were read
                parts.append("A lease ended just now: its last line comes with the next `%gpu cost`.")
            else:
                parts.append("The lease is still open: its time is counted to its last cell.")
        if ours != theirs:  # impossible; if it happens, nobody should find out from a bill
            return (
                f"The lines of ended leases are {_seconds(ours)} GPU-s, the ledger says {_seconds(theirs)}: "
                "tell us."
            )
        if ended:
            parts.insert(
                0,
                f"The lines of ended leases are the ledger's usage, to the microsecond: {_seconds(theirs)} "
                "GPU-s.",
            )
        return " ".join(parts)

    def history(self) -> None:
        rows = []
        for lease_id in self._bench.cells.account.leases():
            try:
                found = self._bench.cells.look(lease_id)
            except SubletError:
                continue
            row = found.lease
            over = row.state is LeaseState.ENDED
            held = (row.ended_at if over else found.at) - row.granted_at
            cells = [str(i.cell) for i in self._bench.cells.account.lines(lease_id) if i.cell]
            why = f"{row.reason.value}: {row.detail}" if over and row.reason else row.state.value
            rows.append(
                [
                    lease_id,
                    ", ".join(s.device_id for s in row.slices),
                    time.strftime("%H:%M:%S", time.localtime(row.granted_at / _MICRO)),
                    format_duration(held),
                    ", ".join(cells) or "-",
                    why,
                ]
            )
        columns = ["lease", "device", "from", "held", "cells", "how it ended"]
        self._say(table(columns, rows) if rows else line("Nothing was leased yet."))

    def quota(self) -> None:
        quota = self._bench.quota()
        leases = f"{quota.live_leases} of {quota.max_leases or 'any number'}"
        most = format_size(quota.max_vram_bytes) if quota.max_vram_bytes else "any amount"
        held = format_size(quota.live_bytes) if quota.live_bytes else "0"
        halves = f" (halves every {format_duration(quota.half_life_us)})" if quota.half_life_us else ""
        pairs = [
            ("tenant", quota.tenant),
            ("leases", leases),
            ("VRAM", f"{held} of {most}"),
            ("waiting", f"{quota.waiting} of {quota.max_waiting or 'any number'}"),
            ("recent GPU time", f"{format_duration(quota.used_us)}{halves}"),
            ("weight", f"{quota.weight}: who used less for its weight is served first"),
        ]
        if quota.per_day_us:
            full = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(quota.full_at / _MICRO))
            pairs.insert(
                3,
                (
                    "GPU time",
                    f"left {format_duration(max(0, quota.left_us))} of {format_duration(quota.per_day_us)} "
                    f"a day, full again at {full}",
                ),
            )
        if quota.cooling_us:
            pairs.append(("cooling down", f"{format_duration(quota.cooling_us)} left"))
        self._say(fields(pairs))

    def released(self, lease: HeldLease | None) -> None:
        self._say(
            line(
                "GPU given back; the notebook's variables stay."
                if lease
                else "There was no GPU to give back."
            )
        )

    def restored(self, names: tuple[str, ...]) -> None:
        self._say(line(f"Restored: {', '.join(names)}"))

    # how

    def _price(self) -> int | None:
        text = self._bench.settings["price"]
        return parse_price(text, what="SUBLET_PRICE") if text else None

    def _priced(self) -> str:
        price = self._price()
        return "" if price is None else f", {_money(self._bench.cells.account.price_micro(price))}"

    def _say(self, drawn: Rendering) -> None:
        if self._front.kind == "terminal":
            self._front.text("stdout", f"{drawn.text}\n")
        else:
            self._front.publish(drawn.data)


def _seconds(us: int) -> str:
    thousandths = (us + 500) // 1000
    return f"{thousandths // 1000}.{thousandths % 1000:03d}"


def in_seconds(parts: Sequence[int]) -> list[str]:
    """Seconds with three decimals, rounded on the running sum, so that the parts add up to the rounded
    sum."""
    sums = [(us + 500) // 1000 * 1000 for us in accumulate(parts, initial=0)]
    return [_seconds(after - before) for before, after in pairwise(sums)]


def _money(micro: int) -> str:
    return f"{micro / _MICRO:.6f}".rstrip("0").rstrip(".") if micro else "0"


def _warm(cell: CellCost) -> str:
    """The part of a cell's time during which the GPU was only kept warm for it."""
    warm = cell.gpu_us - cell.busy_us * cell.devices
    return f" ({_seconds(warm)} warm)" if warm >= 100_000 else ""


def _kept(kept: KeptValues, job: str) -> str:
    when = time.strftime("%H:%M:%S", time.localtime(kept.saved_at))
    return f"{kept.names} at {when}, version {kept.version} of {job}"


def _stayed(stayed: Mapping[str, str]) -> str:
    names = "; ".join(f"{name} ({why[:120]})" for name, why in stayed.items())
    verb = "stays" if len(stayed) == 1 else "stay"
    return f"Cannot come back, and {verb} in the GPU worker for the next %%gpu cells: {names}"
