"""`sublet tenant token …` as operators use it."""

from __future__ import annotations

import pytest

from sublet.core.errors import TokenRevoked
from sublet.core.studio.token import Credential, Scope
from sublet.ports.ledger import Ledger
from sublet.studio.tokens import claimed, let_in
from sublet.wiring import open_ledger
from tests.cli.test_commands import as_json, sublet
from tests.homes import Home


def enter(ledger: Ledger, text: str) -> Credential:
    token_id, secret = claimed(text)
    return let_in(ledger.look_token(token_id), secret, ledger.now())


def test_a_token_from_add_to_revoke(sqlite_home: Home) -> None:
    home, ledger = sqlite_home, open_ledger(sqlite_home.settings)
    as_json(home, "tenant", "add", "ada")
    added = sublet(home, "tenant", "token", "add", "ada", "--expires", "30d", "--note", "laptop")
    assert added.returncode == 0, added.stderr
    text = added.stdout.strip()  # alone, so that TOKEN=$(…) keeps it
    assert "not stored" in added.stderr
    assert text not in added.stderr
    shown = enter(ledger, text)
    assert (shown.tenant, shown.scope) == ("ada", Scope.USER)

    [listed] = as_json(home, "tenant", "token", "ls", "ada")
    assert (listed["id"], listed["state"], listed["note"]) == (shown.token_id, "valid", "laptop")
    assert listed["expires_at"] - listed["created_at"] == pytest.approx(30 * 86_400)
    table = sublet(home, "tenant", "token", "ls").stdout
    secret = text.rpartition("_")[2]
    assert secret not in table + str(listed)
    assert shown.token_id in table

    rotated = as_json(home, "tenant", "token", "rotate", shown.token_id)
    with pytest.raises(TokenRevoked):
        enter(ledger, text)
    assert enter(ledger, rotated["token"]).token_id == rotated["id"]

    assert "opens nothing" in sublet(home, "tenant", "token", "revoke", rotated["id"]).stdout
    assert as_json(home, "tenant", "token", "revoke", rotated["id"])["state"] == "revoked"
    with pytest.raises(TokenRevoked):
        enter(ledger, rotated["token"])
    said = sublet(home, "journal", "tail").stdout
    assert "token.rotated" in said
    assert secret not in said


def test_what_is_mistyped_is_said_and_a_token_is_never_echoed(sqlite_home: Home) -> None:
    home = sqlite_home
    as_json(home, "tenant", "add", "ada")
    made = as_json(home, "tenant", "token", "add", "ada", "--scope", "operator")
    assert made["scope"] == "operator"
    assert made["expires_at"] is None
    for words in (
        ["revoke", made["token"]],
        ["rotate", made["token"]],
        ["add", "ada", "--note", made["token"]],
    ):
        refused = sublet(home, "tenant", "token", *words)
        assert refused.returncode == 2
        assert made["token"] not in refused.stdout + refused.stderr
    assert sublet(home, "tenant", "token", "ls", "nobody").returncode == 2
    assert sublet(home, "tenant", "token", "add", "nobody").returncode == 2
