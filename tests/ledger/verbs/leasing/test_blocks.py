"""Block leases on both engines: granted, attached, renewed, recorded, kept, removed; every verb journalled, refusals too (A1)."""

from __future__ import annotations

import threading
import uuid
from dataclasses import replace
from typing import Any

import pytest

from sublet.core.errors import (
    BadInput,
    BlockHeld,
    Fenced,
    LeaseLost,
    NotFound,
    QuotaReached,
    Stale,
    SubletError,
)
from sublet.core.leasing.block import UNKNOWN_SEQUENCE, BlockRequest, BlockState
from sublet.core.leasing.lease import EndReason, Holder
from sublet.ledger.verbs.leasing.after_restore import EPOCH_GAP
from sublet.machine import failpoints
from sublet.ports.ledger import BlockAnswer, BlockRecord, LeaseKey
from tests.ledger.rig import HERE, MINUTE, SECOND, Rig

ME, OTHER = Holder(host=HERE, pid=42, started=420), Holder(host=HERE, pid=43, started=430)
HOUR, DAY = 60 * MINUTE, 24 * 60 * MINUTE


class Blocks:
    def __init__(self, rig: Rig) -> None:
        self.rig, self.secrets = rig, {}

    def grant(self, holder: Holder = ME, tenant: str = "ada", **over: Any) -> BlockAnswer:
        block_id, secret = "B" + uuid.uuid4().hex[:20], uuid.uuid4().hex
        request = BlockRequest(tenant=tenant, **{"blocks": 8, "ttl_us": HOUR, "keep_us": DAY, **over})
        answer = self.rig.ledger.grant_block(block_id, secret, request, holder)
        self.secrets[answer.block.epoch] = secret
        return answer

    def attach(self, block_id: str, holder: Holder = OTHER, tenant: str = "ada", **over: Any) -> BlockAnswer:
        secret = uuid.uuid4().hex
        answer = self.rig.ledger.attach_block(block_id, secret, tenant, holder, **over)
        self.secrets[answer.block.epoch] = secret
        return answer

    def key(self, answer: BlockAnswer) -> LeaseKey:
        return LeaseKey(answer.block.id, answer.block.epoch, self.secrets[answer.block.epoch])

    def record(self, answer: BlockAnswer, sequence: int) -> BlockAnswer:
        done = BlockRecord(sequence=sequence, digest=f"digest-{sequence}", bytes=sequence * 10)
        return self.rig.ledger.record_block(self.key(answer), done)

    def release(self, answer: BlockAnswer) -> bool:
        return self.rig.ledger.release_block(answer.block.id, self.secrets[answer.block.epoch])

    def look(self, answer: BlockAnswer) -> Any:
        return self.rig.ledger.look_block(answer.block.id, answer.block.tenant).block


@pytest.fixture
def blocks(rig: Rig) -> Blocks:
    rig.tenant("ada")
    rig.tenant("bob")
    return Blocks(rig)


def test_a_grant_says_who_may_write_until_when(blocks: Blocks) -> None:
    answer = blocks.grant()
    block = answer.block
    assert (block.state, block.blocks, block.size_bytes, block.holder) == (BlockState.HELD, 8, 32768, ME)
    assert block.expires_at == answer.at + HOUR
    assert (block.sequence, block.digest, block.ended_at) == (0, "", 0)
    assert blocks.look(answer) == block
    assert blocks.rig.kinds(block.id) == ["block.granted"]
    assert blocks.rig.faults() == []


def test_epochs_rise_over_blocks_and_leases_together(blocks: Blocks) -> None:
    """L1."""
    blocks.rig.device()
    epochs = [blocks.grant().block.epoch, blocks.rig.ask().lease.epoch, (last := blocks.grant()).block.epoch]
    blocks.release(last)
    epochs += [blocks.attach(last.block.id).block.epoch, blocks.rig.ask().lease.epoch]
    assert epochs == sorted(set(epochs))
    assert blocks.rig.faults() == []


