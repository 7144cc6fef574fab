"""What every deployed file is asked: does the command parse, is the variable a setting, does the route exist."""

from __future__ import annotations

import dataclasses
import http.client
from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from sublet.cli.main import cli
from sublet.settings import SPECS

#: Read by the scripts of deploy/slurm, and not settings of ours.
OF_SCRIPTS = {"SUBLET_NODE_HOME", "SUBLET_DRAIN", "SUBLET_SLURM"}
SETTINGS = {spec.variable for spec in SPECS}


def check_variables(names: Iterable[str]) -> None:
    unknown = {name for name in names if name.startswith("SUBLET_")} - SETTINGS
    assert not unknown, f"no such settings: {sorted(unknown)}"


@dataclasses.dataclass(frozen=True, slots=True)
class Parsed:
    verb: str
    values: dict[str, object]
    rest: tuple[str, ...]


def _words(context: click.Context) -> list[str]:
    return [*context._protected_args, *context.args]


def check_command(command: Sequence[str]) -> Parsed:
    """As the real command line parses it, without running it: the verb, its options as they would be, what follows them."""
    words = list(command)
    assert words[0].rsplit("/", 1)[-1] == "sublet", words
    context = cli.make_context("sublet", words[1:], resilient_parsing=False)
    name, found, rest = cli.resolve_command(context, _words(context))
    verb = name or ""
    while isinstance(found, click.Group):
        inner = found.make_context(verb, list(rest), parent=context)
        sub, found, rest = found.resolve_command(inner, _words(inner))
        verb, context = f"{verb} {sub}", inner
    assert found is not None
    parsed = found.make_context(verb, list(rest), parent=context)
    return Parsed(verb, dict(parsed.params), tuple(parsed.args))


def answered(paths: Iterable[str], folder: Path) -> dict[str, int]:
    """What a real studio says to each of them."""
    from sublet.settings import load_settings
    from tests.ledger.rig import sqlite_rig
    from tests.studio.running import add_device, running, settings_of

    (folder / "home" / "run").mkdir(parents=True)
    rig = sqlite_rig(folder)
    try:
        add_device(rig.ledger)
        with running(rig.ledger, settings_of(load_settings(), rig.url, str(folder / "home"))) as studio:
            found = {}
            for path in paths:
                link = http.client.HTTPConnection("127.0.0.1", studio.port, timeout=20)
                link.request("GET", path)
                found[path] = link.getresponse().status
                link.close()
            return found
    finally:
        rig.close()
