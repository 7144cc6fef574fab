"""One life of a program: a process that runs it under plain Python, or under the shim until it is killed.

Rules of this file:
- What it knows of the library's inside is in `arm`, and nowhere else: that a step ends with `loop.Run.end_step`, that the run has
  `step` and `committed`, and how many steps a rehearsal repeats. Whoever moves these changes that one function.
- A process is forked from one that has imported everything (`tests.forked`), or started as users start it (`fresh`). One that replaces
  itself by `exec`, as a rehearsal does, stays under control: it is forked anew with what an `exec` passes on (environment, folder,
  umask, signals that are ignored or blocked), or really executed (`fresh`).
- A kill is SIGKILL from the process itself at the end of a step, or a timer of the system whose signal nobody handles. Only the process
  that was started kills itself: a child that it forks to try something is left alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from tests import forked

#: Imported ahead in the process that is forked: what programs import, so that a life costs milliseconds.
AHEAD = [
    "sublet.shim",
    "numpy",
    "numpy.random",
    "asyncio",
    "argparse",
    "bisect",
    "collections",
    "concurrent.futures",
    "configparser",
    "contextlib",
    "csv",
    "ctypes",
    "dataclasses",
    "datetime",
    "decimal",
    "enum",
    "fractions",
    "gzip",
    "heapq",
    "logging.handlers",
    "pathlib",
    "queue",
    "sched",
    "shelve",
    "sqlite3",
    "statistics",
    "subprocess",
    "tempfile",
    "threading",
    "typing",
    "uuid",
    "weakref",
    "xml.etree.ElementTree",
    "zipfile",
    "click",
    "yaml",
    "tqdm",
]
AHEAD_WITH_TORCH = [
    "torch",
    "torch._dynamo",
    "torch.utils.data",
    "torch.optim.swa_utils",
    "safetensors.torch",
]
#: Exit code of a process that would execute itself, and how often one may.
_STARTS_ANEW, _MOST_RESTARTS = 199, 6
_RUN = "import sys; from tests.training.programs.life import main; main(sys.argv[1])"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """At the end of step `at` (before it counts, or after), or `seconds` after that; with `at` 0 so long after the start."""

    at: int
    after: bool = False  # when the step was counted, which may have begun a save
    seconds: float = 0.0
    group: bool = False  # all processes that it started are killed with it
    again: bool = False  # only once the process has started itself anew

    def __str__(self) -> str:
        when = "start" if self.at == 0 else f"{self.at}{'+' if self.after else ''}"
        flags = f"{'g' if self.group else ''}{'r' if self.again else ''}"
        return f"{when}{f'/{self.seconds:.4f}' if self.seconds else ''}{flags}"


@dataclass(slots=True, kw_only=True)
class Life:
    """What became of it."""

    code: int = 0
    out: str = ""  # what it printed
    err: str = ""
    steps: list[tuple[int, int]]  # those that were counted, and what was committed then
    hung: bool = False
    restarts: int = 0  # how often it started itself anew

    @property
    def killed(self) -> bool:
        return self.code in (-signal.SIGKILL, -signal.SIGALRM) and not self.hung

    @property
    def resumed_at(self) -> int:
        return self.steps[0][0] - 1 if self.steps else 0

    @property
    def committed(self) -> int:
        return max((committed for _, committed in self.steps), default=0)


# --- in the judge's process ----------------------------------------------------------------------------------


class Starter:
    """Starts lives, each under one of two hash seeds."""

    def __init__(self, *, fresh: bool = False) -> None:
        self.fresh = fresh
        self._origins: dict[tuple[bool, int], forked.Origin] = {}
        self._starting = Lock()
        if not fresh:
            forked.run(
                [sys.executable, "-c", "pass"], check=True
            )  # a life asks the same process for its warden

    def live(
        self,
        script: Path,
        *,
        environment: Mapping[str, str],
        options: tuple[str, ...] | None = None,  # of the shim; None is plain Python
        kill: Kill | None = None,
        torch: bool = False,
        repeated: int = 0,  # steps of a rehearsal; 0: as many as there are otherwise
        hash_seed: int = 1,
        limit_s: float = 60.0,
    ) -> Life:
        folder = script.parent
        out, err = (folder.parent / f"{folder.name}.{end}" for end in ("out", "err"))
        # What lies in the home is not the program's: the history of its files leaves it alone.
        notes = Path(environment.get("SUBLET_HOME", folder.parent))
        notes.mkdir(mode=0o700, parents=True, exist_ok=True)
        log, handed = (notes / f"{folder.parent.name}.{end}" for end in ("log", "handed"))
        log.unlink(missing_ok=True)
        plan: dict[str, Any] = {
            "script": str(script),
            "options": options,
            "kill": kill and asdict(kill),
            "log": str(log),
            "repeated": repeated,
            "path": [path for path in sys.path if path],  # packages that only the judge's environment names
            "handed": None if self.fresh else str(handed),
            "passed_on": {},
            "restarts": 0,
        }
        own = {name: value for name, value in environment.items() if name != "PYTHONHASHSEED"}
        life = Life(steps=[])
        printed = out.stat().st_size if out.exists() else 0
        err.unlink(missing_ok=True)
        where = folder
        while True:
            life.code, life.hung = self._start(plan, own, where, (out, err), kill, torch, hash_seed, limit_s)
            if life.code != _STARTS_ANEW or plan["restarts"] >= _MOST_RESTARTS:
                break
            passed = json.loads(handed.read_text())
            own, where = passed.pop("environment"), Path(passed.pop("folder"))
            plan |= {"passed_on": passed, "restarts": plan["restarts"] + 1}
        for line in log.read_text().split("\n")[:-1] if log.exists() else []:
            step, committed = map(int, line.split())
            if step:
                life.steps.append((step, committed))
            else:
                life.restarts += 1
        with out.open("rb") as stream:
            stream.seek(printed)
            life.out = stream.read().decode(errors="replace")
        life.err = err.read_text(errors="replace")
        return life

    def _start(
        self,
        plan: dict[str, Any],
        environment: dict[str, str],
        folder: Path,
        printed: tuple[Path, Path],
        kill: Kill | None,
        torch: bool,
        hash_seed: int,
        limit_s: float,
    ) -> tuple[int, bool]:
        """One process: its exit code, and whether it hung."""
        command = [sys.executable, "-c", _RUN, json.dumps(plan)]
        with printed[0].open("a") as told, printed[1].open("a") as said:
            streams = {"stdin": subprocess.DEVNULL, "stdout": told, "stderr": said, "cwd": folder}
            if self.fresh:
                environment["PYTHONHASHSEED"] = str(hash_seed)
                environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
                process = subprocess.Popen(
                    command, env=environment, start_new_session=True, text=True, **streams
                )  # type: ignore[call-overload]
            else:
                origin = self._origin(torch, hash_seed)
                process = forked.Forked(
                    command, origin=origin, env=environment, start_new_session=True, **streams
                )
        hung = False
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            hung = True
            process.kill()
            process.wait()
        if hung or process.returncode >= 0 or (kill is not None and kill.group):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, hung

    def _origin(self, torch: bool, hash_seed: int) -> forked.Origin:
        key = (torch, hash_seed)
        with self._starting:
            if key not in self._origins:
                modules = [*forked.MODULES, *AHEAD, *(AHEAD_WITH_TORCH if torch else ())]
                environment = {"PYTHONHASHSEED": str(hash_seed), "OMP_NUM_THREADS": "1"}
                self._origins[key] = forked.Origin(modules, **environment)
            return self._origins[key]

    def __enter__(self) -> Starter:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        for origin in self._origins.values():
            origin.end()
        self._origins.clear()


# --- in the life ---------------------------------------------------------------------------------------------


def main(plan: str) -> None:
    told = json.loads(plan)
    script = told["script"]
    sys.path += [path for path in told["path"] if path not in sys.path]
    if told["options"] is None:
        _forget_the_tests()
        run_plainly(script)
        return
    notes = os.open(told["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    _take_over(told["passed_on"])
    arm(Kill(**told["kill"]) if told["kill"] else None, notes, told["repeated"], told["restarts"])
    _follow_exec(told, notes)
    _forget_the_tests()
    from sublet import shim

    sys.argv = [shim.__file__, *told["options"], os.path.basename(script)]
    sys.orig_argv = [sys.executable, "-m", "sublet.shim", *sys.argv[1:]]
    shim.main()


def _forget_the_tests() -> None:
    """A user's process has none of them, and what looks for the user's modules must not find any."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    here = str(Path(__file__).parents[3])
    sys.path[:] = [path for path in sys.path if path != here]


