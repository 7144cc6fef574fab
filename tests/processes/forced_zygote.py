"""A zygote that contains its workers by less than this machine offers. Started by path, with the means it may
use, then its own arguments: what a test patches in its own process, the zygote would never see.
"""

from __future__ import annotations

import sys
from typing import Any

from sublet.processes.sandbox import containment
from sublet.processes.worker import zygote

if __name__ == "__main__":
    allowed = sys.argv.pop(1).split(", ")
    if containment.CGROUP not in allowed:
        nothing: Any = classmethod(lambda cls, name, wanted=None: None)
        containment.Group.make = nothing
    if containment.PID_NAMESPACE not in allowed:
        without: Any = lambda: False  # noqa: E731
        containment.namespaces_work = without
    sys.exit(zygote.main())
