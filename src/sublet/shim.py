"""`python -m sublet.shim train.py`: a training script that knows nothing of sublet, made resumable without
changing it.

Rules of this file:
- The script is looked at before anything runs, then runs as it would under plain `python`: the same name,
  arguments, path and exit code.
- `training.scripts.boundaries` marks where its steps end, and `training.scripts.script` saves it there.
"""

from __future__ import annotations

import atexit
import hashlib
import multiprocessing
import os
import re
import sys
import types
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click

from sublet.cli.main import complain, exit_code
from sublet.core.errors import BadInput, SubletError
from sublet.core.notice import DEFAULT_GRACE
from sublet.core.values import format_size
from sublet.settings import load_settings, variable
from sublet.training.program_state.loader_workers import watch_loaders
from sublet.training.scripts import event_writers
from sublet.training.scripts.boundaries import (
    NAME,
    Source,
    orders_by_hash,
    uses_sublet_train,
    with_boundaries,
)
from sublet.training.scripts.ending import FINISHED, ProcessStart, leave_process, let_go
from sublet.training.scripts.file_history import FileHistory
from sublet.training.scripts.importing import OwnFinder, OwnModules, WhenImported, remember_visibly
from sublet.training.scripts.library_loops import watch_libraries
from sublet.training.scripts.script import Around, Inventory, Script, ScriptOptions
from sublet.training.scripts.signal_handlers import hold_handlers_back
from sublet.training.train import DEFAULT_TIER, train

#: Any will do, as long as it is always the same.
HASH_SEED = "20260"
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
@click.option("--grace", help=f"Time to leave after a signal.  [default: {DEFAULT_GRACE}]")
@click.option(
    "--loop", type=int, metavar="LINE", help="The training loop, where the script does not make it clear."
)
@click.option(
    "--ignore", multiple=True, metavar="PATH", help="Leave this out of what is saved: no step depends on it."
)
@click.option(
    "--verify",
    help="Which resumes repeat an interval and compare it: auto, always, first or never.  [default: "
    "SUBLET_VERIFY, or auto]",
)
@click.option("--no-rehearsal", is_flag=True, help="Do not start a new version twice to see that it resumes.")
@click.option("--changed-ok", is_flag=True, help="Go on although the script changed since the last save.")
@click.option("--quiet", is_flag=True, help="No progress line.")
@click.option(
    "--explain", is_flag=True, help="Run up to the training loop, say what would be saved, and stop."
)
@click.argument("script", type=click.Path())
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def shim(
    script: str,
    arguments: tuple[str, ...],
    loop: int | None,
    ignore: tuple[str, ...],
    no_rehearsal: bool,
    changed_ok: bool,
    quiet: bool,
    explain: bool,
    **options: Any,
) -> int:
    """Run a training SCRIPT so that it can be killed at any moment and continues where it was, bit for bit.

    Its training loop is found by itself. Steps count once, are saved behind the next ones, and on any warning
    that the GPU will go the script is saved and ended with exit code 85. Start it again, the same way, to
    continue.
    """
    source, path = look_at(script, loop)
    given = {key: value for key, value in options.items() if value is not None}
    name = given.pop("name", None) or variable("JOB") or name_of(path, arguments)
    every: str | int = int(given["every"]) if given["every"].isdigit() else given["every"]
    own = OwnModules()
    around = Around(
        path=path,
        arguments=arguments,
        ends_at=execute.__code__,
        memory=load_settings().home / "run" / "resumes",
        say=lambda text: print(f"{name}: {text}", file=sys.stderr),
        fail=fail,
        restart=partial(restart, ProcessStart()),
        explain=print_inventory if explain else None,
    )
    wanted = ScriptOptions(
        ignored=frozenset(ignore),
        rehearse=not (no_rehearsal or (options["verify"] or load_settings()["verify"]) == "never"),
        changed_ok=changed_ok,
    )
    running = Script(own, around, wanted)
    watch_imports(own, running)
    code = compile(source.tree, str(path), "exec", dont_inherit=True)
    run = train(name, {"script": running}, progress=not (quiet or explain), **{**given, "every": every})
    if not run.version and _has_our_hash_seed and orders_by_hash(source.tree):
        around.say(
            f"sets of texts are in the order of PYTHONHASHSEED={HASH_SEED} in each of its starts; plain "
            "Python draws another order each time"
        )
    if running.was_changed and run.repeats:
        run.repeat_nothing()  # it would come out differently
    running.belongs_to(run)
    hold_handlers_back()
    if explain:
        for found in source.loops:
            where = f" in {found.scope}" if found.scope else ""
            click.echo(f"training loop   line {found.line}, a '{found.kind}'{where}: {found.why}")
    elif running.is_over or run.is_marked(FINISHED):
        run.close()
        click.echo(
            f"{name}: finished already, at step {run.committed:,}; nothing was run. Another --name begins "
            "anew",
            err=True,
        )
        return 0
    else:
        running.prints_once(around.memory / f"{name}.printed")
        home = load_settings().home
        if not source.loops:
            running.says_if_no_step_comes()
        running.keeps_files(FileHistory(around.memory / f"{name}.files", cwd=Path.cwd(), left_alone=[home]))
    become(script, path, arguments, running)
    return running.run_to_the_end(lambda: execute(code))


