"""Start a tenant's worker as a root that lacks something: `weaker_root.py WHAT HOME`, as root. Prints what came of it as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from sublet.core.errors import NotIsolated
from sublet.processes.sandbox import kernel_calls
from sublet.processes.sandbox.tenant_sandbox import TenantSandbox
from sublet.processes.worker.workers import LocalWorkers

_PR_CAPBSET_DROP = 24
_CAPABILITIES = {"no chown": 0, "no setgid": 6, "no setuid": 7}


def main() -> None:
    what, home = sys.argv[1:]
    if what in _CAPABILITIES:  # its children, which run other programs, have it no more
        kernel_calls.prctl(_PR_CAPBSET_DROP, _CAPABILITIES[what])
    workers = LocalWorkers(Path(home), "here", "", sandbox=TenantSandbox(number=7))
    try:
        worker = workers.start()
    except NotIsolated as e:
        print(json.dumps({"message": e.message, "remedy": e.remedy}))
    else:
        uid = os.stat(f"/proc/{worker.worker_pid}").st_uid
        worker.end("the test is over")
        print(json.dumps({"uid": uid, "containment": worker.containment}))


main()
