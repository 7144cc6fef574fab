"""One worker for each network policy: `network_probe.py HOME`, printing as JSON what each of them reached."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from sublet.core.errors import NotIsolated
from sublet.core.studio.network_policy import NetworkPolicy
from sublet.processes.sandbox.tenant_sandbox import TenantSandbox
from sublet.processes.worker.workers import LocalWorkers
from tests.processes.conftest import end_zygotes, moved_in
from tests.processes.probing import ask

REACHES = """(lambda socket, there, here: [
    (here.bind(("127.0.0.1", 0)), here.listen(), 0)[-1],
    there.connect_ex(("127.0.0.1", {port})),
    socket.socket().connect_ex(here.getsockname()),
])(*(lambda socket: (socket, socket.socket(), socket.socket()))(__import__("socket")))"""


def reached(home: Path, policy: NetworkPolicy, port: int) -> dict[str, Any]:
    workers = LocalWorkers(home, "here", "numpy,sublet", sandbox=TenantSandbox(number=5, network=policy))
    try:
        worker = moved_in(workers)
    except NotIsolated as e:
        return {"refused": e.message}
    try:
        _, service, own = ask(worker, REACHES.format(port=port))
        return {"containment": worker.containment, "service": service, "own": own}
    finally:
        worker.end("it was asked")


def main(home: Path) -> None:
    (home / "run").mkdir(parents=True, exist_ok=True)
    service = socket.socket()
    service.bind(("127.0.0.1", 0))
    service.listen()
    port = service.getsockname()[1]
    try:
        found = {policy.value: reached(home, policy, port) for policy in NetworkPolicy}
    finally:
        end_zygotes(home)
    print(json.dumps({**found, "uid": os.getuid()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
