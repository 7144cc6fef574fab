"""What travels between a notebook and the leased worker that runs one of its cells.

Rules of this file:
- All values of one trip are in one pickle (`Packed`), so that what was one object stays one.
- Records only: `notebook_lease.py` sends them, and `inside_cell.py` runs the cell.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: A pickle and its buffers, each as a `pickle.PickleBuffer` so that nothing is copied on the way to the
#: shared memory.
Packed = Sequence[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedSurroundings:
    """What changed in the notebook's process besides its variables."""

    folder: str = ""  # '': the same
    path: tuple[str, ...] | None = None  # where modules are found; None: the same
    path_before: tuple[str, ...] = ()
    environment: Mapping[str, str | None] = field(default_factory=dict)  # None: gone


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOrder:
    """The order to run one cell."""

    source: str  # with an empty line where the magic stood, so that line numbers are those of the notebook
    header: str  # the magic's own line, shown in tracebacks
    name: str  # the file name it is compiled under
    texts: Mapping[str, tuple[int, str]]  # of the cells whose functions travel: In[…] and text, by file name
    count: int  # the In[…] of the notebook
    front: str  # notebook or terminal
    values: Packed  # dict of what the worker does not have as the notebook has it
    forget: tuple[str, ...] = ()
    watch: tuple[str, ...] = ()  # if the cell changes what is inside one of these, it comes back
    out: tuple[str, ...] | None = None  # exactly these come back; None: whatever was assigned or changed
    keep: tuple[str, ...] = ()
    every_us: int = 0
    random: Mapping[str, bytes] | None = None  # the notebook's random states, when they are not the worker's
    moved: ChangedSurroundings | None = None
    colors: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellFailure:
    """The exception that the cell raised."""

    kind: str
    text: str
    pickled: bytes  # '' when the exception itself cannot travel
    trace: tuple[str, ...]  # as IPython shows it, with the cell's own lines


@dataclass(frozen=True, slots=True, kw_only=True)
class CellReport:
    """The report of a cell that ran."""

    values: Packed  # dict of what comes back
    names: tuple[str, ...] = ()  # of what is in it
    gone: tuple[str, ...] = ()  # deleted by the cell
    stayed: Mapping[str, str] = field(default_factory=dict)  # what could not come back, and why
    modules: Mapping[str, str] = field(default_factory=dict)  # names that stand for modules
    result: bool = False  # the value of the last expression is among the values, under RESULT
    failure: CellFailure | None = None
    stopped: str = ""  # why it was stopped at a point where it had saved
    launches: int = 0
    random: Mapping[str, bytes] | None = (
        None  # random states at its end, if it drew from them or keeps something
    )


#: What IPython itself keeps in the namespace: none of the notebook's variables.
_ITS_OWN = re.compile(r"_{1,3}|_i{1,3}|_i?\d+|_[dio]h|__\w+__|In|Out|exit|quit|open|get_ipython")


def is_users(name: str) -> bool:
    """Whether a name in an IPython namespace is a variable of the user's."""
    return _ITS_OWN.fullmatch(name) is None


#: The name the value of a cell's last expression travels under.
RESULT = "_sublet_result"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A request from inside a cell to save these values."""

    values: Packed
    random: Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveAnswer:
    """The answer to a snapshot. `failed` says why the one before was not saved; `stop`: this one is saved,
    and the GPU goes."""

    failed: str = ""
    stop: str = ""
