"""I2: bombs and floods of one tenant, and its neighbour beside them. What the neighbour asks for is answered
rightly all the while; how long that takes, beside the quiet of the same run, is printed as a ratio.

Processor time is shared, and a machine that runs other tests makes any ratio: it is not asserted. `make proof`
sets SUBLET_RED_TEAM and tries them; what each boundary does to a bomb is in tests/processes/sandbox/test_limits.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from tests.conftest import need
from tests.processes.conftest import REPOSITORY
from tests.studio.red_team.floods import FLOODS, SECONDS, feeling
from tests.studio.red_team.over_http import INTRUDER, NEIGHBOUR, ask
from tests.studio.red_team.registry import ATTACKS
from tests.studio.red_team.stage import sent, service, without_a_boundary
from tests.studio.red_team.test_red_team import IS_WHOLE

BOMBS = [name for name, attack in ATTACKS.items() if attack.is_bomb]


@pytest.mark.skipif(not IS_WHOLE, reason="make proof ONLY=red-team tries bombs and floods")
def test_the_neighbour_is_answered_through_every_bomb_and_flood(capsys: pytest.CaptureFixture[str]) -> None:
    need(os.getuid() == 0, "root")
    with ExitStack() as stack:
        made = stack.enter_context(service([sys.executable], 0))
        made.serve()
        need(bool(made.ask("/readyz")["isolation"]["separates"]), "what keeps tenants apart")
        sessions = {}
        for name in (NEIGHBOUR, INTRUDER):
            studio = stack.enter_context(made.studio(name))
            sessions[name] = studio.session(vram="64MiB").wait_until_active().id
        facts = {"port": made.port, "token": made.tokens[INTRUDER], "session": sessions[INTRUDER]}
        own = (made.port, made.tokens[NEIGHBOUR], sessions[NEIGHBOUR])
        lines, beyond = [], without_a_boundary(BOMBS, facts, 0)
        assert all(beyond.values()), beyond
        for name in [*BOMBS, *FLOODS]:
            with feeling(*own) as quiet:
                time.sleep(SECONDS)
            got = ""
            with feeling(*own) as beside:
                if name in FLOODS:
                    flood = [sys.executable, "-m", "tests.studio.red_team.floods", name]
                    subprocess.run(
                        flood, input=json.dumps(facts), text=True, check=True, timeout=120, cwd=REPOSITORY
                    )
                else:
                    run = {"code": sent([name], facts)}
                    path = f"/v1/sessions/{sessions[INTRUDER]}/run"
                    said = ask(made.port, "POST", path, made.tokens[INTRUDER], run).body
                    told = [json.loads(line) for line in said.splitlines() if line.strip()]
                    printed = "".join(line["text"] for line in told if line["kind"] == "text")
                    got = json.loads(printed)[name]
            lines.append(
                f"{name}: p99 {beside.p99 * 1000:.0f} ms beside {quiet.p99 * 1000:.0f} quiet, "
                f"ratio {beside.p99 / quiet.p99:.2f} ({len(beside.took)} calls)"
            )
            with capsys.disabled():
                print(f"\n{lines[-1]}", end="", flush=True)
            assert quiet.took
            assert beside.took
            assert not got, f"{name} got {got}"
            assert beside.wrong == [], name
        with capsys.disabled():
            print(f"\n{len(lines)} bombs and floods borne")
