"""Tenants' tokens, as operators make, rotate and revoke them.

Rules of this file:
- Every change has its journal row in the same transaction; neither a secret nor its digest is in it (A1).
- Using a token writes nothing: looking one up is a read.
- Rows of tokens that are over stay, so that whoever still uses one is told what happened to it.
"""

from __future__ import annotations

from sublet.core.errors import BadInput, NotFound, SubletError
from sublet.core.studio.token import Scope, Token, judge, rotated
from sublet.ledger.tx import Row, Tx, write_main
from sublet.ledger.verbs.leasing.slices import load_tenant, unknown_tenant

COLUMNS = "id, tenant, scope, digest, note, created_at, expires_at, revoked_at"
_SELECT = f"SELECT {COLUMNS} FROM token"

#: More than any tenant needs; a script that makes one per run finds out here.
TOKENS_MAX = 1000


def of_row(r: Row) -> Token:
    return Token(
        id=r[0],
        tenant=r[1],
        scope=Scope(r[2]),
        digest=r[3],
        note=r[4],
        created_at=r[5],
        expires_at=r[6],
        revoked_at=r[7],
    )


#: Read for every request that shows a token.
BY_ID = f"{_SELECT} WHERE id = ?"


def token_of(row: Row | None) -> Token | None:
    return of_row(row) if row else None


def look(tx: Tx, token_id: str) -> Token | None:
    return token_of(tx.row(BY_ID, token_id))


def list_tokens(tx: Tx, tenant: str) -> list[Token]:
    if tenant:
        return [of_row(r) for r in tx.rows(f"{_SELECT} WHERE tenant = ? ORDER BY created_at, id", tenant)]
    return [of_row(r) for r in tx.rows(f"{_SELECT} ORDER BY tenant, created_at, id")]


def _unknown(token_id: str) -> NotFound:
    return NotFound(f"there is no token {token_id[:40]}", remedy="'sublet tenant token ls' lists them")


def _insert(tx: Tx, token: Token) -> None:
    tx.run(
        f"INSERT INTO token ({COLUMNS}) VALUES (?,?,?,?,?,?,?,?)",
        token.id,
        token.tenant,
        token.scope.value,
        token.digest,
        token.note,
        token.created_at,
        token.expires_at,
        token.revoked_at,
    )


def _described(token: Token, actor: str) -> dict[str, object]:
    return {"scope": token.scope.value, "note": token.note, "expires_at": token.expires_at, "by": actor}


def add(
    tx: Tx,
    token_id: str,
    secret_digest: str,
    tenant: str,
    scope: Scope,
    lifetime_us: int,
    note: str,
    actor: str,
) -> Token | SubletError:
    _ = tx.pool
    known = look(tx, token_id)
    if known is not None:
        return (
            known if tx.again and known.digest == secret_digest else BadInput("there is such a token already")
        )
    if load_tenant(tx, tenant) is None:
        return unknown_tenant(tenant)
    count = tx.row(
        "SELECT count(*) FROM token WHERE tenant = ? AND revoked_at = 0 AND (expires_at = 0 OR expires_at "
        "> ?)",
        tenant,
        tx.now,
    )
    if count is not None and count[0] >= TOKENS_MAX:
        return BadInput(
            f"tenant {tenant} has {count[0]} tokens, the most allowed",
            remedy="revoke what nobody uses: 'sublet tenant token ls'",
        )
    token = Token(
        id=token_id,
        tenant=tenant,
        scope=scope,
        digest=secret_digest,
        note=note,
        created_at=tx.now,
        expires_at=tx.now + lifetime_us if lifetime_us else 0,
    )
    _insert(tx, token)
    write_main(tx, "token.added", tenant, token.id, _described(token, actor))
    return token


def rotate(
    tx: Tx, token_id: str, new_id: str, new_digest: str, overlap_us: int, actor: str
) -> Token | SubletError:
    _ = tx.pool
    made = look(tx, new_id)
    if made is not None:
        return made if tx.again and made.digest == new_digest else BadInput("there is such a token already")
    old = look(tx, token_id)
    if old is None:
        return _unknown(token_id)
    over = judge(old, tx.now)
    if over:
        return BadInput(
            f"token {token_id} is {over}, so there is nothing to rotate",
            remedy=f"make a new one: sublet tenant token add {old.tenant}",
        )
    leaving, successor = rotated(old, new_id, new_digest, tx.now, overlap_us)
    tx.run(
        "UPDATE token SET expires_at = ?, revoked_at = ? WHERE id = ?",
        leaving.expires_at,
        leaving.revoked_at,
        leaving.id,
    )
    _insert(tx, successor)
    write_main(
        tx,
        "token.rotated",
        old.tenant,
        successor.id,
        {**_described(successor, actor), "replaces": old.id, "overlap_us": overlap_us},
    )
    return successor


def revoke(tx: Tx, token_id: str, actor: str) -> Token | SubletError:
    """Revoking twice is fine: the first time stands."""
    _ = tx.pool
    token = look(tx, token_id)
    if token is None:
        return _unknown(token_id)
    if not token.revoked_at:
        _revoke(tx, token, actor, "")
    revoked = look(tx, token_id)
    assert revoked is not None
    return revoked


def _revoke(tx: Tx, token: Token, actor: str, why: str) -> None:
    tx.run("UPDATE token SET revoked_at = ? WHERE id = ?", tx.now, token.id)
    body: dict[str, object] = {"scope": token.scope.value, "by": actor}
    if why:
        body["reason"] = why
    write_main(tx, "token.revoked", token.tenant, token.id, body)


def revoke_all(tx: Tx, tenant: str, actor: str, why: str) -> int:
    """Revoke all tokens of a tenant, or with '' all there are."""
    found = [t for t in list_tokens(tx, tenant) if not t.revoked_at]
    for token in found:
        _revoke(tx, token, actor, why)
    return len(found)
