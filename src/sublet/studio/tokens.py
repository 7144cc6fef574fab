"""Tokens at the edge: created from real randomness, and verified.

Rules of this file:
- A token's text exists once, in the return value of `new_token`. It is printed, never stored.
- Something that is not a token, an unknown token and a wrong secret get the same error after the same work:
  one look into the ledger and one comparison. Only a caller with the right secret is told that the token has
  ended, and why.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from sublet.core.errors import TokenExpired, TokenRevoked, Unauthorized
from sublet.core.studio.token import (
    ID_BYTES,
    SECRET_BYTES,
    Credential,
    Token,
    digest_of,
    judge,
    opens,
    parse_token,
    text_of,
)

#: Used when there is nothing to look up: no row has this id, no secret this digest.
_NOBODY = "-" * (2 * ID_BYTES)
_NO_SECRET = "-" * (2 * SECRET_BYTES)
_NO_DIGEST = "-" * 64


@dataclass(frozen=True, slots=True, kw_only=True)
class NewToken:
    id: str
    digest: str
    text: str = field(repr=False)  # a record is printed in tracebacks and logs


def new_token() -> NewToken:
    token_id, secret = secrets.token_hex(ID_BYTES), secrets.token_hex(SECRET_BYTES)
    return NewToken(id=token_id, digest=digest_of(secret), text=text_of(token_id, secret))


def claimed(text: str) -> tuple[str, str]:
    """The id to look up and the secret to compare, even for a text that is no token."""
    return parse_token(text) or (_NOBODY, _NO_SECRET)


def let_in(token: Token | None, secret: str, now: int) -> Credential:
    """The credential, if the secret is right for `token`, which was found under the claimed id."""
    right = opens(secret, token.digest if token is not None else _NO_DIGEST)
    if token is None or not right:
        raise Unauthorized
    over = judge(token, now)
    if over == "revoked":
        raise TokenRevoked(f"token {token.id} was revoked or rotated; nothing was read or changed")
    if over:
        raise TokenExpired(f"token {token.id} has expired; nothing was read or changed")
    return Credential(tenant=token.tenant, scope=token.scope, token_id=token.id)
