"""The options of `%%gpu` and `%gpu`: a line in, checked options out.

Rules of this file:
- A wrong option is reported at once, with what would be right, before anything is leased.
"""

from __future__ import annotations

import argparse
import functools
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from sublet.core.errors import BadInput
from sublet.core.leasing.lease import MAX_TTL_US, MIN_TTL_US, parse_tier
from sublet.core.leasing.options import DEFAULT_TTL, DEFAULT_VRAM, GpuOptions
from sublet.core.scheduling.device import parse_exclusivity
from sublet.core.values import format_duration, parse_duration, parse_size, parse_size_range

VERBS = ("status", "cost", "release", "quota", "history", "restore")

CELL_HELP = """Run this cell on a leased GPU:  %%gpu [options]

  --vram 8GB         per device; a range such as 8GB..16GB takes what is free (1GiB)
  --ttl 5m           how long the GPU stays warm after the last cell (5m)
  --tier TIER        interactive, batch or spot (interactive)
  --count 2          devices, all or none (1)
  --keep model,step  saved after the cell and regularly during it; a rerun after a loss goes on from there
  --every 30s        how often during the cell (30s)
  --in a,b           exactly these variables go along (those the cell reads); they do not come back
  --out c            exactly these come back (those the cell binds or changes)
  --wait 2m          how long to queue; 0: now or never (as long as it takes)
  --least 4GB        take a smaller slice, down to this, rather than wait
  --exclusivity E    shared, session or device (shared)
  --tenant NAME      who it is for
  --release          give the GPU back at the end of this cell

Example:  %%gpu --vram 8GB --ttl 5m --keep model,optim"""

LINE_HELP = """Look after this notebook's GPU:  %gpu [status|cost|release|quota|history|restore [JOB]]

  status    the lease, the time left, what is kept (also plain %gpu)
  cost      every cell's line, and the total the ledger has
  release   give the GPU back now
  quota     what the tenant may use, and uses
  history   the leases of this notebook, and why each ended
  restore   put what was kept back into the notebook's variables; JOB: of another notebook or kernel"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOptions:
    """The checked options of a `%%gpu` line."""

    gpu: GpuOptions = field(default_factory=GpuOptions)
    warm_us: int | None = None  # the ttl, if the line says one: it counts for a warm lease too
    takes: tuple[str, ...] | None = None  # --in
    gives: tuple[str, ...] | None = None  # --out
    keep: tuple[str, ...] = ()
    every_us: int = 30_000_000
    release: bool = False

    @property
    def by_name(self) -> bool:
        """Whether exactly the named variables travel."""
        return self.takes is not None or self.gives is not None

    @property
    def place(self) -> tuple[object, ...]:
        """The properties a warm lease must have to serve this cell."""
        return (self.gpu.vram, self.gpu.tier, self.gpu.count, self.gpu.exclusivity, self.gpu.tenant)


class BadOption(BadInput):
    """The options of %%gpu or %gpu are wrong; nothing was run."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadOption(f"%%gpu: {message}", remedy="%%gpu --help lists the options")


def _names(texts: Iterable[str]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in ",".join(texts).split(",") if part.strip()))
    for name in names:
        if not name.isidentifier():
            raise BadOption(
                f"{name[:40]!r} is not the name of a variable", remedy="write for example --keep model,optim"
            )
    return names


@functools.cache  # to make one takes longer than the rest of a cell
def _parser() -> _Parser:
    parser = _Parser(prog="%%gpu", add_help=False, allow_abbrev=False)
    parser.add_argument("--vram", default=DEFAULT_VRAM)
    parser.add_argument("--ttl", default=None)
    parser.add_argument("--tier", default="interactive")
    parser.add_argument("--count", "--gpus", type=int, default=1)
    # Repeated options add up, so that no name that must be kept is dropped silently.
    parser.add_argument("--keep", action="append", default=None)
    parser.add_argument("--every", default="30s")
    parser.add_argument("--in", dest="takes", action="append", default=None)
    parser.add_argument("--out", dest="gives", action="append", default=None)
    parser.add_argument("--wait", default="")
    parser.add_argument("--least", default="")
    parser.add_argument("--exclusivity", default="shared")
    parser.add_argument("--tenant", default="")
    parser.add_argument("--release", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    return parser


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as e:
        raise BadOption(f"%%gpu: {e}: {line[:80]!r}", remedy="close the quote") from None


def parse_cell(line: str) -> CellOptions | None:
    """The parsed options, or None when the help was requested."""
    try:
        return _parsed(line)
    except BadOption:
        raise
    except BadInput as e:
        raise BadOption(e.message, remedy=e.remedy) from None


def _parsed(line: str) -> CellOptions | None:
    found: Any = _parser().parse_args(_split(line))
    if found.help:
        return None
    parse_size_range(found.vram, what="--vram")
    warm_us = None if found.ttl is None else parse_duration(found.ttl, what="--ttl")
    if warm_us is not None and not MIN_TTL_US <= warm_us <= MAX_TTL_US:
        raise BadOption(
            f"--ttl {found.ttl} is out of range: use {format_duration(MIN_TTL_US)} to "
            f"{format_duration(MAX_TTL_US)}",
            remedy="to give the GPU back at the end of the cell write --release",
        )
    parse_tier(found.tier)
    parse_exclusivity(found.exclusivity)
    if found.least:
        parse_size(found.least, what="--least")
    if found.wait:
        parse_duration(found.wait, what="--wait")
    if found.count < 1:
        raise BadOption(f"--count {found.count} must be at least 1")
    return CellOptions(
        gpu=GpuOptions(
            vram=found.vram,
            ttl=found.ttl or DEFAULT_TTL,
            tier=found.tier,
            count=found.count,
            exclusivity=found.exclusivity,
            tenant=found.tenant or None,
            wait=found.wait or None,
            least=found.least or None,
        ),
        warm_us=warm_us,
        takes=None if found.takes is None else _names(found.takes),
        gives=None if found.gives is None else _names(found.gives),
        keep=_names(found.keep or ()),
        every_us=parse_duration(found.every, what="--every"),
        release=found.release,
    )


def parse_line(line: str) -> tuple[str, list[str]]:
    """The verb and its arguments."""
    words = _split(line)
    verb = words[0] if words else "status"
    if verb in ("-h", "--help", "help"):
        return "help", []
    if verb not in VERBS:
        raise BadOption(
            f"%gpu {verb[:40]!r} is unknown",
            remedy=f"use one of {', '.join(VERBS)}; to run a cell write %%gpu",
        )
    rest = words[1:]
    if rest and (verb != "restore" or len(rest) > 1):
        raise BadOption(f"%gpu {verb} takes nothing more: {' '.join(rest)[:60]!r}")
    return verb, rest
