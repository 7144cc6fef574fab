"""`sublet tenant token …` as operators use it."""

from __future__ import annotations

import pytest

from sublet.core.errors import TokenRevoked
from sublet.core.token import Scope
from sublet.runtime.tokens import authenticate
from sublet.wiring import open_ledger
from tests.runtime.conftest import Home, sqlite_home  # noqa: F401

from .test_commands import as_json, sublet


def test_a_token_from_add_to_revoke(sqlite_home: Home) -> None:  # noqa: F811
    home, ledger = sqlite_home, open_ledger(sqlite_home.settings)
    as_json(home, "tenant", "add", "ada")
    added = sublet(home, "tenant", "token", "add", "ada", "--expires", "30d", "--note", "laptop")
    assert added.returncode == 0, added.stderr
    text = added.stdout.strip()  # alone, so that TOKEN=$(…) keeps it
    assert "not stored" in added.stderr
    assert text not in added.stderr
    shown = authenticate(ledger, text, ledger.now())
    assert (shown.tenant, shown.scope) == ("ada", Scope.USER)

    [listed] = as_json(home, "tenant", "token", "ls", "ada")
    assert (listed["id"], listed["state"], listed["note"]) == (shown.token_id, "valid", "laptop")
    assert listed["expires_at"] - listed["created_at"] == 30 * 86_400 * 10**6
    table = sublet(home, "tenant", "token", "ls").stdout
    secret = text.rpartition("_")[2]
    assert secret not in table + str(listed)
    assert shown.token_id in table

    rotated = as_json(home, "tenant", "token", "rotate", shown.token_id)
    with pytest.raises(TokenRevoked):
        authenticate(ledger, text, ledger.now())
    assert authenticate(ledger, rotated["token"], ledger.now()).token_id == rotated["id"]

    assert "opens nothing" in sublet(home, "tenant", "token", "revoke", rotated["id"]).stdout
    assert as_json(home, "tenant", "token", "revoke", rotated["id"])["state"] == "revoked"
    with pytest.raises(TokenRevoked):
        authenticate(ledger, rotated["token"], ledger.now())
    said = sublet(home, "journal", "tail").stdout
    assert "token.rotated" in said
    assert secret not in said


def test_what_is_mistyped_is_said_and_a_token_is_never_echoed(sqlite_home: Home) -> None:  # noqa: F811
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
