"""Writes docs/reference/*.md from the code, so that the reference cannot drift. `make docs`; a test compares."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from sublet.cli.main import cli, exit_code
from sublet.core.errors import SubletError, error_tree
from sublet.core.leasing.policy import Policy
from sublet.core.values import format_duration
from sublet.settings import SPECS

HERE = Path(__file__).parent / "reference"
NOTE = "<!-- Written by docs/generate.py. -->\n"


def command_pages(command: click.Command, path: str, parent: click.Context | None) -> list[str]:
    # With the settings the command itself is run with, as `make_context` does: a command keeps the help option of the first context it
    # saw, so a page made with others would depend on who used the command before.
    settings = {**command.context_settings, "max_content_width": 100}
    context = click.Context(command, info_name=path.split()[-1], parent=parent, **settings)
    text = command.get_help(context)
    pages = [f"## {path}\n\n```text\n{text}\n```\n"]
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if child is not None:
                pages += command_pages(child, f"{path} {name}", context)
    return pages


def cli_page() -> str:
    codes = """Exit codes: 0 done · 2 the request is wrong · 69 the ledger does not answer · 70 a bug in sublet · 71 the device \
failed · 73 somebody was first · 74 it was not saved · 75 no lease · 76 the lease is lost · 77 the token is refused · 78 the installation is wrong · 79 a resume came out differently · 85 \
preempted and committed · 124 time limit · 126, 127 the command cannot be run · 130 interrupted · 137 killed after its grace. Every listing takes `--json`; an error is then JSON on standard error.
"""
    return "# Command line\n" + NOTE + "\n" + codes + "\n" + "\n".join(command_pages(cli, "sublet", None))


def settings_page() -> str:
    lines = [
        "# Settings and policy",
        NOTE,
        "Defaults < `sublet.toml` (in the current folder, else in the home) < environment < argument.",
        "",
    ]
    lines += ["| setting in sublet.toml | variable | what |", "|---|---|---|"]
    lines += [f"| `{s.name}` | `{s.variable}` | {s.help} |" for s in SPECS]
    lines += [
        "",
        "## Policy",
        "",
        "Under `[policy]` in `sublet.toml`. A new ledger stores these defaults. Where the section is there, a warden writes",
        "the whole policy into the ledger when it starts, and a knob that it does not name gets its default; where it is not,",
        "the ledger keeps what it has.",
        "",
    ]
    lines += ["| knob | default |", "|---|---|"]
    for field in dataclasses.fields(Policy):
        value = getattr(Policy(), field.name)
        if field.name.endswith("_us"):
            lines.append(f"| `{field.name.removesuffix('_us')}` | {format_duration(value)} |")
        else:
            lines.append(f"| `{field.name}` | {str(value).lower()} |")
    return "\n".join(lines) + "\n"


def errors_page() -> str:
    lines = [
        "# Errors",
        NOTE,
        "Every error says what happened, has a stable code, and says what to do next.",
        "",
    ]
    lines += ["| class | code | exit | means | next |", "|---|---|---|---|---|"]
    for cls in error_tree():
        if cls is SubletError or cls.__module__ != "sublet.core.errors":
            continue
        error = cls()
        lines.append(
            f"| `{cls.__name__}` | `{cls.code}` | {exit_code(error)} | {error.message} | {error.remedy} |"
        )
    return "\n".join(lines) + "\n"


PAGES = {"cli.md": cli_page, "settings.md": settings_page, "errors.md": errors_page}

if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (HERE / name).write_text(page())
