"""A command's supervisor that contains by less than this machine offers; see `forced_zygote.py`."""

from __future__ import annotations

import sys
from typing import Any

from sublet.processes.sandbox import containment
from sublet.processes.supervisor import command_supervisor

if __name__ == "__main__":
    allowed = sys.argv.pop(1).split(", ")
    if containment.CGROUP not in allowed:
        nothing: Any = classmethod(lambda cls, name, wanted=None: None)
        containment.Group.make = nothing
    if containment.PID_NAMESPACE not in allowed:
        without: Any = lambda: False  # noqa: E731
        containment.namespaces_work = without
        command_supervisor.BACKSTOP_ALONE_US = (
            30_000_000  # whoever stops it for a moment may be slow to let it go on
        )
    sys.exit(command_supervisor.main())
