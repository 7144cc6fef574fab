"""Tokens in the ledger, on both engines: made, shown, rotated, revoked; and a secret that is nowhere (threat 4, A1)."""

from __future__ import annotations

import json
import threading

import pytest

from sublet.core.errors import BadInput, NotFound, TokenExpired, TokenRevoked, Unauthorized
from sublet.core.leasing.tenancy import Tenant
from sublet.core.studio.token import Credential, Scope, digest_of, parse_token, text_of
from sublet.ledger.verbs.studio import tokens
from sublet.ledger.verbs.studio import tokens as token_verbs
from sublet.ports.ledger import Ledger
from sublet.studio.tokens import NewToken, claimed, let_in, new_token
from tests.ledger.rig import MINUTE, Rig


def make(rig: Rig, tenant: str = "ada", **options: object) -> NewToken:
    new = new_token()
    rig.ledger.add_token(new.id, new.digest, tenant, actor="op", **options)  # type: ignore[arg-type]
    return new


def let_in_by(ledger: Ledger, text: str) -> Credential:
    """What the edge does with a token's text."""
    token_id, secret = claimed(text)
    return let_in(ledger.look_token(token_id), secret, ledger.now())


def enter(rig: Rig, text: str) -> Credential:
    return let_in_by(rig.ledger, text)


@pytest.fixture
def pool(rig: Rig) -> Rig:
    rig.tenant("ada")
    rig.tenant("bob")
    return rig


def test_a_token_says_whose_it_is_and_what_it_may(pool: Rig) -> None:
    mine, theirs = make(pool), make(pool, "bob", scope=Scope.OPERATOR)
    assert enter(pool, mine.text) == Credential(tenant="ada", scope=Scope.USER, token_id=mine.id)
    assert enter(pool, theirs.text) == Credential(tenant="bob", scope=Scope.OPERATOR, token_id=theirs.id)
    assert [t.id for t in pool.ledger.tokens("ada")] == [mine.id]
    assert {t.id for t in pool.ledger.tokens()} == {mine.id, theirs.id}


def test_showing_a_token_writes_nothing(pool: Rig) -> None:
    token = make(pool)
    with pool.only_journals():
        enter(pool, token.text)
        with pytest.raises(Unauthorized):
            enter(pool, token.text[:-1] + ("0" if token.text[-1] != "0" else "1"))


def test_whoever_does_not_know_the_secret_learns_nothing(pool: Rig) -> None:
    """Not a token, a token nobody made, a wrong secret, also of tokens that are over: the same words and the same work."""
    valid, short, gone = make(pool), make(pool, lifetime_us=MINUTE), make(pool)
    pool.ledger.revoke_token(gone.id, actor="op")
    pool.advance(2 * MINUTE)
    other = parse_token(new_token().text)
    assert other is not None
    shown = ["", "nonsense", "sublet_", valid.text[:-1], text_of(*other)]
    shown += [text_of(t.id, other[1]) for t in (valid, short, gone)]
    answers = []
    for text in shown:
        with pytest.raises(Unauthorized) as refused:
            enter(pool, text)
        answers.append((type(refused.value), refused.value.message, refused.value.remedy))
    assert set(answers) == {(Unauthorized, Unauthorized.__doc__, Unauthorized.remedy)}
    # The same look and the same comparison follow for each: what stands for a text that is no token is as long.
    assert {tuple(map(len, claimed(text))) for text in shown} == {tuple(map(len, other))}


def test_a_token_expires_and_says_so_to_whoever_has_it(pool: Rig) -> None:
    token = make(pool, lifetime_us=MINUTE)
    assert enter(pool, token.text).tenant == "ada"
    pool.advance(MINUTE + 1)
    with pytest.raises(TokenExpired, match=token.id):
        enter(pool, token.text)


def test_a_revoked_token_is_refused_at_once_everywhere(pool: Rig) -> None:
    """T1."""
    token = make(pool)
    elsewhere = pool.open()
    assert let_in_by(elsewhere, token.text).tenant == "ada"
    pool.ledger.revoke_token(token.id, actor="op")
    for ledger in (pool.ledger, elsewhere, pool.open()):
        with pytest.raises(TokenRevoked, match=token.id):
            let_in_by(ledger, token.text)
    with pool.only_journals():
        again = pool.ledger.revoke_token(token.id, actor="op")
    assert again.revoked_at
    assert pool.kinds(token.id) == ["token.added", "token.revoked"]


def test_a_rotation_replaces_the_secret_now_or_after_the_overlap(pool: Rig) -> None:
    old, new, newest = make(pool, note="laptop", scope=Scope.OPERATOR), new_token(), new_token()
    pool.ledger.rotate_token(old.id, new.id, new.digest, actor="op")
    with pytest.raises(TokenRevoked):
        enter(pool, old.text)
    assert enter(pool, new.text).scope is Scope.OPERATOR
    pool.ledger.rotate_token(new.id, newest.id, newest.digest, actor="op", overlap_us=MINUTE)
    assert enter(pool, new.text).token_id == new.id
    assert enter(pool, newest.text).token_id == newest.id
    pool.advance(MINUTE + 1)
    with pytest.raises(TokenExpired):
        enter(pool, new.text)
    assert enter(pool, newest.text).token_id == newest.id
    assert [t.note for t in pool.ledger.tokens("ada")] == ["laptop"] * 3
    with pytest.raises(BadInput, match="revoked"):
        pool.ledger.rotate_token(old.id, new_token().id, new_token().digest, actor="op")
    assert pool.kinds(newest.id) == ["token.rotated"]


