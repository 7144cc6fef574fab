"""Run Python as a user without any rights: `as_user.py UID script args…`, as root. What Python needs is shown
to that user, as `processes/sandbox/tenant_sandbox.py` does it: on a machine for tests it may lie in root's
own home.
"""

from __future__ import annotations

import os
import sys

from sublet.processes.sandbox import kernel_calls, tenant_sandbox


def main() -> None:
    uid = int(sys.argv[1])
    kernel_calls.unshare(kernel_calls.CLONE_NEWNS)
    kernel_calls.mount("none", "/", "none", kernel_calls.MS_REC | kernel_calls.MS_PRIVATE)
    shown = tenant_sandbox.needed()
    held = {place: tenant_sandbox._held(place) for place in shown}
    closed = sorted(
        {place for s in shown for place in tenant_sandbox._closed_above(os.path.realpath(s), uid)}
    )
    for place in closed:
        if os.path.isdir(place):
            kernel_calls.mount("tmpfs", place, "tmpfs", 0, "mode=0755")
    for place, fd in sorted(held.items()):
        if not os.path.exists(place):
            os.makedirs(place, mode=0o755)
            kernel_calls.mount(f"/proc/self/fd/{fd}", place, "none", kernel_calls.MS_BIND)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    os.environ["HOME"] = "/nonexistent"
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])


main()
