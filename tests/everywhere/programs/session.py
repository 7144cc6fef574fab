"""A user of the studio: opens a session, computes and saves in it; later goes on in it."""

import json
import sys
import time

import sublet

do, url, token = sys.argv[1:4]


def connected() -> "sublet.Studio":
    """The service may be on its way up."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return sublet.connect(url, token=token)
        except sublet.SubletError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


studio = connected()
if do == "open":
    session = studio.session(vram="64MiB", ttl="1m").wait_until_active()
    session.run_code("import sublet\ntotal = sum(range(1000))\nversion = sublet.save({'total': total})")
    total = session.run(lambda: __import__("__main__").total)
    print(json.dumps({"session": session.id, "lease": session.lease_id, "total": total}))
else:
    session = studio.find(sys.argv[4]).wait_until_active()
    again = session.run(lambda: __import__("__main__").total + 1)
    print(json.dumps({"again": again, "saved": session.saved(), "lease": session.lease_id}))
    session.end()