def test_two_rotations_at_once_leave_one_successor(pool: Rig) -> None:
    old, outcomes = make(pool), []

    def rotate() -> None:
        new, ledger = new_token(), pool.open()
        try:
            ledger.rotate_token(old.id, new.id, new.digest, actor="op")
            outcomes.append("made")
        except BadInput:
            outcomes.append("refused")

    threads = [threading.Thread(target=rotate) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(outcomes) == ["made", "refused"]
    assert len(pool.ledger.tokens("ada")) == 2


def test_a_try_whose_answer_was_lost_is_not_a_second_token(pool: Rig) -> None:
    new, successor = new_token(), new_token()

    def again(work: object) -> object:
        def run(tx: object) -> object:
            tx.again = True  # type: ignore[attr-defined]
            return work(tx)  # type: ignore[operator]

        return pool.ledger.engine.write(run, durable=False)

    add = ("ada", Scope.USER, 0, "", "op")
    for _ in range(2):
        made = again(lambda tx: token_verbs.add(tx, new.id, new.digest, *add))
        assert made.id == new.id  # type: ignore[attr-defined]
    for _ in range(2):
        made = again(lambda tx: token_verbs.rotate(tx, new.id, successor.id, successor.digest, 0, "op"))
        assert made.id == successor.id  # type: ignore[attr-defined]
    assert len(pool.ledger.tokens("ada")) == 2
    with pytest.raises(BadInput):  # an id that exists is not handed to somebody with another secret
        pool.ledger.add_token(new.id, digest_of("other"), "bob", actor="op")


def test_a_tenant_that_goes_takes_its_tokens_along(pool: Rig) -> None:
    token = make(pool, "bob")
    pool.ledger.remove_tenant("bob", actor="op")
    pool.ledger.add_tenant(Tenant(name="bob"), actor="op", returning=True)
    with pytest.raises(TokenRevoked):
        enter(pool, token.text)
    assert pool.kinds(token.id) == ["token.added", "token.revoked"]


def test_a_restored_ledger_lets_no_old_token_in(pool: Rig) -> None:
    """One that was revoked after the backup was made is valid in it."""
    token = make(pool)
    pool.ledger.mark_restored(actor="op")
    with pytest.raises(TokenRevoked):
        enter(pool, token.text)
    assert enter(pool, make(pool).text).tenant == "ada"


def test_a_canary_secret_is_in_no_row_and_its_digest_in_no_journal(pool: Rig) -> None:
    made = [make(pool, note="canary"), new_token(), new_token()]
    pool.ledger.rotate_token(made[0].id, made[1].id, made[1].digest, actor="op", overlap_us=MINUTE)
    pool.ledger.rotate_token(made[1].id, made[2].id, made[2].digest, actor="op")
    for token in made:
        enter(pool, made[2].text)
        with pytest.raises(BadInput) as refused:
            pool.ledger.revoke_token(token.text, actor="op")
        assert token.text not in refused.value.message
    pool.ledger.revoke_token(made[2].id, actor="op")
    rows = pool.dump()
    secrets = [parse_token(token.text)[1] for token in made]  # type: ignore[index]
    for secret in secrets:
        assert secret not in repr(rows)
        assert secret[:16] not in repr(rows)
        assert digest_of(secret) in repr(rows["token"])
        assert digest_of(secret) not in repr({name: r for name, r in rows.items() if name != "token"})
    assert made[0].text not in repr(made)
    assert pool.faults() == []


def test_every_change_has_its_journal_row(pool: Rig) -> None:
    token = make(pool, note="laptop", lifetime_us=MINUTE)
    [(tenant, body)] = pool.sql("SELECT tenant, body FROM journal WHERE subject = ?", token.id)
    said = json.loads(body)
    assert tenant == "ada"
    assert (said["by"], said["note"], said["scope"]) == ("op", "laptop", "user")
    assert said["expires_at"] == pool.ledger.look_token(token.id).expires_at  # type: ignore[union-attr]


def test_what_is_not_there_is_refused_and_writes_nothing(pool: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    new = new_token()
    with pool.only_journals():
        with pytest.raises(NotFound):
            make(pool, "nobody")
        with pytest.raises(NotFound):
            pool.ledger.revoke_token(new.id, actor="op")
        with pytest.raises(NotFound):
            pool.ledger.rotate_token(new.id, new_token().id, new.digest, actor="op")
        for bad in ({"lifetime_us": -1}, {"note": "a\nb"}):
            with pytest.raises(BadInput):
                make(pool, **bad)
        assert pool.ledger.look_token(new.id) is None
        monkeypatch.setattr(tokens, "TOKENS_MAX", 0)
        with pytest.raises(BadInput, match="the most allowed"):
            make(pool)
