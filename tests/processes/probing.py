"""Two tenants' workers, and the first one looks around: `probing.py HOME`, printing what it found as JSON."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from sublet.core.studio.isolation import SCOPED
from sublet.processes.sandbox.tenant_sandbox import TenantSandbox, uid_of
from sublet.processes.worker.local import LocalWorker
from sublet.processes.worker.workers import LocalWorkers
from tests.processes.conftest import moved_in, zygote_pids
from tests.processes.test_sealed import Heard

SECRET = "sublet_a-secret-of-the-caller"
VARIABLES = ("PATH", "LANG", "TZ", "LC_ALL", "LC_CTYPE", "PYTHONPATH", "HOME", "TMPDIR", "USER", "LOGNAME")


def ask(worker: LocalWorker, source: str) -> Any:
    """The value of an expression, as JSON."""
    sink = Heard()
    order = json.dumps(
        {"code": f"import json, tests.processes.intruder as i\nprint(json.dumps({source}))", "name": ""}
    )
    fine, (answer,) = worker.call_sealed("sublet.processes.worker.sealed_calls:code", [order.encode()], sink)
    assert fine, bytes(answer)
    return json.loads(sink.of("stdout"))


def probed(home: Path) -> dict[str, Any]:
    """Everything is ended again."""
    os.environ["SUBLET_TOKEN"] = os.environ["AWS_SECRET_ACCESS_KEY"] = SECRET
    run, elsewhere = home / "run", home.parent / f"{home.name}-elsewhere"
    run.mkdir(parents=True, exist_ok=True)
    elsewhere.mkdir(exist_ok=True)
    anybodys = home.parent / "anybodys"
    anybodys.mkdir()
    anybodys.chmod(0o777)
    for place in (home / "ledger.db", elsewhere / "ledger.db", run / "key"):
        place.write_text(SECRET)
        place.chmod(0o644)
    session_host = socket.socket(socket.AF_UNIX)
    session_host.bind(str(run / "x.session-host"))
    os.chmod(run / "x.session-host", 0o666)
    session_host.listen()
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0of-a-service-{os.getpid()}")
    abstract.listen()
    made = [
        moved_in(
            LocalWorkers(
                home, "here", "numpy,sublet", sandbox=TenantSandbox(number=n, hide=(str(elsewhere),))
            )
        )
        for n in (1, 2)
    ]
    try:
        first, second = made
        ask(second, f"open({second.scratch + '/theirs'!r}, 'w').write('x')")
        sockets = [str(p) for p in run.iterdir() if p.is_socket()]
        assert len(sockets) >= 2
        facts = {
            "home": str(home),
            "secret": SECRET,
            "variables": VARIABLES,
            "files": [
                str(home / "ledger.db"),
                str(elsewhere / "ledger.db"),
                str(run / "key"),
                f"{second.scratch}/theirs",
            ],
            "folders": [str(run), str(elsewhere), str(home / "scratch" / Path(second.scratch).name)],
            "anybodys": str(anybodys),
            "covers": ["/tmp", "/run", "/dev/shm", str(elsewhere), os.path.expanduser("~")],
            "sockets": sockets,
            "abstract": [f"of-a-service-{os.getpid()}"] if SCOPED in first.containment else [],
            "pids": [os.getpid(), *zygote_pids(home), first.holder.pid, second.holder.pid, second.worker_pid],
            "own_uid": uid_of(1) if os.getuid() == 0 else 0,
            "scratch": first.scratch,
        }
        return {
            "got": ask(first, f"i.look({facts!r})"),
            "failed": ask(first, f"i.allowed({first.scratch!r})"),
            "containment": first.containment,
            "modes": [os.stat(worker.scratch).st_mode & 0o777 for worker in made],
            "uids": [os.stat(worker.scratch).st_uid for worker in made],
            "removed": _removed(made),
        }
    finally:
        for worker in made:
            worker.end("over")
        session_host.close()
        abstract.close()


def _removed(made: list[LocalWorker]) -> bool:
    """The folders go with their workers, and nobody else's."""
    made[0].end("over")
    give_up = time.monotonic() + 10
    while os.path.exists(made[0].scratch) and time.monotonic() < give_up:
        time.sleep(0.02)
    return not os.path.exists(made[0].scratch) and os.path.exists(made[1].scratch)


if __name__ == "__main__":
    print(json.dumps(probed(Path(sys.argv[1]))))