def watch_imports(own: OwnModules, running: Script) -> None:
    """Steps are marked in the user's own modules too, and libraries are told what to tell."""
    imports = WhenImported()
    sys.meta_path[:0] = [OwnFinder(own, running), imports]
    for module in event_writers.MODULES:
        imports.do(module, partial(event_writers.know_event_writers, module))
    watch_libraries(imports, running)
    imports.do("torch.utils.data.dataloader", lambda: watch_loaders(own.names))
    remember_visibly(own)
    atexit.register(let_go, own.names)


def look_at(script: str, loop: int | None) -> tuple[Source, Path]:
    if int(os.environ.get("WORLD_SIZE", "1") or 1) > 1:
        raise BadInput(
            "the shim resumes one process, and this is one of several; nothing was started",
            remedy="in a script for several ranks use run = sublet.train(...), for step in run.steps(n)",
        )
    path = Path(script).absolute()
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise BadInput(
            f"{script} cannot be read: {e}; nothing was started", remedy="name a Python script"
        ) from e
    source = with_boundaries(text, str(path), line=loop)
    line = uses_sublet_train(source.tree)
    if line is not None:
        raise BadInput(
            f"{path}, line {line}: it resumes by itself; nothing was started",
            remedy="run it with plain python",
        )
    return source, path


def name_of(path: Path, arguments: Sequence[str]) -> str:
    """The same script with the same arguments is the same job."""
    digest = hashlib.sha256("\0".join([str(path), *arguments]).encode("utf-8", "surrogateescape")).hexdigest()
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", path.stem).strip("-_")[:60]
    return f"{stem or 'script'}-{digest[:8]}"


def become(script: str, path: Path, arguments: Sequence[str], running: Script) -> None:
    """Look to the script as `python script arguments` would."""
    main = types.ModuleType("__main__")
    main.__dict__.update({"__file__": str(path), "__cached__": None, NAME: running})
    sys.modules["__main__"] = main
    sys.argv = [script, *arguments]
    sys.path[0] = str(path.parent)


def execute(code: types.CodeType) -> None:
    """The frame below the script's first."""
    exec(code, sys.modules["__main__"].__dict__)


def fail(error: SubletError) -> NoReturn:
    """End the process: the script is not to catch what is said to its user."""
    complain(error, as_json=False)
    leave_process(exit_code(error))


def restart(start: ProcessStart) -> NoReturn:
    """This process becomes the same program anew, with nothing of what the script changed in it."""
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    start.again()


def print_inventory(found: Inventory) -> None:
    """Print what would be saved when the training loop begins."""
    click.echo(f"modules         {', '.join(found.modules)}")
    for function, variables in found.functions:
        click.echo(f"running         {function}, with {', '.join(variables) or 'no variables'}")
    memory = sum(size for _, size in found.blocks)
    click.echo(
        f"saved           {found.objects:,} objects in {format_size(found.bytes)}, and {len(found.blocks)} "
        f"blocks of memory with {format_size(memory)}"
    )
    for path, size in found.blocks[:12]:
        click.echo(f"  block         {path}: {format_size(size)}")
    for path in found.ignored:
        click.echo(f"left out        {path}")
    click.echo(
        "also saved      where each function and generator is, the random states, the environment, open "
        "files and what is written to them. Data bases, sockets and other processes are not"
    )


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


#: Set before anything runs.
_has_our_hash_seed = False


def with_one_hash_seed() -> None:
    """Each process of a script gives sets of texts the same order: this one begins again if it would not."""
    global _has_our_hash_seed
    if os.environ.get("PYTHONHASHSEED", "random") == "random":
        environment = os.environ | {"PYTHONHASHSEED": HASH_SEED}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    if os.environ["PYTHONHASHSEED"] == HASH_SEED:
        del os.environ["PYTHONHASHSEED"]  # what the script starts is as it would be without us
        _has_our_hash_seed = True


if __name__ == "__main__":
    with_one_hash_seed()
    main()
