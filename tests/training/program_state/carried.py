"""A program that is taken apart at one of its steps in one process, and goes on from there in others.

Rules of this file:
- A program is a text. `begin()` stands before its loop, `step()` at the end of a turn; what it prints counts.
- Three processes are forked: the first runs to its end and is taken after two steps, the second goes on from there and is taken after the
  third, the last goes on from that. All of them must print the same, and what the first two hold after the third step must be equal.
- A program that goes on does so on top of its beginning, which is never returned to: its process ends.
- It needs nothing but Python, and NumPy where a program has arrays: other versions of Python run this file as a program.
- The three are forked from an interpreter that has imported no more than that: a fork of the process of the tests, with all that they
  import, takes four times as long.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import io
import json
import logging
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import sublet
from sublet.core.errors import SubletError
from sublet.training.program_state.anchors import Paths
from sublet.training.program_state.comparing import Difference, StateToCompare, differences
from sublet.training.program_state.pickling import CannotBeSaved, Taken
from sublet.training.program_state.program import Program
from sublet.training.scripts.importing import remember_visibly

FIRST = 2
T = TypeVar("T")
_small_process_lock = threading.Lock()


@dataclass(slots=True)
class State:
    """What a save holds."""

    data: bytes
    recipes: bytes
    blocks: dict[str, bytes]
    sizes: dict[str, int]
    numbering: dict[str, Any]

    def taken(self) -> Taken:
        blocks: dict[str, Any] = dict(self.blocks)
        if blocks:
            import numpy

            blocks = {name: numpy.frombuffer(block, dtype="uint8") for name, block in blocks.items()}
        return Taken(self.data, self.recipes, blocks, self.sizes)

    def to_compare(self) -> StateToCompare:
        digests = {name: hashlib.sha256(block).hexdigest() for name, block in self.blocks.items()}
        return StateToCompare(
            self.data, lambda name, _: digests.get(name), Paths(*self.numbering["paths"]).words
        )


@dataclass(slots=True)
class Life:
    """What one process made of the program."""

    said: str = ""
    states: dict[int, State] = field(default_factory=dict)
    refused: str = ""  # in words: at the beginning, or later
    when: str = ""  # it was refused
    failed: str = ""  # a traceback

    def said_after(self, step: int) -> str:
        return self.said.partition(f"-- step {step}\n")[2]


class Marks:
    """`__sublet__` of the program."""

    def __init__(self, program: Program, begun_from: tuple[int, State] | None, taken_after: set[int]) -> None:
        self.program, self.begun_from, self.taken_after = program, begun_from, taken_after
        self.count = 0
        self.variant = 0  # a program may ask for it, to be unlike itself
        self.life = Life()
        self.run_to_the_end: Callable[[Callable[[], Any]], NoReturn]

    def begin(self) -> None:
        self.life.when = "begin"
        if self.begun_from is None:
            if unknown := self.program.begin(sys._getframe(1)):
                raise CannotBeSaved([(part.path, part.thing, part.why) for part in unknown])
            self.program.take(sys._getframe(1))
            self.life.when = "step"
            return
        self.life.when = "resume"
        self.count, state = self.begun_from
        self.program.begin(sys._getframe(1), state.numbering)
        go_on = self.program.put(state.taken())
        sys.stdout.seek(0)
        sys.stdout.truncate()
        print(f"-- step {self.count}")
        self.life.when = "step"
        self.run_to_the_end(lambda: go_on(lambda: None))

    def step(self) -> None:
        self.count += 1
        if self.count in self.taken_after:
            taken = self.program.take(sys._getframe(1))
            self.life.states[self.count] = State(
                taken.data,
                taken.recipes,
                {name: bytes(block) for name, block in taken.blocks.items()},
                dict(taken.sizes),
                pickle.loads(pickle.dumps(self.program.numbering())),
            )
        print(f"-- step {self.count}")


def _execute(code: types.CodeType) -> None:
    """The frame below the program's first."""
    exec(code, sys.modules["__main__"].__dict__)