def test_repeating_a_grant_or_an_attach_finds_out_what_it_did(blocks: Blocks) -> None:
    """S5: the reply is lost, the caller asks again with the same id and secret."""
    ledger, request = blocks.rig.ledger, BlockRequest(tenant="ada", blocks=8, ttl_us=HOUR)
    first = ledger.grant_block("B" + "1" * 20, "secret", request, ME)
    assert ledger.grant_block("B" + "1" * 20, "secret", request, ME).block == first.block
    with pytest.raises(NotFound):
        ledger.grant_block("B" + "1" * 20, "another", request, ME)
    ledger.release_block("B" + "1" * 20, "secret")
    attached = ledger.attach_block("B" + "1" * 20, "second", "ada", OTHER)
    assert ledger.attach_block("B" + "1" * 20, "second", "ada", OTHER).block == attached.block
    assert blocks.rig.kinds("B" + "1" * 20) == ["block.granted", "block.ended", "block.attached"]


def test_a_lost_reply_of_a_record_is_found_out(blocks: Blocks) -> None:
    answer = blocks.grant()
    first = blocks.record(answer, 1)
    assert blocks.record(answer, 1).block == first.block
    assert blocks.rig.kinds(answer.block.id).count("block.checkpointed") == 1
    blocks.rig.advance(HOUR)
    assert blocks.record(answer, 1).block.sequence == 1, "it was recorded in time, however late that is asked"


def test_renewing_moves_the_expiry_and_nothing_else(blocks: Blocks) -> None:
    answer = blocks.grant()
    blocks.rig.advance(30 * MINUTE)
    renewed = blocks.rig.ledger.renew_block(blocks.key(answer))
    assert renewed.block == replace(answer.block, expires_at=renewed.at + HOUR)
    assert blocks.rig.kinds(answer.block.id) == ["block.granted", "block.renewed"]
    assert blocks.rig.faults() == []


@pytest.mark.parametrize("how", ["expired", "released", "taken", "removed"])
def test_a_holder_that_lost_it_may_do_nothing(blocks: Blocks, how: str) -> None:
    """L3, S2: not renew, not write, not record; what is recorded stays as it is."""
    answer = blocks.grant()
    blocks.record(answer, 1)
    ledger, key = blocks.rig.ledger, blocks.key(answer)
    if how == "expired":
        blocks.rig.advance(HOUR)
    elif how == "released":
        assert blocks.release(answer)
    elif how == "taken":
        blocks.attach(answer.block.id, dead_epoch=answer.block.epoch)
    else:
        ledger.remove_block(answer.block.id, "ada", ME, actor="test")
    if how == "expired":  # the first to notice writes it down
        with pytest.raises(LeaseLost, match="expired"):
            ledger.check_block(key)
        assert blocks.look(answer).reason is EndReason.EXPIRED
        assert blocks.rig.kinds(answer.block.id)[-2:] == ["block.ended", "block.write_refused"]
    error = Fenced if how == "taken" else LeaseLost
    for verb, kind in (
        (lambda: ledger.renew_block(key), "block.renew_refused"),
        (lambda: ledger.check_block(key), "block.write_refused"),
        (lambda: blocks.record(answer, 2), "block.record_refused"),
    ):
        with blocks.rig.only_journals(kind), pytest.raises(error):
            verb()
    assert blocks.rig.faults() == []


def test_the_holder_before_last_is_refused_too(blocks: Blocks) -> None:
    first = blocks.grant()
    second = blocks.attach(first.block.id, dead_epoch=first.block.epoch)
    third = blocks.attach(first.block.id, ME, dead_epoch=second.block.epoch)
    for old, error in ((second, Fenced), (first, LeaseLost)):
        for verb in (blocks.rig.ledger.check_block, blocks.rig.ledger.renew_block):
            with pytest.raises(error):
                verb(blocks.key(old))
        with pytest.raises(error):
            blocks.record(old, 1)
    assert blocks.record(third, 1).block.sequence == 1


