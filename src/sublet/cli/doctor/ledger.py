"""`sublet doctor` on the ledger: does it answer, which one is it, how far is it, may this user write, do the
clocks agree.

Rules of this file:
- A ledger is proven by using it: it is read, and written through to its disk. What fails is said with the
  error's own remedy.
- Leases live by the ledger's clock, so a machine whose clock is wrong works; what people read on it is then
  odd, and a certificate or a bucket's signature may be refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from sublet.cli.doctor.checks import Check, fail, failed, median_ms, ok, warn
from sublet.core.errors import SubletError
from sublet.ports.ledger import Ledger
from sublet.settings import Settings
from sublet.wiring import CLOCK, open_ledger

#: Above this, users notice every grant, renewal and step.
FAR_MS = 25.0
SKEW_US = 5_000_000


def check_ledger(settings: Settings) -> Iterator[Check]:
    """The last checks are about its content. Nothing is checked after the first failure."""
    try:
        ledger = open_ledger(settings)
        described = ledger.describe()
        yield ok("ledger", ", ".join(f"{k} {v}" if k != "engine" else v for k, v in described.items()))
        yield _latency("ledger read", median_ms(ledger.now), settings)
        yield _latency("ledger to disk", median_ms(ledger.prove_write), settings)
        yield _clock(ledger)
        result = ledger.verify()
        seen = f"{result.rows} rows, {len(result.faults)} fault(s)"
        yield (
            fail("journal", seen, "run 'sublet journal verify' and read the guarantees before you go on")
            if result.faults
            else ok("journal", seen)
        )
    except SubletError as e:
        yield failed("ledger", e)


def _latency(part: str, ms: float, settings: Settings) -> Check:
    far = ms > FAR_MS and not settings["ledger"].startswith("sqlite:")
    if far:
        return warn(
            part,
            f"{ms:.2f} ms: every lease and every step waits this long",
            "keep the machines and the PostgreSQL server in one region, and no proxy that opens a "
            "connection each time between them",
        )
    return ok(part, f"{ms:.2f} ms")


def _clock(ledger: Ledger) -> Check:
    """Compare with the middle of the question, because the round trip is no difference of clocks."""
    before = CLOCK.wall_us()
    there = ledger.now()
    skew = there - (before + CLOCK.wall_us()) // 2
    seen = f"the ledger's clock is {skew / 1e6:+.3f} s from this machine's"
    if abs(skew) <= SKEW_US:
        return ok("clock", seen)
    return warn(
        "clock",
        f"{seen}; harmless for leases, odd to read",
        "let both follow the same time service (timedatectl shows whether this one does)",
    )