def _forget_the_tests() -> None:
    """What pytest set up in the process that this one was forked from."""
    known = [one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger)]
    for logger in (logging.root, *known):
        logger.handlers.clear()
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if isinstance(signal.getsignal(number), types.FunctionType | types.MethodType):
            signal.signal(number, signal.SIG_DFL)


def _live(
    text: str,
    own: frozenset[str],
    begun_from: tuple[int, State] | None,
    taken_after: set[int],
    variant: int = 0,
    *,
    end: Callable[[Life], NoReturn],
) -> NoReturn:
    """The program in this process, which ends with it."""
    _forget_the_tests()
    program = Program(lambda name: name == "__main__" or name in own, _execute.__code__)
    remember_visibly({"__main__", *own})  # type: ignore[arg-type]
    marks = Marks(program, begun_from, taken_after)
    marks.variant = variant
    main = types.ModuleType("__main__")
    main.__dict__.update({"__file__": "/program.py", "__sublet__": marks, "__cached__": None})
    sys.modules["__main__"] = main
    marked = re.sub(r"(?<!\.)\b(begin|step)\(\)", r"__sublet__.\1()", text)
    said = sys.stdout = io.StringIO()

    def run_to_the_end(run: Callable[[], Any]) -> NoReturn:
        try:
            run()
        except CannotBeSaved as error:
            marks.life.refused = "; ".join(
                f"{path} {type(thing).__qualname__} {why}" for path, thing, why in error.found
            )
        except SubletError as error:
            marks.life.refused = error.message
        except BaseException:
            marks.life.failed = traceback.format_exc()
        marks.life.said = said.getvalue()
        end(marks.life)

    marks.run_to_the_end = run_to_the_end
    run_to_the_end(lambda: _execute(compile(marked, "/program.py", "exec", dont_inherit=True)))


