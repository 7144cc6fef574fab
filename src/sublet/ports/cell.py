"""What travels between a notebook and the leased worker that runs one of its cells.

Rules of this port:
- A value travels inside one pickle with all others of its trip (`packed`), so that what was one object stays one.
- Records only. Who sends them is `runtime/cell.py`, who runs the cell is `notebook/inside_cell.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

#: A pickle and its buffers, each as a `pickle.PickleBuffer` so that nothing is copied on the way to the shared memory.
Packed = Sequence[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What changed around the notebook, and is no variable."""

    folder: str = ""  # '': the same
    path: tuple[str, ...] | None = None  # where modules are found; None: the same
    path_before: tuple[str, ...] = ()
    environment: Mapping[str, str | None] = field(default_factory=dict)  # None: gone


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOrder:
    """Run this cell."""

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
    moved: Moved | None = None
    colors: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellFailure:
    """What the cell raised."""

    kind: str
    text: str
    pickled: bytes  # '' when the exception itself cannot travel
    trace: tuple[str, ...]  # as IPython shows it, with the cell's own lines


@dataclass(frozen=True, slots=True, kw_only=True)
class CellReport:
    """What came of it."""

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
    """Asked in the middle of a cell: save this, please."""

    values: Packed
    random: Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """The answer: it is being saved. `failed`: the one before could not be; `stop`: this one is saved, and the GPU goes."""

    failed: str = ""
    stop: str = ""


# --- what the worker has -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Luggage:
    """What one cell takes along."""

    values: Packed
    forget: tuple[str, ...]
    watch: tuple[str, ...]
    files: frozenset[str]  # where the functions among it were written
    sent: Mapping[str, Any]  # what the worker then has, in words of whoever packed it


class InStep(Protocol):
    """What one worker has of the notebook's variables. A new worker has nothing."""

    @property
    def stayed(self) -> Mapping[str, str]:
        """What is only there, and why."""

    def luggage(self, space: Mapping[str, Any], names: Iterable[str], *, alone: bool = False) -> Luggage:
        """For a cell that reads these names; with what shares something with them, unless they go alone. Raises `CannotTravel`. Nothing
        counts as sent before `took`."""

    def took(self, luggage: Luggage, *, watched: bool = True) -> None:
        """The worker has it, and the cell's report is here. Not `watched`: it does not say everything the cell changed."""

    def came_back(self, values: Mapping[str, Any]) -> None:
        """Both sides have these now. All of one report, at once."""

    def stays(self, stayed: Mapping[str, str], space: Mapping[str, Any]) -> None:
        """These could not come back. What the notebook has under their names stands beside them, and is not sent for it."""

    def forgets(self, names: Iterable[str]) -> None:
        """These are gone on both sides."""


class Packing(Protocol):
    """How values travel."""

    def in_step(self) -> InStep:
        """Called when a new worker is about to be used."""

    def pack(self, value: Any) -> Packed: ...
    def unpack(self, packed: Packed) -> Any: ...
    def pack_there(self, groups: Sequence[Sequence[str]]) -> list[Packed]:
        """Called in the worker: its variables of these names, each group in a pickle of its own."""
