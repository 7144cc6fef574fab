"""What code under a lease may ask of it: `sublet.lease()` and `sublet.keep()`, inside a `%%gpu` cell or an
`on_gpu` function; and `sublet.save()` and `sublet.saved()`, inside a session of the studio.

Rules of this file:
- All work in the leased worker, without the ledger. Elsewhere `lease()`, `save()` and `saved()` say where
  they belong, and `keep()` does nothing: a function that calls it also runs in a plain script.
- What is saved leaves the worker as bytes of `store.codec`, and is written by who holds the lease: only the
  holder of a lease that is held may move the session's checkpoint, and nothing in here has the right to.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from sublet.core.errors import BadInput, NotDurable, SubletError, error_by_code
from sublet.devices.opening import Opening, leased, lend, open_device
from sublet.machine import lease_environment
from sublet.ports.device import GpuSession
from sublet.ports.worker import Part
from sublet.processes.worker import worker
from sublet.store.codec import TreeCodec


def set_openings(openings: Sequence[Opening]) -> None:
    """Called in the worker before its first cell: how its devices are opened."""
    lend(openings)


def set_openings_sealed(parts: list[memoryview]) -> list[Part]:
    """Do the same for a sealed call, from a JSON list of the openings' fields."""
    set_openings([Opening(**opening) for opening in json.loads(bytes(parts[0]))])
    return []


class CurrentLease:
    """The lease this code runs under."""

    def __init__(self, process_lease: lease_environment.ProcessLease) -> None:
        self._process_lease = process_lease

    @property
    def id(self) -> str:
        return self._process_lease.id

    @property
    def epoch(self) -> int:
        return self._process_lease.epoch

    @property
    def seconds_left(self) -> float:
        """Until it must have been renewed."""
        return self._process_lease.seconds_left

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(opening.device_id for opening in leased())

    @property
    def vram_bytes(self) -> int:
        """Per device."""
        openings = leased()
        return openings[0].quota_bytes if openings else 0

    @property
    def warned(self) -> bool:
        """Whether it was said to go soon: save now."""
        return self._process_lease.warned

    def open(self, device: int = 0) -> GpuSession:
        """A GpuSession on one of its devices."""
        openings = leased()
        if not 0 <= device < len(openings):
            raise BadInput(f"device {device} is not one of this lease's {len(openings)}")
        return open_device(openings[device], self._process_lease)

    def __repr__(self) -> str:
        return f"<lease {self.id} on {', '.join(self.devices)}, {self.seconds_left:.0f} s left>"


def lease() -> CurrentLease:
    """The lease this code runs under: `with sublet.lease().open() as gpu: ...` inside a `%%gpu` cell."""
    process_lease = lease_environment.process_lease()
    if process_lease is None:
        raise BadInput(
            "this code does not run under a lease",
            remedy="call it inside a %%gpu cell, or lease one here: with sublet.gpu(...) as lease: ...",
        )
    return CurrentLease(process_lease)


def keep() -> bool:
    """Here everything the `%%gpu` cell keeps belongs together: save it, if it is time. Whether it was taken.

    In a function that trains, called by a cell with --keep. Without it the starts of the iterations of the
    cell's own loops are taken for such points; with it, only these. Elsewhere it does nothing."""
    cell = sys.modules.get("sublet.notebook.cells.inside_cell")
    return bool(cell is not None and cell.point())


def save(state: Mapping[str, Any]) -> int:
    """Save it as the state of this session, in its checkpoint; the version it is now. When it returns, it is
    durable: the session, or another with the same checkpoint, has it again with `saved()`, on whichever GPU.

    Numbers, texts, bytes, lists, dicts, NumPy arrays and torch tensors, as in every checkpoint."""
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise BadInput(
            f"save() takes a dict with names as its keys, not {type(state).__name__}; nothing was saved",
            remedy='save({"model": model.state_dict(), "step": step})',
        )
    whole = b"".join(TreeCodec().encode(dict(state)))
    answer = _asked({"ask": "save"}, [whole])
    try:
        return int(json.loads(bytes(answer[0]))["version"])
    except (LookupError, ValueError, TypeError) as e:
        raise NotDurable("it was not said that the state was saved; do not count on it") from e


def saved() -> dict[str, Any] | None:
    """What was last saved in this session's checkpoint; None: nothing yet."""
    answer = _asked({"ask": "load"}, [])
    if not answer:
        return None
    found = TreeCodec().decode(answer[0])
    return dict(found) if isinstance(found, Mapping) else {"value": found}


def _asked(head: Mapping[str, Any], parts: Sequence[Part]) -> list[memoryview]:
    """Ask the holder of this session's lease. A refusal is raised here as the error it is."""
    try:
        fine, answer = worker.ask_sealed(head, parts)
    except RuntimeError as e:
        raise BadInput(
            f"a session's state is saved and loaded by its own code only: {e}",
            remedy="call it in the main thread of code that runs in a session "
            "(studio.session(...).run_code(...) or .run(function)); "
            "elsewhere use sublet.Durable",
        ) from None
    if fine:
        return answer
    raise _refusal(answer)


def _refusal(answer: Sequence[memoryview]) -> SubletError:
    try:
        told = json.loads(bytes(answer[0]))
        return error_by_code(str(told["code"]))(str(told["message"]), remedy=str(told.get("remedy", "")))
    except (LookupError, ValueError, TypeError):
        return BadInput(
            "nobody keeps a state for this call; nothing was saved or loaded",
            remedy="run it in a session of the studio, or use sublet.Durable",
        )
