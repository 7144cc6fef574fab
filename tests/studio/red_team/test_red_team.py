"""I1 and I2: attacks of a tenant on its neighbour, on the service and on the machine, in each set-up that this
machine can make.

Where a second tenant is let in, none may succeed; where it is refused, that is what keeps it out, and it still
has HTTP. An attack counts only if it succeeds where nothing is in its way: each is also run without the
boundary, in the same run. `make proof` sets SUBLET_RED_TEAM for all set-ups and for what takes long; else it is
one set-up, without bombs.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import sublet
from sublet.core.errors import NotIsolated
from tests.conftest import need
from tests.studio.red_team import files, network, processes
from tests.studio.red_team.over_http import HTTP_ATTACKS, INTRUDER, NEIGHBOUR, OPERATOR, ask
from tests.studio.red_team.registry import ATTACKS
from tests.studio.red_team.stage import LimitedService, Screen, belongings, sent, service, without_a_boundary

IS_WHOLE = "SUBLET_RED_TEAM" in os.environ
_TESTS = Path(__file__).parents[2]
_PLAIN_UID, _MANIFEST_UID = 54_400, 10_001
_SYS_RESOURCE = 24
assert files
assert network
assert processes


@dataclass(frozen=True)
class SetUp:
    name: str
    starts: tuple[str, ...]
    uid: int  # of the service, where root makes it
    admits_two: bool


_AS_USER, _AS_MANIFEST = (str(_TESTS / "processes" / name) for name in ("as_user.py", "as_manifest.py"))
SET_UPS = (
    SetUp("root with namespaces", (), 0, True),
    SetUp("root without namespaces", (_AS_MANIFEST,), 0, False),
    SetUp("a user with namespaces", (_AS_USER, str(_PLAIN_UID)), _PLAIN_UID, False),
    SetUp(
        "uid 10001 under the manifests' seccomp",
        (_AS_USER, str(_MANIFEST_UID), _AS_MANIFEST),
        _MANIFEST_UID,
        False,
    ),
)
TRIED = SET_UPS if IS_WHOLE else SET_UPS[:1]
IN_SESSION = tuple(name for name, attack in ATTACKS.items() if IS_WHOLE or not attack.is_bomb)


class Tally:
    """What came of each attack, printed as it is found."""

    def __init__(self) -> None:
        self.succeeded: dict[str, str] = {}
        self.unproven: list[str] = []
        self.held = 0

    def add(self, name: str, got: str, control: str) -> None:
        if got:
            self.succeeded[name] = got
        elif not control:
            self.unproven.append(name)
        else:
            self.held += 1


def _may_set(capability: int) -> bool:
    lines = Path("/proc/self/status").read_text().splitlines()
    effective = next(line.split()[1] for line in lines if line.startswith("CapEff"))
    return bool(int(effective, 16) >> capability & 1)


def known_to_succeed() -> set[str]:
    """What the page about tenants says is not separated on a machine like this one."""
    return set() if _may_set(_SYS_RESOURCE) else {"as late as the service"}


def opened(studio: sublet.Studio, **wishes: Any) -> sublet.Session | None:
    """None where it is refused, in words."""
    try:
        return studio.session(vram="64MiB", **wishes).wait_until_active()
    except NotIsolated:
        return None


@pytest.mark.parametrize("set_up", TRIED, ids=lambda s: s.name)
def test_no_attack_of_a_second_tenant_succeeds(set_up: SetUp, capsys: pytest.CaptureFixture[str]) -> None:
    need(os.getuid() == 0, "root")
    with ExitStack() as stack:
        made = stack.enter_context(service([sys.executable, *set_up.starts], set_up.uid))
        made.serve()
        separates = bool(made.ask("/readyz")["isolation"]["separates"])
        if set_up.admits_two:
            need(separates, "what keeps tenants apart")
        assert separates is set_up.admits_two
        studios = {name: stack.enter_context(made.studio(name)) for name in (NEIGHBOUR, INTRUDER)}
        screen = Screen(capsys)
        neighbour = opened(studios[NEIGHBOUR], checkpoint="kept-by-the-neighbour")
        tally = Tally()
        inside = "refused admission"
        if neighbour is not None and separates:
            facts = stack.enter_context(belongings(made, neighbour, screen))
            intruder = opened(studios[INTRUDER])
            assert intruder is not None
            _attack_from_inside(facts, intruder, neighbour, screen, tally)
            inside = f"{tally.held} attacks from inside held"
        elif neighbour is not None:
            assert opened(studios[INTRUDER]) is None
        before = tally.held
        _attack_over_http(made, neighbour, studios, tally)
        _use_a_name_again(made, tally)
        if neighbour is not None:
            # Its session was ended by its owner, as the last control.
            assert ask(made.port, "GET", "/healthz").fine
    with capsys.disabled():
        print(
            f"\n{set_up.name}: {inside}, {tally.held - before} over HTTP held; "
            f"succeeded: {', '.join(f'{k} ({v})' for k, v in tally.succeeded.items()) or 'none'}"
        )
        print(f"{tally.held} attacks held")
    assert set(tally.succeeded) <= known_to_succeed(), tally.succeeded
    assert tally.unproven == [], "these judges were not shown to see a success: " + str(tally.unproven)


def _attack_from_inside(
    facts: Mapping[str, Any],
    intruder: sublet.Session,
    neighbour: sublet.Session,
    screen: Screen,
    tally: Tally,
) -> None:
    got = json.loads(screen.of(intruder, sent(IN_SESSION, facts)))
    of_service = {"held_by": f"/proc/{facts['victim']}/fd", "first": facts["victim"]}
    shown = without_a_boundary(IN_SESSION, {**facts, **of_service}, _PLAIN_UID - 1)
    by_neighbour = [name for name in IN_SESSION if ATTACKS[name].control == "neighbour"]
    shown |= json.loads(screen.of(neighbour, sent(by_neighbour, facts)))
    for name in IN_SESSION:
        tally.add(name, got[name], shown[name])
    for session in (neighbour, intruder):
        assert screen.of(session, "print(6 * 7)") == "42"


def _attack_over_http(
    made: LimitedService,
    neighbour: sublet.Session | None,
    studios: Mapping[str, sublet.Studio],
    tally: Tally,
) -> None:
    made.sublet("tenant", "add", OPERATOR)
    tokens = {
        "neighbour": made.tokens[NEIGHBOUR],
        "operator": made.token(OPERATOR, "--scope", "operator"),
    }
    facts = {
        "port": made.port,
        "tenant": NEIGHBOUR,
        "own": INTRUDER,
        "token": tokens["neighbour"],
        "n": secrets.token_hex(10),
        "device": json.loads(ask(made.port, "GET", "/v1/devices", tokens["operator"]).body)["devices"][0][
            "id"
        ],
        **_of_session(made, neighbour),
    }
    wanted = [attack for attack in HTTP_ATTACKS if neighbour is not None or not attack.needs_session]
    got = {attack.name: attack.tried(facts, made.tokens[INTRUDER]) for attack in wanted}
    for attack in wanted:
        shown = attack.tried(facts, tokens[attack.owner], as_owner=True)
        opens = attack.path == "/v1/sessions" and attack.method == "POST"
        # Where nobody may have a session, its owner is refused too: that judge is shown elsewhere.
        tally.add(
            attack.name, got[attack.name], shown or ("elsewhere" if opens and neighbour is None else "")
        )


def _of_session(made: LimitedService, neighbour: sublet.Session | None) -> dict[str, str]:
    if neighbour is None:
        return {"session": "none", "lease": "none", "checkpoint": "none", "call": "none", "output": "none"}
    neighbour.save({"kept": 1})
    call, output = secrets.token_hex(8), f"said-{secrets.token_hex(4)}"
    run = {"code": f"print({output!r})", "call": call}
    path = f"/v1/sessions/{neighbour.id}/run"
    assert output in ask(made.port, "POST", path, made.tokens[NEIGHBOUR], run).body
    lease = str(neighbour.lease_id)
    return {
        "session": neighbour.id,
        "lease": lease,
        "checkpoint": "kept-by-the-neighbour",
        "call": call,
        "output": output,
    }


def _use_a_name_again(made: LimitedService, tally: Tally) -> None:
    made.sublet("tenant", "add", "red-leaver")
    token = made.token("red-leaver")
    shown = ask(made.port, "GET", "/v1/me", token)
    made.sublet("tenant", "rm", "red-leaver")
    got = ask(made.port, "GET", "/v1/me", token)
    tally.add("token of who left", got.body if got.fine else "", shown.body if shown.fine else "")
    again, other = (_added(made, name) for name in ("red-leaver", "red-newcomer"))
    tally.add("name used again", again, other)


def _added(made: LimitedService, name: str) -> str:
    done = subprocess.run(
        [*made.prefix, "-m", "sublet", "tenant", "add", name],
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
        env=made.environment,
    )
    return f"added {name}" if done.returncode == 0 else ""


def test_there_are_enough_attacks_and_each_has_a_sentence_of_its_own() -> None:
    sentences = [attack.sentence for attack in (*ATTACKS.values(), *HTTP_ATTACKS)]
    assert len(sentences) >= 60
    assert len(set(sentences)) == len(sentences)
    names = [*ATTACKS, *(attack.name for attack in HTTP_ATTACKS)]
    assert len(set(names)) == len(names)
