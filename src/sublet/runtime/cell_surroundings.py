"""What surrounds a notebook's cell and is no variable: the working folder, where modules are found, the environment.

Rules of this file:
- What the notebook changed since the worker was last told goes along with the next cell: a cell must not depend on whether its lease
  was taken before or after `os.chdir`.
- What a cell changes there stays there, while its worker lives. The notebook's own is never touched.
- The lease's own variables are the worker's: they name its devices, and hide everything of the ledger's.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from sublet.ports.cell import Moved

_THE_LEASES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    folder: str = ""
    path: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def since(self, before: Surroundings) -> Moved | None:
        """What a worker that knows the ones before has to be told."""
        if self == before:
            return None
        there, here = before.environment, self.environment
        changed: dict[str, str | None] = {name: v for name, v in here.items() if there.get(name) != v}
        return Moved(
            folder=self.folder if self.folder != before.folder else "",
            path=self.path if self.path != before.path else None,
            path_before=before.path,
            environment=changed | dict.fromkeys(there.keys() - here.keys()),
        )


def surroundings() -> Surroundings:
    """This process's, now."""
    folder = ""
    with contextlib.suppress(OSError):  # it was deleted
        folder = os.getcwd()
    return Surroundings(
        folder=folder,
        path=tuple(sys.path),
        environment={
            name: value
            for name, value in os.environ.items()
            if not name.startswith("SUBLET_") and name not in _THE_LEASES
        },
    )


def follow(moved: Moved) -> None:
    """In the worker."""
    if moved.folder:
        with contextlib.suppress(OSError):  # as for a worker that begins
            os.chdir(moved.folder)
    if moved.path is not None:
        own = [place for place in sys.path if place not in moved.path_before]  # a cell's
        sys.path[:] = [*own, *moved.path]
    for name, value in moved.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
