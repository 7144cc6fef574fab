"""kill -9 at the n-th system call of each verb of the embedded ledger, or an error from it, by strace: done or not done, never half (S1, L1, S6).

Every call that changes a file or takes a lock is a place to die. Afterwards another process finds the verb done or not done, and does it again: then
it was done once, every sum is right, and the journal verifies. A spread sample here, all of them in `make proof` (`SUBLET_KILLS=all`).
"""

from __future__ import annotations

import base64
import itertools
import os
import pickle
import random
import signal
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sublet.core.errors import SubletError
from sublet.core.leasing.lease import Holder
from sublet.core.queues.items import QueueTerms
from sublet.ledger.engines.sqlite.engine import open_ledger
from sublet.testing.clock import VirtualClock
from tests.in_memory import in_memory
from tests.ledger.engines.postgres.test_cuts import VERBS, Case, sums_are_right
from tests.ledger.rig import HERE, Rig, sqlite_rig
from tests.seeds import SEED
from tests.traced import Programs, places_of

KILLS = os.environ.get("SUBLET_KILLS", "2")
CALLS = "write,pwrite64,ftruncate,fsync,fdatasync,unlink,unlinkat,flock,fcntl"
#: A lock that is refused is waited for; only what is written may fail.
WRITES = ("write", "pwrite64", "ftruncate", "fsync", "fdatasync")
ERRORS = ("EIO", "ENOSPC")
#: Whoever does these again says so with another outcome: revoking and giving back twice are two acts, a tenant is there already.
AGAIN = [name for name in VERBS if name not in ("revoke", "give back", "add tenant")]

pytestmark = pytest.mark.timeout(900 if KILLS == "all" else 180)

PROGRAM = """
import base64, pickle
from tests.ledger.test_killed_at_a_call import done

def program(url, verb, name, consumer, had):
    begin_with = lambda ledger: (ledger.now(), begin())
    answer = done(url, verb, name, consumer, pickle.loads(base64.b64decode(had)), begin_with)
    say(answered=base64.b64encode(pickle.dumps(answer)).decode())
"""


def done(url: str, verb: str, name: str, consumer: Any, had: Any, first: Any = lambda ledger: None) -> Any:
    """In a process of its own: the verb, by a ledger that was just opened."""
    ledger = open_ledger(url, VirtualClock())
    case = Case.__new__(Case)
    case.ledger, case.name = ledger, name
    case.line = SimpleNamespace(consumer=consumer)  # type: ignore[assignment]
    first(ledger)
    return VERBS[verb].run(case, had)


class Bench:
    """One ledger, and what the cases of `test_postgres_cuts` want of their line to it."""

    def __init__(self, rig: Rig, programs: Programs) -> None:
        self.rig, self.ledger, self.programs = rig, rig.ledger, programs
        rig.tenant("ada")
        rig.devices({"gpu0": 1_000_000, "gpu1": 1_000_000})
        self.queue = rig.ledger.open_queue("ada", "images", QueueTerms()).id
        self.consumer = rig.ledger.open_consumer(self.queue, Holder(host=HERE, pid=1, started=1))
        self.batches = itertools.count(1)

    def told(self, kind: str, subject: str) -> int:
        [(count,)] = self.rig.sql(
            "SELECT count(*) FROM journal WHERE kind = ? AND subject = ?", kind, subject
        )
        return int(count)

    def run(self, verb: str, inject: str) -> tuple[list[dict[str, Any]], dict[str, int]]:
        """A new case of the verb, in a process that is traced. Whatever became of it, afterwards it was done once."""
        case = Case(self)  # type: ignore[arg-type]
        had = VERBS[verb].begin(case)
        order = {
            "url": self.rig.url,
            "verb": verb,
            "name": case.name,
            "consumer": self.consumer,
            "had": base64.b64encode(pickle.dumps(had)).decode(),
        }
        _, said, often = self.programs.run(order, inject)
        where = f"{verb}, {inject or 'undisturbed'} (seed {SEED}): {said}"
        answered = next((s["answered"] for s in said if "answered" in s), "")
        if answered:
            assert VERBS[verb].once(case, pickle.loads(base64.b64decode(answered))), where
        assert self.rig.faults() == [], where
        assert sums_are_right(self.rig), where
        if (
            verb == "pull"
        ):  # whoever pulls again gets others; these are out, or to be had, and not one of each
            assert {i[0] for i in case.items()} in ({"leased"}, {"ready"}), where
            return said, often
        again = VERBS[verb].run(case, had)
        assert VERBS[verb].once(case, again), f"{where}, then {again}"
        assert sums_are_right(self.rig), where
        return said, often


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with in_memory() as folder:
        rig = sqlite_rig(folder)
        programs = Programs(PROGRAM, CALLS, folder / "calls")
        yield Bench(rig, programs)
        programs.close()
        rig.close()


def places_in(bench: Bench, verb: str, least: int, calls: tuple[str, ...] = ()) -> list[tuple[str, int]]:
    said, often = bench.run(verb, "")
    assert "answered" in said[0], said
    assert {"pwrite64", "flock"} <= often.keys(), often
    places = [place for place in places_of(often) if not calls or place[0] in calls]
    if KILLS != "all":
        places = sorted(random.Random(SEED).sample(places, min(least, len(places))))
    return places


@pytest.mark.parametrize("verb", AGAIN)
def test_a_verb_killed_at_the_nth_call(bench: Bench, verb: str) -> None:
    places = places_in(bench, verb, int(KILLS) if KILLS != "all" else 0)
    outcomes: Counter[str] = Counter()
    for call, n in places:
        said, _ = bench.run(verb, f"{call}:signal=KILL:when={n}")
        outcomes["killed" if said[-1]["ended"] == signal.SIGKILL else "answered"] += 1
    assert outcomes["killed"] >= 0.6 * len(places), f"{outcomes} of {len(places)}"
    print(f"{verb}: {len(places)} places, {dict(outcomes)}")


@pytest.mark.parametrize("verb", AGAIN)
@pytest.mark.parametrize("error", ERRORS if KILLS == "all" else ERRORS[:1])
def test_the_nth_write_of_a_verb_fails(bench: Bench, verb: str, error: str) -> None:
    places = places_in(bench, verb, 1, WRITES)
    outcomes: Counter[str] = Counter()
    for call, n in places:
        said, _ = bench.run(verb, f"{call}:error={error}:when={n}")
        failed = next((s for s in said if "failed" in s), {"failed": "answered"})
        outcomes[failed["failed"]] += 1
        known = [c.__name__ for c in _subclasses(SubletError)]
        assert failed["failed"] in (*known, "answered"), f"{verb}, {error} at {call} {n}: {failed}"
    print(f"{verb} {error}: {len(places)} places, {dict(outcomes)}")


def _subclasses(of: type) -> list[type]:
    return [of, *(found for one in of.__subclasses__() for found in _subclasses(one))]