def _elsewhere(*arguments: Any, disturbed: int = 0) -> Life:
    """The same in a process that is forked, whose memory is laid out otherwise."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reads)

        def end(life: Life) -> NoReturn:
            status = 1
            try:
                with open(writes, "wb") as out:
                    out.write(pickle.dumps(life))
                status = 0
            finally:
                os._exit(status)

        try:
            lain_about = _disturb_memory(disturbed)  # noqa: F841 - for as long as the program lives
            _live(*arguments, end=end)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(1)
    os.close(writes)
    with open(reads, "rb") as back:
        data = back.read()
    _, status = os.waitpid(pid, 0)
    if status or not data:
        return Life(failed=f"the process ended with {os.waitstatus_to_exitcode(status)}")
    life: Life = pickle.loads(data)
    return life


def _disturb_memory(seed: int) -> list[Any]:
    """Objects that are made now lie elsewhere."""
    chance = random.Random(seed)
    made = [bytearray(chance.randrange(1, 600)) for _ in range(2000 if seed else 0)]
    made += [{n: [n]} for n in range(len(made))]
    chance.shuffle(made)
    return made[: len(made) // 2]


@dataclass(slots=True)
class Carried:
    """What the three made of one program."""

    said: str = ""
    refused: str = ""
    fault: str = ""

    def check(self) -> None:
        """It went on in both, and there was something to see."""
        assert not self.refused
        assert not self.fault, self.fault
        assert self.said.count("-- step") >= 2, self.said


def _carry(text: str, modules: Mapping[str, str] | None = None) -> Carried:
    with _importable(modules or {}):
        own = frozenset(modules or ())
        first = _elsewhere(text, own, None, {FIRST, FIRST + 1})
        if first.refused and first.when == "begin":
            return Carried(refused=first.refused)
        if first.failed or first.refused:
            return Carried(fault=f"first: {first.failed or first.refused}")
        again = _elsewhere(text, own, (FIRST, first.states[FIRST]), {FIRST + 1}, disturbed=1)
        if fault := _fault(first, again, FIRST, "second"):
            return Carried(fault=fault)
        found = differences(first.states[FIRST + 1].to_compare(), again.states[FIRST + 1].to_compare())
        if found:
            return Carried(fault=f"compared: {'; '.join(map(str, found[:5]))}")
        third = _elsewhere(text, own, (FIRST + 1, again.states[FIRST + 1]), set(), disturbed=2)
        if fault := _fault(first, third, FIRST + 1, "third"):
            return Carried(fault=fault)
    return Carried(said=first.said_after(FIRST))


def _fault(first: Life, later: Life, step: int, name: str) -> str:
    if later.failed or later.refused:
        return f"{name}: {later.failed or later.refused}"
    if later.said_after(step) != first.said_after(step):
        return f"{name} said:\n{later.said_after(step)}\ninstead of:\n{first.said_after(step)}"
    return ""


@contextlib.contextmanager
def _importable(modules: Mapping[str, str]) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        for name, text in modules.items():
            Path(folder, f"{name}.py").write_text(text)
        sys.path.insert(0, folder)
        try:
            yield
        finally:
            sys.path.remove(folder)


def _differences_between(text: str) -> list[Difference]:
    before, now = (_elsewhere(text, frozenset(), None, {FIRST}, variant) for variant in (0, 1))
    assert [before.failed, now.failed] == ["", ""]
    return differences(before.states[FIRST].to_compare(), now.states[FIRST].to_compare())


@functools.cache
def _small_process() -> Connection:
    """To an interpreter that answers until this process ends."""
    here, there = Pipe()
    command = [sys.executable, "-m", "tests.training.program_state.carried", str(there.fileno())]
    path = os.pathsep.join([str(Path(sublet.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    asked = subprocess.Popen(
        command, pass_fds=[there.fileno()], cwd=Path(__file__).parents[3], env=environment
    )
    there.close()
    atexit.register(lambda: (here.close(), asked.wait(10)))
    return here


def _there(what: Callable[..., T], *arguments: Any) -> T:
    with _small_process_lock:
        link = _small_process()
        link.send((what.__name__, arguments))
        fine, answer = link.recv()
    assert fine, answer
    return answer  # type: ignore[no-any-return]


def carry(text: str, modules: Mapping[str, str] | None = None) -> Carried:
    return _there(_carry, text, modules)


def differences_between(text: str) -> list[Difference]:
    """Of one program that does something else where it asks for the `variant`, after the same step."""
    return _there(_differences_between, text)


def assert_carried(text: str, modules: Mapping[str, str] | None = None) -> None:
    carry(text, modules).check()


def carry_elsewhere(programs: Mapping[str, str], origin: Any) -> dict[str, Carried]:
    """All of them in one process that has been started for it, and forks."""
    from tests.forked import Forked

    command = [sys.executable, "-m", "tests.training.program_state.carried"]
    pipe = subprocess.PIPE
    with Forked(
        command, origin=origin, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=Path(__file__).parents[3]
    ) as child:
        out, error = child.communicate(json.dumps(dict(programs)), timeout=120)
    assert child.returncode == 0, error
    return {name: Carried(**found) for name, found in json.loads(out).items()}


def serve(number: int) -> None:
    """Answer what is asked through this descriptor, until nobody is left to ask."""
    with contextlib.suppress(ImportError):
        import numpy  # noqa: F401
    link = Connection(number)
    with contextlib.suppress(EOFError):
        while True:
            what, arguments = link.recv()
            try:
                answer = (
                    True,
                    {"_carry": _carry, "_differences_between": _differences_between}[what](*arguments),
                )
            except Exception:
                answer = False, traceback.format_exc()
            link.send(answer)


def main() -> None:
    """Programs by name on standard input, what became of them on standard output."""
    programs = json.load(sys.stdin)
    out = sys.stdout
    found = {name: asdict(_carry(text)) for name, text in programs.items()}
    json.dump(found, out)
    out.flush()


if __name__ == "__main__":
    # Its classes are pickled by name.
    from tests.training.program_state import carried

    carried.serve(int(sys.argv[1])) if len(sys.argv) > 1 else carried.main()
