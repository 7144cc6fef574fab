"""What a save wrote that the ledger then refused: it goes at once, because nobody is charged for it.

Rules of this file:
- Only what this process wrote under names that nobody else ever knew: the manifest of the refused save, and
  packs that no committed one refers to (C5).
- The manifest goes first, as in a sweep. What cannot be removed now is left to the next sweep.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

from sublet.core.errors import SubletError
from sublet.ports.store import Remote, Replica

REMOTE_SECONDS = 5.0


def remove_refused(replicas: Sequence[Replica], manifest: str, packs: Iterable[str]) -> None:
    gone = [("manifest", manifest), *(("pack", pack) for pack in packs)]
    for replica in replicas:
        near = replica.hurried(REMOTE_SECONDS) if isinstance(replica, Remote) else replica
        with contextlib.suppress(OSError, SubletError):
            for kind, name in gone:
                near.remove(kind, name)