def _follow_exec(told: dict[str, Any], notes: int) -> None:
    """A shim that starts itself anew stays armed: whatever it executes, this is run again."""
    execve, here = os.execve, str(Path(__file__).parents[3])

    def again(program: object, args: object, environment: Mapping[str, str] | None = None) -> None:
        given = dict(os.environ if environment is None else environment)
        os.write(notes, b"0 0\n")
        if told["handed"] is None:
            plan = json.dumps({**told, "restarts": told["restarts"] + 1})
            execve(sys.executable, [sys.executable, "-c", _RUN, plan], {**given, "PYTHONPATH": here})
        with open(told["handed"], "w") as file:
            json.dump({"environment": given, "folder": os.getcwd(), **_passed_on()}, file)
        os._exit(_STARTS_ANEW)

    if os.environ.get("PYTHONPATH") == here:
        del os.environ["PYTHONPATH"]  # it was put there by us
    os.execv = os.execve = os.execvp = os.execvpe = again  # type: ignore[assignment]


_SIGNALS = [number for number in signal.valid_signals() if number not in (signal.SIGKILL, signal.SIGSTOP)]


def _passed_on() -> dict[str, Any]:
    """What a program that is executed has from the one before, besides its environment and folder."""
    umask = os.umask(0)
    ignored = [int(n) for n in _SIGNALS if signal.getsignal(n) is signal.SIG_IGN]
    return {"umask": umask, "ignored": ignored, "blocked": [*map(int, signal.pthread_sigmask(0, []))]}


