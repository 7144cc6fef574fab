"""`python -m sublet.shim train.py`: a training script that knows nothing of sublet, made resumable without changing it.

Rules of this file:
- The script is looked at before anything runs, then runs as it would under plain `python`: the same name, arguments, path and exit code.
- What is found is `rewriting.finding`'s, what is put around it `rewriting.inserting`'s, what that does `runtime.script`'s.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from sublet.cli.main import complain, exit_code
from sublet.core.errors import BadInput, SubletError
from sublet.core.values import format_size
from sublet.rewriting.finding import Found, find
from sublet.rewriting.inserting import NAME, insert
from sublet.runtime.script import LeftAfterTheLoops, Script
from sublet.runtime.train import Preempted, Run
from sublet.training import DEFAULT_TIER, train

EXAMPLE = "Example:  python -m sublet.shim --name resnet --vram 8GB train.py --epochs 90"


@click.command(
    context_settings={
        "help_option_names": ["-h", "--help"],
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "max_content_width": 110,
    },
    epilog=EXAMPLE,
)
@click.option(
    "--name", help="Of the job; the same over restarts.  [default: SUBLET_JOB, or from script and arguments]"
)
@click.option(
    "--every", default="auto", show_default=True, help="How often to save: steps, a duration, or auto."
)
@click.option("--vram", help="Lease so much.")
@click.option("--ttl", help="The lease ends after this unless renewed.")
@click.option("--tier", default=DEFAULT_TIER, show_default=True, help="Priority class of the lease.")
@click.option("--wait", help="For a GPU, at most so long.")
@click.option("--grace", help="Time to leave after a signal.  [default: 15s]")
@click.option(
    "--loop", type=int, metavar="LINE", help="The training loop, where the script does not make it clear."
)
@click.option("--quiet", is_flag=True, help="No progress line.")
@click.option(
    "--explain", is_flag=True, help="Run up to the training loop, say what would be saved, and stop."
)
@click.argument("script", type=click.Path())
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def shim(
    script: str, arguments: tuple[str, ...], loop: int | None, quiet: bool, explain: bool, **options: Any
) -> int:
    """Run a training SCRIPT so that it can be killed at any moment and continues where it was, bit for bit.

    Its training loop is found by itself. Steps count once, are saved behind the next ones, and on any warning that the GPU will go the
    script saves and leaves with exit code 85. Start it again, the same way, to continue.
    """
    found, path = look_at(script, loop)
    if explain:
        click.echo(describe(found))
    given = {key: value for key, value in options.items() if value is not None}
    name = given.pop("name", None) or os.environ.get("SUBLET_JOB") or name_of(path, arguments)
    every: str | int = int(given["every"]) if given["every"].isdigit() else given["every"]
    running = Script(
        found,
        str(path),
        ours=_of_the_script(path.parent),
        say=lambda text: print(f"{name}: {text}", file=sys.stderr),
        explain=_print_captured if explain else None,
    )
    code = compile(insert(found), str(path), "exec")
    run = train(name, {"script": running}, progress=not (quiet or explain), **{**given, "every": every})
    running.belongs_to(run)
    return execute(code, script, path, arguments, running, run)


def look_at(script: str, loop: int | None) -> tuple[Found, Path]:
    if int(os.environ.get("WORLD_SIZE", "1") or 1) > 1:
        raise BadInput(
            "the shim resumes one process, and this is one of several; nothing was started",
            remedy="in a script for several ranks use run = sublet.train(...), for step in run.steps(n)",
        )
    path = Path(script).absolute()
    try:
        source = path.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise BadInput(
            f"{script} cannot be read: {e}; nothing was started", remedy="name a Python script"
        ) from e
    return find(source, str(path), line=loop), path


def name_of(path: Path, arguments: Sequence[str]) -> str:
    """The same script with the same arguments is the same job."""
    digest = hashlib.sha256("\0".join([str(path), *arguments]).encode("utf-8", "surrogateescape")).hexdigest()
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", path.stem).strip("-_")[:60]
    return f"{stem or 'script'}-{digest[:8]}"


def _of_the_script(folder: Path) -> Callable[[type], bool]:
    """Classes of the script and of the modules beside it: what their objects are made of is the user's own data."""
    known: dict[type, bool] = {}

    def ours(kind: type) -> bool:
        if kind not in known:
            file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
            beside = file.startswith(f"{folder}/") and "site-packages" not in file
            known[kind] = kind.__module__ == "__main__" or beside
        return known[kind]

    return ours


def execute(
    code: types.CodeType, script: str, path: Path, arguments: Sequence[str], running: Script, run: Run
) -> int:
    """As `python script arguments` would. Returns the exit code, or raises the script's own SystemExit."""
    main = types.ModuleType("__main__")
    main.__dict__.update({"__file__": str(path), "__cached__": None, NAME: running})
    sys.modules["__main__"] = main
    sys.argv = [script, *arguments]
    sys.path[0] = str(path.parent)
    finished = listening = False
    try:
        exec(code, main.__dict__)
        running.ended()
        finished = True
        return 0
    except SystemExit as leaving:
        running.ended()
        listening = isinstance(leaving, (Preempted, LeftAfterTheLoops))
        finished = True
        raise
    except SubletError:
        raise
    except BaseException as error:
        running.ended()
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != str(path):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    finally:
        if not listening or not run.preempted:
            run.close(finished=finished, listening=listening)


def describe(found: Found) -> str:
    """What was seen in the source."""
    loop = found.training
    lines = [
        f"training loop   line {loop.line}, a '{loop.kind}' in {loop.scope or 'the module'}: {found.why}"
    ]
    for outer in reversed(found.loops[:-1]):
        lines.append(f"inside          line {outer.line}, a '{outer.kind}' in {outer.scope or 'the module'}")
    for scope in found.scopes:
        if scope.kept:
            lines.append(f"variables       of {scope.key or 'the module'}: {', '.join(sorted(scope.kept))}")
        if scope.dropped:
            lines.append(f"not needed      {', '.join(sorted(scope.dropped))}: made anew in each iteration")
    grads = (
        "saved: they are carried from step to step"
        if found.grads_carried
        else "not saved: each step clears them first"
    )
    lines.append(f"gradients       {grads}")
    return "\n".join(lines)


def _print_captured(running: Script) -> None:
    """What is there when the training loop begins."""
    objects, left_alone = running.inventory()
    for name, kind, size in objects:
        click.echo(f"saved           {name}: {kind}, {format_size(size)}")
    for name, why in left_alone.items():
        click.echo(f"left alone      {name}: {why}")


def main() -> None:
    try:
        code = shim.main(prog_name="python -m sublet.shim", standalone_mode=False)
    except SubletError as error:
        complain(error, as_json=False)
        code = exit_code(error)
    except click.exceptions.Exit as leaving:
        code = leaving.exit_code
    except click.ClickException as usage:
        usage.show()
        code = usage.exit_code
    except click.Abort:
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
