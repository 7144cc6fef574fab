"""Fault mixes: how often which thing happens in a world.

Rules of this file:
- A swarm: each world draws which kinds of fault it has at all and how often. Faults that hide each other meet alone somewhere.
- Rates are per message (network), per replica and save (disks), or per event (everything else).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

#: A share of worlds is calm in each respect, so that no fault is everywhere.
CALM = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    tempo: int = 30  # how long a "second" of the workload is, in seconds
    hosts: int = 2
    on_one_machine: bool = (
        False  # ledger, wardens and holders lose power together; else the ledger is a server of its own
    )
    lost: float = 0.0  # a request is lost on its way
    unheard: float = 0.0  # it was done, and its answer is lost
    broken: float = 0.0  # the connection breaks in the middle of the transaction
    lag: float = 0.0  # a message takes long
    kill: float = 0.0  # kill -9 of a holder
    pause: float = 0.0  # a holder or warden stops, for longer than its ttl
    warden_dies: float = 0.0
    ledger_dies: float = 0.0  # with what it had not synced
    partition: float = 0.0  # a host cannot reach the ledger for a while
    restore: float = 0.0  # a backup is put back
    replica: float = 0.0  # a replica misbehaves during a save or load
    damage: float = 0.0  # a stored file is damaged
    clocks: float = 0.0  # how far holders' clocks run fast or slow
    wall_steps: float = 0.0
    operator: float = 0.03  # somebody revokes, quarantines, changes quotas
    unproven: float = 0.0  # a teardown that cannot be proven

    @property
    def server_crashes(self) -> bool:
        return self.ledger_dies > 0 and not self.on_one_machine


def draw(chance: random.Random) -> Mix:
    def rate(most: float) -> float:
        """Zero for some worlds, else anything up to the most, small ones as often as large ones."""
        calm, size = chance.random(), chance.random()
        return 0.0 if calm < CALM else most * 10 ** (-size)

    restore = rate(0.002)
    return Mix(
        tempo=chance.choice([5, 30, 120, 600]),
        hosts=chance.choice([1, 2, 3]),
        on_one_machine=chance.random() < 0.4,
        lost=rate(0.4),
        unheard=rate(0.4),
        broken=rate(0.4),
        lag=rate(0.3),
        kill=rate(0.05),
        pause=rate(0.05),
        warden_dies=rate(0.02),
        ledger_dies=rate(0.002),
        partition=rate(0.01),
        restore=restore,
        replica=rate(0.9),
        damage=rate(0.2),
        clocks=rate(0.15),
        # After a restore the calendar is what keeps epochs rising: see ledger/verbs/leasing/after_restore.py.
        wall_steps=0.0 if restore else rate(0.01),
        operator=0.01 + rate(0.05),
        unproven=rate(0.1),
    )


def calm(mix: Mix) -> Mix:
    """The same world when faults have stopped."""
    return Mix(tempo=mix.tempo, hosts=mix.hosts, on_one_machine=mix.on_one_machine, operator=0.0)
