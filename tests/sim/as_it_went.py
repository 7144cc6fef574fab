"""A replay that is told what real holders did, and how long it took them: when they asked, how long they restored and worked, when they said that
they are idle, how soon they went when they were told to. How the machine was crowded is in all of that. What is left for the replay to say is what
the system decides: who gets a GPU and when, who waits, who is told to go and when and why.

Rules of this file:
- Only what a holder does is told. No instant of a grant or of a revocation is, nor who it was for: a restore is counted from the grant, going
  from being told.
- Times are microseconds after the start of the workload, by the ledger's clock where the ledger wrote a row, else by the holder's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sublet.core.leasing.lease import LeaseRecord
from sublet.sim.engine import IDLE_REPORT_US, Doing, TraceReplay, _SimulatedSession
from sublet.sim.schemes import Scheme
from sublet.sim.workload import Arrival, Workload


class Astray(Exception):
    """The replay has come to something that no holder did: it decided otherwise before."""


@dataclass(slots=True)
class Stay:
    """One lease, as the journal has it."""

    asked_at: int
    granted_at: int = 0
    revoked_at: int | None = None
    ended_at: int = 0
    restored_at: int | None = None  # by its holder


@dataclass(frozen=True, slots=True)
class Run:
    planned_at: int
    woke_at: int
    slept: bool  # it had nothing to do until then
    began_at: int
    ended_at: int
    lease: str


@dataclass(slots=True)
class Session:
    """Everything one tenant did, in order."""

    stays: dict[str, Stay] = field(default_factory=dict)  # by lease
    runs: list[Run] = field(default_factory=list)
    idle_at: list[int] = field(default_factory=list)

    def arrival(self, number: int) -> int:
        """When it came to the ledger, or began on a lease that it had. One that came while its session was busy came as planned."""
        run = self.runs[number]
        if not run.slept:
            return run.planned_at
        asked = [s.asked_at for s in self.stays.values() if run.woke_at <= s.asked_at <= run.began_at]
        return min(asked, default=run.began_at)

    def work_us(self, number: int) -> int:
        """Until it did something else: went, because it was told to, or began with what was waiting behind it."""
        run, stay = self.runs[number], self.stays[self.runs[number].lease]
        if stay.revoked_at is not None and stay.revoked_at <= run.ended_at:
            return stay.ended_at - run.began_at
        behind = self.runs[number + 1] if number + 1 < len(self.runs) else None
        if behind is not None and not behind.slept and behind.lease == run.lease:
            return behind.began_at - run.began_at
        return run.ended_at - run.began_at

    def idle_us(self, number: int) -> int:
        """From the end of a run to the ledger being told that nothing follows."""
        over = self.runs[number].ended_at
        until = self.runs[number + 1].began_at if number + 1 < len(self.runs) else None
        told = [at for at in self.idle_at if over <= at and (until is None or at < until)]
        return min(told) - over if told else IDLE_REPORT_US

    def _stay(self, number: int) -> tuple[str, Stay]:
        """The so-manieth lease, from 1."""
        if number > len(self.stays):
            raise Astray(f"lease number {number} of {len(self.stays)}")
        return list(self.stays.items())[number - 1]

    def restore_us(self, number: int) -> int:
        lease, stay = self._stay(number)
        if not any(run.lease == lease for run in self.runs):  # told meanwhile: it went instead of beginning
            return stay.ended_at - stay.granted_at
        if stay.restored_at is None:
            raise Astray(f"lease {lease} was never restored")
        return stay.restored_at - stay.granted_at

    def leave_us(self, number: int) -> int:
        """From being told, while it rested, to having gone."""
        _, stay = self._stay(number)
        return max(0, stay.ended_at - stay.revoked_at) if stay.revoked_at is not None else 0

    def rest_us(self, number: int, usual_us: int) -> int:
        """How long it kept a GPU that it had no work for, when nobody told it to go."""
        lease, stay = self._stay(number)
        last = max((run.ended_at for run in self.runs if run.lease == lease), default=None)
        return usual_us if last is None or stay.revoked_at is not None else max(0, stay.ended_at - last)


def as_it_arrived(sessions: dict[str, Session]) -> Workload:
    return Workload(
        arrivals=tuple(
            sorted(
                (
                    Arrival(tenant=tenant, at=session.arrival(n), work_us=session.work_us(n))
                    for tenant, session in sessions.items()
                    for n in range(len(session.runs))
                ),
                key=lambda a: (a.at, a.tenant),
            )
        )
    )


class AsItWent(TraceReplay):
    def __init__(self, sessions: dict[str, Session], scheme: Scheme, gpus: int) -> None:
        super().__init__(as_it_arrived(sessions), scheme, gpus=gpus, restore_us=0, teardown_us=0)
        self._went = sessions

    def waits_us(self) -> dict[tuple[str, int], int]:
        """Of each request, by tenant and when it was planned to come, from then on."""
        found: dict[tuple[str, int], int] = {}
        for tenant, session in self._went.items():
            served = [s for s in self.served if s.tenant == tenant]
            for run, one in zip(session.runs, served, strict=True):
                found[(tenant, run.planned_at)] = one.began_at - run.planned_at
        return found

    def _done(self, session: _SimulatedSession) -> int:
        return sum(s.tenant == session.tenant for s in self.served)

    def _arrives(self, arrival: Arrival) -> None:
        session = self.sessions.get(arrival.tenant)
        if session is not None and session.told and session.doing is Doing.RESTING:
            session.backlog.append(arrival)  # told to go, and it has not gone yet: it goes, and asks again
            session.alone_at = self.world.now
            self._gives_back(session)
            return
        super()._arrives(arrival)

    def _got(self, session: _SimulatedSession, lease: LeaseRecord) -> None:
        self._restore_us = self._went[session.tenant].restore_us(session.number)
        super()._got(session, lease)

    def _rests(self, session: _SimulatedSession) -> None:
        went = self._went[session.tenant]
        self._does(session, Doing.RESTING)
        self._later(session, went.idle_us(self._done(session) - 1), self._says_idle)
        assert self._scheme.idle_us is not None
        self._later(session, went.rest_us(session.number, self._scheme.idle_us), self._gives_back)

    def _hears(self, session: _SimulatedSession, lease: LeaseRecord) -> None:
        if session.doing is not Doing.RESTING:
            super()._hears(session, lease)
            return
        session.told = True
        self._later(session, self._went[session.tenant].leave_us(session.number), self._gives_back)
