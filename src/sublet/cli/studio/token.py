"""`sublet tenant token …`: the tokens by which a service recognises a tenant."""

from __future__ import annotations

import click

from sublet.cli.leases.operate import actor
from sublet.cli.output import instant, json_option, print_json, print_table
from sublet.core.studio.token import Scope, Token, judge
from sublet.core.values import parse_duration
from sublet.json_shapes import at_or_none
from sublet.settings import load_settings
from sublet.studio.tokens import new_token
from sublet.wiring import open_ledger

_ONCE = "keep it now: it is not stored and cannot be shown again"


def _token_json(token: Token, now: int) -> dict[str, object]:
    return {
        "id": token.id,
        "tenant": token.tenant,
        "scope": token.scope.value,
        "state": judge(token, now) or "valid",
        "note": token.note,
        "created_at": at_or_none(token.created_at),
        "expires_at": at_or_none(token.expires_at),
        "revoked_at": at_or_none(token.revoked_at),
    }


def _print_once(made: Token, text: str, now: int, as_json: bool) -> None:
    """Print the token alone on standard output, so that a script can keep it, and its description on standard
    error."""
    if as_json:
        print_json({**_token_json(made, now), "token": text})
        return
    click.echo(text)
    until = f"until {instant(made.expires_at)}" if made.expires_at else "without an end"
    click.echo(f"{made.scope.value} token {made.id} of {made.tenant}, valid {until}; {_ONCE}", err=True)


@click.group(epilog="Example:  sublet tenant token add ada")
def token() -> None:
    """What a tenant shows a service: add, list, rotate, revoke."""


@token.command(epilog="Example:  sublet tenant token add ada --expires 30d --note laptop")
@click.argument("name")
@click.option(
    "--scope",
    type=click.Choice([s.value for s in Scope]),
    default=Scope.USER.value,
    show_default=True,
    help="An operator's token opens what belongs to every tenant.",
)
@click.option(
    "--expires", default=None, help="After how long it is refused, for example 30d; none: not by itself."
)
@click.option("--note", default="", help="What it is for, as listings show it.")
@json_option
def add(name: str, scope: str, expires: str | None, note: str, as_json: bool) -> None:
    """Make a token for a tenant and print it, once."""
    ledger = open_ledger(load_settings())
    new = new_token()
    made = ledger.add_token(
        new.id,
        new.digest,
        name,
        actor=actor(),
        scope=Scope(scope),
        lifetime_us=0 if expires in (None, "none") else parse_duration(expires, what="expires"),
        note=note,
    )
    _print_once(made, new.text, ledger.now(), as_json)


@token.command("ls", epilog="Example:  sublet tenant token ls ada --json")
@click.argument("name", required=False)
@json_option
def list_tokens(name: str | None, as_json: bool) -> None:
    """List tokens, of one tenant or of all: what they are for and whether they are valid, never the
    tokens."""
    ledger = open_ledger(load_settings())
    if name:
        ledger.tenant(name)  # a name that was mistyped is not a tenant without tokens
    now, found = ledger.now(), ledger.tokens(name or "")
    if as_json:
        print_json([_token_json(t, now) for t in found])
        return
    print_table(
        ["TOKEN", "TENANT", "SCOPE", "STATE", "CREATED", "EXPIRES", "NOTE"],
        [
            (
                t.id,
                t.tenant,
                t.scope.value,
                judge(t, now) or "valid",
                instant(t.created_at),
                instant(t.expires_at) or "-",
                t.note or "-",
            )
            for t in found
        ],
        empty="no tokens; 'sublet tenant token add NAME' makes one",
    )


@token.command(epilog="Example:  sublet tenant token rotate 0123456789abcdef --overlap 1h")
@click.argument("token_id", metavar="TOKEN")
@click.option("--overlap", default="0", show_default=True, help="How long the old one is accepted beside it.")
@json_option
def rotate(token_id: str, overlap: str, as_json: bool) -> None:
    """Print a successor, once. TOKEN is the old one's id; it is refused at once, or after the overlap."""
    ledger = open_ledger(load_settings())
    new = new_token()
    made = ledger.rotate_token(
        token_id, new.id, new.digest, actor=actor(), overlap_us=parse_duration(overlap, what="overlap")
    )
    _print_once(made, new.text, ledger.now(), as_json)


@token.command(epilog="Example:  sublet tenant token revoke 0123456789abcdef")
@click.argument("token_id", metavar="TOKEN")
@json_option
def revoke(token_id: str, as_json: bool) -> None:
    """Refuse a token from now on. TOKEN is its id."""
    ledger = open_ledger(load_settings())
    revoked = ledger.revoke_token(token_id, actor=actor())
    if as_json:
        print_json(_token_json(revoked, ledger.now()))
    else:
        click.echo(f"{revoked.id}: revoked, it opens nothing any more")