def _take_over(passed: dict[str, Any]) -> None:
    if passed:
        os.umask(passed["umask"])
        for number in passed["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, passed["blocked"])


def run_plainly(script: str) -> None:
    import types

    module = types.ModuleType("__main__")
    module.__dict__.update({"__file__": script, "__cached__": None})
    sys.modules["__main__"] = module
    name = os.path.basename(script)
    sys.argv, sys.orig_argv = [name], [sys.executable, name]
    sys.path[0] = str(Path(script).parent)
    exec(compile(Path(script).read_text(), script, "exec"), module.__dict__)


def arm(kill: Kill | None, notes: int, repeated: int, restarts: int) -> None:
    """Note each step that is counted, and kill where that was asked for."""
    from sublet.training import loop
    from sublet.training.scripts import rehearsal

    mine = os.getpid()
    count = loop.Run.end_step
    if repeated:
        rehearsal.MOST_REPEATED = repeated
    if kill is not None and kill.again and not restarts:
        kill = None

    def end_step(run: loop.Run) -> None:
        if os.getpid() != mine:
            count(run)
            return
        step = run.step + 1
        due = kill is not None and kill.at == step
        if due and not kill.after:
            _die(kill)
        os.write(notes, f"{step} {run.committed}\n".encode())
        count(run)
        if due and kill.after:
            _die(kill)

    loop.Run.end_step = end_step  # type: ignore[method-assign]
    if kill is not None and kill.at == 0:
        _die(kill)


def _die(kill: Kill) -> None:
    if kill.seconds:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, kill.seconds)
    else:
        os.kill(os.getpid(), signal.SIGKILL)
