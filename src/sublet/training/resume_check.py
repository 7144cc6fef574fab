"""A resume that is checked: it begins at the save before the last, repeats the steps up to the last one, and
compares.

Rules of this file:
- While it repeats, nothing is saved and nothing counts twice: the job's head stays where it is.
- Equal: the run goes on, and it is remembered that this version of the program resumes exactly.
- Different: the program leaves, and its next start repeats the steps once more. What differs again, and
  differently, differs by itself: it is named, and not compared any more. What came out the same both times,
  and not as it was saved, is lost by a resume: the program is stopped, and what is committed stays. Both
  states are kept for whoever looks for the cause; the difference is reported whether or not they could be.
- Whether to check is `core.progress.verifying`'s.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from sublet.core.errors import ResumeDiffers, SubletError
from sublet.core.progress.verifying import DIFFERS_TAG, Verify, repeated_name, wants_check
from sublet.machine.run_folder import replace_file
from sublet.training.run_parts import Parts


class RepeatOnceMore(SubletError):
    """What was repeated came out differently, and is repeated once more by the next start."""


@dataclass(frozen=True, slots=True)
class RepeatedSteps:
    """What a resume repeats: from which version, up to which step and version."""

    from_version: int
    to_version: int
    to_step: int
    reason: str

    def words(self, after: int) -> str:
        first = after + 1
        return f"steps {first:,} to {self.to_step:,}" if first < self.to_step else f"step {first:,}"


@dataclass(slots=True)
class ResumeChecks:
    """What this host remembers of the resumes of one job."""

    verify: Verify
    file: Path | None = None  # where it is remembered; None: nowhere
    program: str = ""  # which version of the program this is; '': as it was
    _found: dict[str, Any] = field(default_factory=dict)

    def read(self) -> None:
        if self.file is not None:
            with contextlib.suppress(OSError, ValueError):
                self._found = dict(json.loads(self.file.read_text()))

    @property
    def resumes(self) -> int:
        return int(self._of_this_program("resumes"))

    @property
    def checked(self) -> int:
        return int(self._of_this_program("checked"))

    def _of_this_program(self, name: str) -> Any:
        return self._found.get(name, 0) if self._found.get("program") == self.program else 0

    def begin(self, version: int, step: int) -> RepeatedSteps | None:
        """Count a resume at this version. What to repeat, if it is to be checked."""
        self.read()
        resumes = self.resumes + 1
        wanted, reason = wants_check(self.verify, resumes=resumes, checked=self.checked)
        begin_at = int(self._found.get("begin_at", 0))
        if self._found.get("finished") == version:
            return None  # nothing was lost: more steps were asked for
        if 0 < begin_at < version:
            # Begun by an earlier process, which did not come to its end.
            why = str(self._found.get("begin_why", "a check was begun before, and not ended"))
            found: RepeatedSteps | None = RepeatedSteps(begin_at, version, step, why)
        else:
            found = RepeatedSteps(version - 1, version, step, reason) if wanted and version > 1 else None
        at = found.from_version if found is not None else 0
        self._keep(resumes=resumes, checked=self.checked, begin_at=at)
        return found

    def finished(self, version: int) -> None:
        """The loop came to its end, and this version is its last."""
        self._keep(resumes=self.resumes, checked=self.checked, finished=version)

    def given_up(self) -> None:
        """The earlier save cannot be read: the last one is begun with."""
        self._keep(resumes=self.resumes, checked=self.checked)

    def begin_next_at(self, version: int, why: str) -> None:
        """The next resume repeats from there."""
        self._keep(resumes=self.resumes, checked=self.checked, begin_at=version, begin_why=why)

    def was_equal(self, varies: Collection[str] = ()) -> None:
        """`varies`: the places that differ by themselves."""
        known = sorted({*self.varies, *varies})
        self._keep(resumes=self.resumes, checked=self.checked + 1, varies=known)

    @property
    def varies(self) -> frozenset[str]:
        """Places in the state that are known to differ from run to run by themselves."""
        return frozenset(self._of_this_program("varies") or ())

    def telling(self, found: Iterable[PartDiffers], from_version: int) -> tuple[list[PartDiffers], set[str]]:
        """What is lost by a resume, and what differs by itself. Raises `RepeatOnceMore` if it cannot be told
        yet."""
        found = [part for part in found if part.path not in self.varies]
        if not found:
            return [], set()
        now = {part.path: part.digest for part in found}
        earlier = self._of_this_program("came_out")
        if not earlier:
            why = "they came out differently, and may do so by themselves"
            self._keep(
                resumes=self.resumes, checked=self.checked, begin_at=from_version, begin_why=why, came_out=now
            )
            raise RepeatOnceMore(f"{found[0]}, and will be repeated once more by the next start")
        varies = {path for path in {*earlier, *now} if earlier.get(path) != now.get(path)}
        return [part for part in found if part.path not in varies], varies

    def _keep(self, **values: Any) -> None:
        kept = {key: self._of_this_program(key) for key in ("varies", "came_out")}
        kept = {key: value for key, value in kept.items() if value}
        if "checked" in values and values["checked"] > self.checked:
            kept.pop("came_out", None)
        self._found = {"program": self.program, **kept, **values}
        if self.file is not None:
            with contextlib.suppress(OSError):
                self.file.parent.mkdir(parents=True, exist_ok=True)
                replace_file(self.file, json.dumps(self._found).encode())


def resume_differs(
    parts: Parts, job: str, repeated: RepeatedSteps, steps: str, found: Sequence[object], now: Any
) -> ResumeDiffers:
    """What to raise. `now` is the repeated state; None when the program did not come to it."""
    more = f" (and {len(found) - 4} more)" if len(found) > 4 else ""
    return ResumeDiffers(
        f"{steps} came out differently when repeated after a resume: "
        f"{'; '.join(str(part) for part in found[:4])}{more}; step {repeated.to_step} is committed, nothing "
        f"was overwritten. {_keep_both(parts, job, repeated, now)}"
    )


def _keep_both(parts: Parts, job: str, repeated: RepeatedSteps, now: Any) -> str:
    other = repeated_name(job)
    try:
        parts.store.tag(job, repeated.to_version, DIFFERS_TAG, actor=job)
        if now is None or parts.lease is None:
            return f"The committed state is kept: {job} version {repeated.to_version}"
        head = parts.ledger.head(other)
        saved = parts.store.save(
            other, now, expected_version=head.version if head is not None else 0, lease=parts.lease
        )
    except (SubletError, OSError) as error:
        return f"The states could not be kept: {error}"
    return (
        f"Both states are kept: {job} version {repeated.to_version} as committed, {other} version "
        f"{saved.version} as repeated"
    )


@dataclass(frozen=True, slots=True)
class PartDiffers:
    """One place in a state, and what it is now."""

    path: str
    words: str
    digest: str

    def __str__(self) -> str:
        return f"{self.path}: {self.words}"


def differences(before: Any, now: Any, path: str) -> list[PartDiffers]:
    """Of two trees of plain data and arrays, each with its place; the first ones."""
    return list(islice(_compare(before, now, path), _MOST))


_MOST = 50


def _compare(before: Any, now: Any, path: str) -> Iterator[PartDiffers]:
    if hasattr(before, "shape") and hasattr(before, "dtype"):
        if not _same_array(before, now):
            yield PartDiffers(path, "the numbers differ", _digest(now))
    elif type(before) is not type(now):
        words = f"{type(before).__name__} before, {type(now).__name__} now"
        yield PartDiffers(path, words, type(now).__name__)
    elif isinstance(before, dict):
        if list(before) != list(now):
            yield PartDiffers(path, "other members", _digest(list(now)))
            return
        for key, value in before.items():
            yield from _compare(value, now[key], f"{path}[{key!r}]")
    elif isinstance(before, (list, tuple)):
        if len(before) != len(now):
            words = f"{len(before)} members before, {len(now)} now"
            yield PartDiffers(path, words, str(len(now)))
            return
        for at, (old, new) in enumerate(zip(before, now, strict=True)):
            yield from _compare(old, new, f"{path}[{at}]")
    elif before != now and not (before != before and now != now):
        yield PartDiffers(path, f"{str(before)[:60]} before, {str(now)[:60]} now", _digest(now))


def _digest(value: Any) -> str:
    hashed = hashlib.sha256()
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        hashed.update(f"{tuple(value.shape)} {value.dtype}".encode())
        hashed.update(_bytes_of(value, import_module("numpy")).tobytes())
    else:
        hashed.update(repr(value).encode("utf-8", "surrogatepass"))
    return hashed.hexdigest()[:32]


def _same_array(before: Any, now: Any) -> bool:
    if not hasattr(now, "shape") or tuple(before.shape) != tuple(now.shape) or before.dtype != now.dtype:
        return False
    numpy = import_module("numpy")
    return bool(numpy.array_equal(_bytes_of(before, numpy), _bytes_of(now, numpy)))


def _bytes_of(array: Any, numpy: Any) -> Any:
    """Bit by bit: a NaN equals itself, and -0.0 is not 0.0."""
    if hasattr(array, "detach"):
        torch = import_module("torch")
        flat = array.detach().cpu().contiguous().view(-1)
        return flat.view(torch.uint8).numpy() if flat.numel() else flat.numpy()
    return numpy.ascontiguousarray(numpy.asarray(array)).reshape(-1).view(numpy.uint8)
