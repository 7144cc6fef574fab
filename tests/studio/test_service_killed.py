"""The service killed with -9 under load: sessions, waitlist and meters are right after each start, and no
call is lost or run twice.

`SUBLET_SERVICE_KILLS` says how often; `make proof` says fifty.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sublet.core.leasing.lease import LeaseState
from tests.homes import wait_until
from tests.studio.conftest import HostedSessions
from tests.studio.served import Caller, Served, token_for

KILLS = int(os.environ.get("SUBLET_SERVICE_KILLS", "3"))


@pytest.fixture
def served(hosted: HostedSessions) -> Iterator[Served]:
    made = Served(hosted.home.environment, options=("--rate", "0", "--address-rate", "0"))
    made.start()
    yield made
    if made.process is not None and made.process.poll() is None:
        made.kill()


class User(threading.Thread):
    """Counts in its session, one call after another; a call that was cut is sent again under its id."""

    def __init__(self, port: int, token: str, session: str, over: threading.Event) -> None:
        super().__init__(daemon=True)
        self._caller = Caller(port, token)
        self._session, self._over = session, over
        self.counted: list[int] = []
        self.wrong: list[Any] = []

    def run(self) -> None:
        path = f"/v1/sessions/{self._session}"
        while not self._over.is_set():
            body = {
                "code": "n = globals().get('n', 0) + 1\nimport time; time.sleep(0.005)\nprint(n)",
                "call": secrets.token_hex(8),
            }
            lines = self._heard(f"{path}/run", body)
            # A line may come in two pieces: what is printed is sent every so often.
            told = "".join(line["text"] for line in lines if line["kind"] == "text").removesuffix("\n")
            if lines and lines[-1]["kind"] == "done" and told.isdecimal():
                self.counted.append(int(told))
            else:
                self.wrong.append(lines)
            self._caller.until_answered("POST", f"{path}/touch")

    def _heard(self, path: str, body: dict[str, str]) -> list[dict[str, Any]]:
        """Until its last line came: a stream may be cut after its first."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            status, lines = self._caller.until_answered("POST", path, body)
            if status != 200:
                self.wrong.append((status, lines))
                return []
            if lines and lines[-1]["kind"] in ("done", "failed"):
                return lines
        return []


def test_sessions_waitlist_and_meters_outlive_the_service(hosted: HostedSessions, served: Served) -> None:
    """K3, T4."""
    tokens = {name: token_for(hosted.ledger, name) for name in ("ann", "bea", "cem", "dee", "eli")}
    callers = {name: Caller(served.port, token) for name, token in tokens.items()}

    def opened(name: str, vram: str) -> str:
        status, found = callers[name].ask("POST", "/v1/sessions", {"vram": vram, "ttl": "30m"})
        assert status == 201, found
        return str(found["id"])

    active = {name: opened(name, "4GiB") for name in ("ann", "bea", "cem")}
    for name, session in active.items():
        hosted.becomes("active", session, name)
    waiting = {name: opened(name, "16GiB") for name in ("dee", "eli")}
    for name, session in waiting.items():
        hosted.becomes("waiting", session, name)
    before = {s: hosted.look(s, n).lease for n, s in (active | waiting).items()}
    over = threading.Event()
    users = [User(served.port, tokens[name], session, over) for name, session in active.items()]
    for user in users:
        user.start()
    used: dict[str, int] = {}
    for _ in range(KILLS):
        time.sleep(0.15)
        served.kill()
        served.start()
        for name, session in (active | waiting).items():
            status, found = callers[name].until_answered("GET", f"/v1/sessions/{session}")
            assert status == 200
            lease = before[session]
            assert lease is not None
            assert found["lease_id"] == lease.id
            assert found["status"] == ("active" if name in active else "waiting")
        for usage in hosted.ledger.session_usage():
            assert usage.gpu_us >= used.get(usage.session_id, 0)
            used[usage.session_id] = usage.gpu_us
    over.set()
    for user in users:
        user.join(60)
        assert not user.is_alive()
        assert user.wrong == []
        # Each call once, in order: none lost, none run twice.
        assert user.counted == list(range(1, len(user.counted) + 1))
        assert user.counted
    places = [x.lease.id for x in reversed(hosted.ledger.leases()) if x.lease.state is LeaseState.WAITING]
    joined = {x.lease.id: x.lease.joined_at for x in hosted.ledger.leases()}
    for session in waiting.values():
        lease = before[session]
        assert lease is not None
        assert joined[lease.id] == lease.joined_at
        assert lease.id in places
    for name, session in active.items():
        assert callers[name].until_answered("DELETE", f"/v1/sessions/{session}")[0] == 200
    hosted.becomes("active", waiting["dee"], "dee")
    _meters_are_right(hosted, before, active)


def _meters_are_right(hosted: HostedSessions, before: dict[str, Any], active: dict[str, str]) -> None:
    """What a session used is what its leases used, to the microsecond."""
    ended = [before[session].id for session in active.values()]
    wait_until(lambda: all(hosted.ledger.look(i).lease.state is LeaseState.ENDED for i in ended))
    by_lease = {u.lease_id: u.gpu_us for u in hosted.ledger.usage()}
    by_session = {u.session_id: u.gpu_us for u in hosted.ledger.session_usage()}
    for session in active.values():
        lease = hosted.ledger.look(before[session].id).lease
        assert by_session[session] == by_lease[lease.id] == lease.ended_at - lease.granted_at
