"""`--policy KNOB=VALUE` of `sublet sim …`: what another policy would have done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import click

from sublet.core.errors import BadInput
from sublet.core.leasing.policy import Policy

policy_option = click.option(
    "--policy",
    "knobs",
    multiple=True,
    metavar="KNOB=VALUE",
    help="Of ours, as under [policy] in sublet.toml: promote_after=6h, idle_after=1s. May be repeated.",
)


def with_knobs(policy: Policy, knobs: Sequence[str]) -> Policy:
    """The same with these changed."""
    known = {field.name for field in fields(Policy)}
    table: dict[str, object] = {}
    for knob in knobs:
        name, given, value = knob.partition("=")
        if not given:
            raise BadInput(f"policy {knob[:40]!r} is no knob with a value: write promote_after=6h")
        plain = f"{name}_us" not in known
        table[name] = (
            value == "true"
            if value in ("true", "false")
            else int(value)
            if plain and value.isdigit()
            else value
        )
    made = Policy.from_table(table)
    names = [name if name in known else f"{name}_us" for name in table]
    return replace(policy, **{name: getattr(made, name) for name in names})
