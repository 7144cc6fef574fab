"""Run Python as a user without any rights: `as_user.py UID script args…`, as root. What Python needs is shown to that user, as
`hosting/household.py` does it: on a machine for tests it may lie in root's own home."""

from __future__ import annotations

import os
import sys

from sublet.hosting import household, linux


def main() -> None:
    uid = int(sys.argv[1])
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("none", "/", "none", linux.MS_REC | linux.MS_PRIVATE)
    shown = household.needed()
    held = {place: household._held(place) for place in shown}
    closed = sorted({place for s in shown for place in household._closed_above(os.path.realpath(s), uid)})
    for place in closed:
        if os.path.isdir(place):
            linux.mount("tmpfs", place, "tmpfs", 0, "mode=0755")
    for place, fd in sorted(held.items()):
        if not os.path.exists(place):
            os.makedirs(place, mode=0o755)
            linux.mount(f"/proc/self/fd/{fd}", place, "none", linux.MS_BIND)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    os.environ["HOME"] = "/nonexistent"
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])


main()