def test_a_forged_key_opens_nothing_and_learns_nothing(blocks: Blocks) -> None:
    """Threat 6, T1: the same words for a wrong secret, a wrong epoch and a block that is not there."""
    answer = blocks.grant()
    right = blocks.key(answer)
    said = set()
    for key in (
        replace(right, secret="x"),
        replace(right, secret=""),
        replace(right, epoch=right.epoch + 1, secret="x"),
        LeaseKey("B" + "0" * 20, 1, "x"),
    ):
        for verb in (blocks.rig.ledger.check_block, blocks.rig.ledger.renew_block):
            with blocks.rig.only_journals(), pytest.raises(LeaseLost) as refused:
                verb(key)
            said.add(refused.value.message.replace(key.lease_id, "ID"))
    assert len(said) == 1
    with pytest.raises(Fenced):
        blocks.rig.ledger.check_block(replace(right, epoch=right.epoch + 1))
    with pytest.raises(NotFound):
        blocks.rig.ledger.release_block(answer.block.id, "x")
    text = repr(blocks.rig.sql("SELECT * FROM block") + blocks.rig.sql("SELECT * FROM journal"))
    assert right.secret not in text


def test_a_checkpoint_is_recorded_in_order(blocks: Blocks) -> None:
    answer = blocks.grant()
    recorded = blocks.record(answer, 3)
    assert (recorded.block.sequence, recorded.block.digest, recorded.block.bytes) == (3, "digest-3", 30)
    assert recorded.block.recorded_at == recorded.at
    for sequence in (2, 1):
        with blocks.rig.only_journals(), pytest.raises(Stale):
            blocks.record(answer, sequence)
    assert blocks.record(answer, 4).block.sequence == 4
    assert blocks.rig.faults() == []


# --- attaching -----------------------------------------------------------------------------------------------


def test_a_held_block_is_refused_with_who_and_until_when(blocks: Blocks) -> None:
    answer = blocks.grant()
    blocks.rig.advance(20 * MINUTE)
    for dead_epoch in (0, answer.block.epoch - 1, answer.block.epoch + 1):
        with (
            blocks.rig.only_journals("block.attach_refused"),
            pytest.raises(BlockHeld, match=r"process 42 on node-a for another (39m|40m)"),
        ):
            blocks.attach(answer.block.id, dead_epoch=dead_epoch)


@pytest.mark.parametrize(
    ("how", "reason"),
    [("expired", "expired"), ("released", "released"), ("dead", "holder_lost"), ("itself", "released")],
)
def test_attaching_after(blocks: Blocks, how: str, reason: str) -> None:
    answer = blocks.grant()
    blocks.record(answer, 1)
    if how == "expired":
        blocks.rig.advance(2 * HOUR)
    elif how == "released":
        blocks.release(answer)
    dead = answer.block.epoch if how == "dead" else 0
    taken = blocks.attach(answer.block.id, ME if how == "itself" else OTHER, dead_epoch=dead)
    block = taken.block
    assert block.epoch > answer.block.epoch
    assert (block.state, block.sequence, block.digest, block.ended_at, block.reason) == (
        BlockState.HELD, 1, "digest-1", 0, None,
    )  # fmt: skip
    assert (block.expires_at, block.ttl_us, block.keep_us) == (taken.at + HOUR, HOUR, DAY)
    kinds = blocks.rig.kinds(answer.block.id)
    assert kinds == ["block.granted", "block.checkpointed", "block.ended", "block.attached"]
    ended = blocks.rig.sql("SELECT body FROM journal WHERE kind = 'block.ended'")[0][0]
    assert f'"reason":"{reason}"' in ended
    assert blocks.rig.faults() == []


def test_attaching_may_change_the_times(blocks: Blocks) -> None:
    answer = blocks.grant()
    blocks.release(answer)
    taken = blocks.attach(answer.block.id, ttl_us=MINUTE, keep_us=0)
    assert (taken.block.ttl_us, taken.block.keep_us, taken.block.expires_at) == (MINUTE, 0, taken.at + MINUTE)
    with pytest.raises(BadInput):
        blocks.attach(answer.block.id, ttl_us=-1)


def test_a_reaper_that_looked_before_takes_nothing(blocks: Blocks) -> None:
    """L5, fact 5: who saw a dead holder of epoch 1 may not take it from the living one of epoch 2."""
    first = blocks.grant()
    second = blocks.attach(first.block.id, dead_epoch=first.block.epoch)
    with pytest.raises(BlockHeld):
        blocks.attach(first.block.id, Holder(host=HERE, pid=44, started=1), dead_epoch=first.block.epoch)
    assert blocks.look(first).epoch == second.block.epoch


def test_two_that_attach_at_once(blocks: Blocks) -> None:
    """One wins, the other reads who did."""
    for _ in range(5):
        answer = blocks.grant()
        blocks.release(answer)
        outcomes: list[object] = []
        ready = threading.Barrier(4)

        def race(number: int, answer: Any = answer, outcomes: Any = outcomes, ready: Any = ready) -> None:
            ledger = blocks.rig.open()
            ready.wait()
            try:
                holder = Holder(host=HERE, pid=100 + number, started=1)
                outcomes.append(ledger.attach_block(answer.block.id, f"s{number}", "ada", holder).block.epoch)
            except BlockHeld as held:
                outcomes.append(held)

        threads = [threading.Thread(target=race, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(type(o).__name__ for o in outcomes) == ["BlockHeld"] * 3 + ["int"]
    assert blocks.rig.faults() == []


# --- letting go ----------------------------------------------------------------------------------------------


def test_released_twice_is_fine(blocks: Blocks) -> None:
    answer = blocks.grant()
    assert blocks.release(answer)
    assert not blocks.release(answer)
    late = blocks.grant()
    blocks.rig.advance(2 * HOUR)
    assert blocks.release(late)
    row = blocks.look(late)
    assert (row.reason, row.ended_at) == (EndReason.EXPIRED, late.block.expires_at), "it was over before"


def test_removed_is_as_good_as_never_there(blocks: Blocks) -> None:
    ledger, answer = blocks.rig.ledger, blocks.grant()
    with pytest.raises(BlockHeld):
        ledger.remove_block(answer.block.id, "ada", OTHER, actor="test")
    assert ledger.remove_block(answer.block.id, "ada", OTHER, actor="t", secret=blocks.key(answer).secret)
    assert not ledger.remove_block(answer.block.id, "ada", OTHER, actor="test")
    for verb in (lambda: blocks.look(answer), lambda: blocks.attach(answer.block.id)):
        with pytest.raises(NotFound, match="there is no block"):
            verb()
    assert ledger.blocks() == []
    assert [a.block.id for a in ledger.blocks(gone=True)] == [answer.block.id]
    assert ledger.removed_blocks([answer.block.id, "B" + "0" * 20]) == {answer.block.id}
    assert blocks.rig.kinds(answer.block.id)[-2:] == ["block.ended", "block.removed"]
    assert blocks.rig.faults() == []


def test_a_sweep_removes_what_was_kept_long_enough(blocks: Blocks) -> None:
    ledger = blocks.rig.ledger
    released, expiring, held = blocks.grant(), blocks.grant(), blocks.grant(ttl_us=3 * DAY)
    blocks.release(released)
    blocks.rig.advance(HOUR + SECOND)
    assert ledger.sweep_blocks() == []
    assert blocks.look(expiring).reason is EndReason.EXPIRED, "the sweep writes it down"
    assert blocks.look(expiring).ended_at == expiring.block.expires_at
    blocks.rig.advance(DAY - HOUR)
    assert ledger.sweep_blocks() == [released.block.id]
    blocks.rig.advance(HOUR)
    assert ledger.sweep_blocks() == [expiring.block.id]
    assert ledger.sweep_blocks() == []
    assert blocks.look(held).state is BlockState.HELD
    assert blocks.rig.faults() == []


def test_attached_again_before_the_sweep_it_is_kept(blocks: Blocks) -> None:
    """C5: past its retention and not swept yet, it can still be taken; the sweep looks under the lock."""
    answer = blocks.grant()
    blocks.release(answer)
    blocks.rig.advance(2 * DAY)
    taken = blocks.attach(answer.block.id)
    assert blocks.rig.ledger.sweep_blocks() == []
    assert blocks.look(taken).state is BlockState.HELD


# --- tenants -------------------------------------------------------------------------------------------------


def test_another_tenant_s_block_is_not_there(blocks: Blocks) -> None:
    """T1: every verb, the same words as for a block that never was; nothing changes."""
    answer, ledger = blocks.grant(), blocks.rig.ledger
    blocks.release(answer)
    verbs = (
        lambda i: ledger.look_block(i, "bob"),
        lambda i: ledger.attach_block(i, "s", "bob", OTHER, dead_epoch=answer.block.epoch),
        lambda i: ledger.attach_block(i, "s", "bob", ME),
        lambda i: ledger.remove_block(i, "bob", ME, actor="bob"),
        lambda i: ledger.release_block(i, "s"),
    )
    for verb in verbs:
        said = []
        for block_id in (answer.block.id, "B" + "0" * 20):
            with blocks.rig.only_journals(), pytest.raises(NotFound) as refused:
                verb(block_id)
            said.append((refused.value.message.replace(block_id, "ID"), refused.value.remedy))
        assert said[0] == said[1]
    assert ledger.blocks(tenant="bob") == []
    assert len(ledger.blocks(tenant="ada")) == len(ledger.blocks()) == 1


def test_a_tenant_has_only_so_many_blocks(blocks: Blocks) -> None:
    """T2, under concurrency."""
    blocks.rig.policy(tenant_blocks_max=20)
    got: list[object] = []

    def take(number: int) -> None:
        ledger, request = blocks.rig.open(), BlockRequest(tenant="ada", blocks=8, ttl_us=HOUR)
        try:
            got.append(ledger.grant_block("B" + f"{number:020x}", "s", request, ME))
        except QuotaReached as refused:
            got.append(refused)

    threads = [threading.Thread(target=take, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(isinstance(g, BlockAnswer) for g in got) == 2
    blocks.grant(tenant="bob", blocks=20)
    freed = next(g for g in got if isinstance(g, BlockAnswer))
    blocks.rig.ledger.remove_block(freed.block.id, "ada", OTHER, actor="t", secret="s")
    blocks.grant()
    with blocks.rig.only_journals("block.refused"), pytest.raises(QuotaReached, match="16 of 20"):
        blocks.grant()


def test_a_tenant_with_blocks_stays(blocks: Blocks) -> None:
    answer = blocks.grant()
    with pytest.raises(BadInput, match="1 block"):
        blocks.rig.ledger.remove_tenant("ada", actor="test")
    blocks.rig.ledger.remove_block(answer.block.id, "ada", ME, actor="test")
    blocks.rig.ledger.remove_tenant("ada", actor="test")
    with pytest.raises(NotFound, match="unknown"):
        blocks.grant()


def test_wrong_names_never_reach_a_statement(blocks: Blocks) -> None:
    ledger, request = blocks.rig.ledger, BlockRequest(tenant="ada", blocks=8, ttl_us=HOUR)
    with blocks.rig.only_journals():
        for name in ("", "../x", "B123", "B" + "0" * 21):
            for verb in (
                lambda n: ledger.grant_block(n, "s", request, ME),
                lambda n: ledger.attach_block(n, "s", "ada", ME),
                lambda n: ledger.remove_block(n, "ada", ME, actor="t"),
                lambda n: ledger.look_block(n, "ada"),
            ):
                with pytest.raises(BadInput):
                    verb(name)
        with pytest.raises(BadInput):
            ledger.grant_block("B" + "0" * 20, "s", replace(request, tenant="../x"), ME)


# --- the ledger itself ---------------------------------------------------------------------------------------


def test_after_a_backup_was_put_back_nobody_from_before_writes(blocks: Blocks) -> None:
    """Threat 21; and which checkpoint counts is then known by the disk alone."""
    held, kept, gone = blocks.grant(), blocks.grant(), blocks.grant()
    blocks.record(held, 1)
    blocks.record(kept, 1)
    blocks.release(kept)
    blocks.rig.ledger.remove_block(gone.block.id, "ada", ME, actor="t")
    assert blocks.rig.ledger.mark_restored(actor="test") == 1
    with pytest.raises(LeaseLost):
        blocks.record(held, 2)
    assert blocks.look(held).sequence == blocks.look(kept).sequence == UNKNOWN_SEQUENCE
    assert blocks.look(held).reason is EndReason.REVOKED
    taken = blocks.attach(held.block.id)
    assert taken.block.epoch > EPOCH_GAP
    assert blocks.record(taken, 1).block.sequence == 1
    assert blocks.rig.faults() == []


@pytest.mark.parametrize("place", ["before_begin", "before_commit", "after_commit_before_reply"])
@pytest.mark.parametrize("verb", ["grant", "attach", "renew", "record", "release", "remove"])
def test_a_bug_in_the_middle_leaves_all_or_nothing(blocks: Blocks, place: str, verb: str) -> None:
    """A1: the row and its journal row, or neither."""
    rig, ledger = blocks.rig, blocks.rig.ledger
    answer = blocks.grant()
    before, rows = rig.sql("SELECT * FROM block"), rig.sql("SELECT count(*) FROM journal")[0][0]
    rig.advance(SECOND)
    failpoints.arm(place, "raise", nth=1)
    with pytest.raises(failpoints.FailpointHit):
        match verb:
            case "grant":
                blocks.grant()
            case "attach":
                blocks.attach(answer.block.id, ME)
            case "renew":
                ledger.renew_block(blocks.key(answer))
            case "record":
                blocks.record(answer, 1)
            case "release":
                blocks.release(answer)
            case "remove":
                ledger.remove_block(answer.block.id, "ada", ME, actor="t")
    failpoints.disarm()
    happened = place == "after_commit_before_reply"
    assert (sorted(rig.sql("SELECT * FROM block")) != sorted(before)) == happened
    added = rig.sql("SELECT count(*) FROM journal")[0][0] - rows
    assert added == ((2 if verb in ("attach", "remove") else 1) if happened else 0)
    assert rig.faults() == []


def test_the_audit_names_a_block_that_broke_the_rules(blocks: Blocks) -> None:
    """The journal's rules over blocks can fail: two holders at once, and a checkpoint of an old epoch."""
    from sublet.core.journal.chain import Entry
    from sublet.core.journal.lease_audit import audit

    def entry(kind: str, body: str, at: int) -> Entry:
        return Entry("main", at, at, kind, "ada", "B1", body, "")

    granted = entry("block.granted", '{"epoch":1,"expires_at":100,"ttl_us":100}', 1)
    attached = entry("block.attached", '{"epoch":2,"expires_at":200,"ttl_us":100}', 2)
    ended = entry("block.ended", '{"epoch":1,"reason":"released"}', 2)
    saved = entry("block.checkpointed", '{"epoch":1,"sequence":1}', 3)
    assert audit([granted, saved, ended, attached], {}) == []
    assert [f.what[:2] for f in audit([granted, attached], {})] == ["L2"]
    assert [f.what[:2] for f in audit([granted, ended, attached, saved], {})] == ["S2"]
    assert [f.what[:2] for f in audit([granted, ended, saved], {})] == ["S2"]
    assert [f.what[:2] for f in audit([attached, ended, replace(granted, at=9)], {})] == ["L1"]


def test_every_refusal_says_what_to_do(blocks: Blocks) -> None:
    answer = blocks.grant()
    for verb in (
        lambda: blocks.attach(answer.block.id),
        lambda: blocks.attach("B" + "0" * 20),
        lambda: blocks.rig.ledger.check_block(LeaseKey(answer.block.id, 99, "x")),
    ):
        with pytest.raises(SubletError) as refused:
            verb()
        assert refused.value.remedy
        assert answer.block.id in refused.value.message or "B000" in refused.value.message
