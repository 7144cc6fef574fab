"""Seeded bugs: each breaks one invariant on purpose, and a named test must go red.

`python -m proof.mutants [NAME …]` applies each to a copy of src/, runs its test, and prints the table.

Rules of this file:
- An edit is exact text that stands once in its file. One that does not is an error, so that the list cannot rot.
- A bug that another layer would hide has that layer switched off in the same mutant, as further edits, and says so.
- Killed means: the named test failed. A crash of the runner, a skip or a hang is not a kill.
- Every invariant has at least one, and every named test names the invariant it guards: `coverage` reads both, and a test compares.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "sublet"
#: What must never break, by id.
RULES = (
    *(f"L{n}" for n in range(1, 8)),
    *(f"S{n}" for n in range(1, 9)),
    *(f"C{n}" for n in range(1, 8)),
    *(f"T{n}" for n in range(1, 5)),
    *(f"K{n}" for n in range(1, 4)),
    "A1",
    *(f"X{n}" for n in range(1, 5)),
    "I1",
    "I2",
    "I3",
    "I4",
    "I5",
)
#: A test that takes longer than this under a mutant counts as hung.
SECONDS = 240


@dataclass(frozen=True, slots=True)
class Edit:
    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    rule: str
    edits: tuple[Edit, ...]
    test: str
    off: str = ""  # the layer that would hide it, switched off too
    quick: bool = True  # its test takes a few seconds


def one(name: str, rule: str, file: str, old: str, new: str, test: str, *, quick: bool = True) -> Mutant:
    return Mutant(name, rule, (Edit(file, old, new),), test, quick=quick)


CONTRACT = "tests/ledger/test_contract.py::"
SQLITE = "[sqlite]"
SHIM = "tests/training/test_shim.py::"
ISOLATION = "tests/core/studio/test_isolation.py"

MUTANTS = (
    # --- leases
    one("an epoch is not raised", "L1", "ledger/tx.py", "        self.epoch += 1\n", "", CONTRACT + "test_every_grant_has_a_higher_epoch"),
    one("a restore does not jump the epoch", "L1", "ledger/verbs/leasing/after_restore.py",
        "    pool.epoch = tx.now if tx.now > pool.epoch else pool.epoch + EPOCH_GAP\n", "",
        CONTRACT + "test_after_a_restore_no_old_holder_writes"),
    one("a restore jumps from the backup's epoch", "L1", "ledger/verbs/leasing/after_restore.py",
        "    pool.epoch = tx.now if tx.now > pool.epoch else pool.epoch + EPOCH_GAP\n", "    pool.epoch += EPOCH_GAP\n",
        "tests/proof/test_found.py::test_one_backup_put_back_twice"),
    one("a waiter is told of a grant nobody synced", "L1", "ledger/ledger.py",
        "            if answer.lease.state not in HOLDING or self._outlives_a_crash(answer.lease):\n", "            if answer:\n",
        "tests/proof/test_found.py::test_a_grant_that_was_waited_for_is_synced_before_work"),
    one("a grant is told that a crash of the server took", "L1", "ledger/ledger.py",
        "        return found is not None and tuple(found) == (lease.epoch, lease.granted_at)\n", "        return True\n",
        "tests/ledger/engines/postgres/test_engine.py::test_a_grant_that_a_crash_took_is_not_told"),
    one("an outage of the ledger is every host's silence", "K3", "core/leasing/hosts.py",
        "    return now - newest if newest < now - silence_limit_us(policy) else 0\n", "    return 0\n",
        "tests/ledger/verbs/leasing/test_hosts.py::test_a_time_in_which_nobody_was_heard_is_nobodys_silence"),
    one("a failed teardown is forgotten for one nobody saw", "K1", "core/leasing/hosts.py",
        "    if device.note != withheld_for:\n        return None\n", "",
        "tests/ledger/verbs/leasing/test_hosts.py::test_a_teardown_that_was_seen_to_fail_is_not_forgotten_for_one_nobody_saw"),
    one("proof of one given-up lease is proof of all", "K1", "core/leasing/hosts.py",
        "    return (DeviceState.QUARANTINED, others[0]) if others else (DeviceState.READY, \"\")\n", "    return (DeviceState.READY, \"\")\n",
        "tests/ledger/verbs/leasing/test_hosts.py::test_what_was_given_up_is_shown_to_be_gone_by_its_own_warden"),
    one("a waiter that lost its place leaves", "S8", "runs/run.py",
        "            again = True  # the ledger has us on its list: the request can be served\n", "",
        "tests/runs/test_run.py::test_a_waiter_that_lost_its_place_asks_again"),
    one("a late supervisor is ended before what it supervises", "K2", "processes/supervisor/command_supervisor.py",
        "        return deadline_us + (BACKSTOP_US if self._supervised.ends_as_one else BACKSTOP_ALONE_US)\n", "        return deadline_us + BACKSTOP_US\n",
        "tests/processes/supervisor/test_command.py::test_a_supervisor_that_comes_late_still_ends_everybody"),
    one("exclusive beside others", "L2", "core/scheduling/device.py",
        "        if self.device_leases or exclusivity is Exclusivity.DEVICE:\n            return False\n", "",
        "tests/core/scheduling/test_device.py"),
    one("placed without looking again", "L2", "ledger/verbs/leasing/slices.py",
        "        if row is None or not usable(device_of(row), shape):\n            return False\n", "",
        "tests/proof/test_found.py::test_a_placement_decided_on_an_old_read_is_dropped"),
    one("a dead lease is renewed", "L3", "core/leasing/lease.py",
        "    refusal = fence(lease, epoch, now)\n    if refusal:\n        return NotRenewed(refusal)\n", "",
        CONTRACT + "test_a_dead_lease_is_not_renewed"),
    one("a revoke revives what had expired", "L3", "ledger/verbs/leasing/leases.py",
        "    late = overdue(lease, tx.now)\n    if late is not None:\n        # A deadline",
        "    late = None\n    if late is not None:\n        # A deadline",
        CONTRACT + "test_revoking_an_expired_lease_does_not_bring_it_back"),
    one("the hold cap is not a cap", "L4", "core/leasing/lease.py", "        wanted = min(wanted, cap)\n", "",
        CONTRACT + "test_renew_stops_at_the_hold_cap_when_somebody_waits"),
    one("leases follow the wall clock", "L4", "ledger/engines/sqlite/engine.py",
        "        self.now: int = max(row[5], self._offset + clock.boot_us())", "        self.now: int = max(row[5], clock.wall_us())",
        "tests/ledger/engines/sqlite/test_engine.py::test_stepping_the_wall_clock_moves_no_lease"),
    one("the reaper believes an old read", "L5", "ledger/verbs/leasing/schedule_tick.py",
        "        if lease.epoch != step.epoch or reason is None:\n            return False\n", "        reason = reason or step.end_reason\n",
        "tests/ledger/engines/postgres/test_engine.py::test_a_reaper_checks_again_under_the_lock"),
    one("the reaper believes an old read, in a simulated world", "L5", "ledger/verbs/leasing/schedule_tick.py",
        "        if lease.epoch != step.epoch or reason is None:\n            return False\n", "        reason = reason or step.end_reason\n",
        "tests/proof/test_deep.py::test_worlds_without_a_violation", quick=False),
    one("the holder stops after the ledger", "L6", "core/leasing/renewal.py", "STOP_PER_1000 = 800", "STOP_PER_1000 = 1200",
        "tests/core/leasing/test_renewal.py::test_l6_the_holders_deadline_is_at_80_percent_of_when_it_asked"),
    one("a host is given up while its holders may work", "L6", "core/leasing/hosts.py",
        " and not lease.settled_at and lease.expires_at < now\n", " and not lease.settled_at\n",
        "tests/core/leasing/test_hosts.py::test_what_is_not_over_is_left_alone"),
    one("an answer of the server is waited for with everybody stopped", "L6", "ledger/engines/postgres/connection.py",
        "        while server.is_busy():\n            self._hot_answers.poll()\n            server.consume_input()\n", "",
        "tests/ledger/engines/postgres/test_connection.py::test_others_go_on_while_an_answer_is_waited_for"),
    one("unknown counts as held", "L7", "leases/lease.py",
        "        if self._over or self._clock.monotonic_us() >= self._deadline_us or self._pid != os.getpid():\n            raise LeaseLost",
        "        if self._over or self._pid != os.getpid():\n            raise LeaseLost",
        "tests/proof/test_found.py::test_unknown_is_not_held"),
    # --- steps
    Mutant("the effect in a transaction of its own", "S1", (
        Edit("ledger/verbs/progress/commit.py", "    for done in (own, *step.effects):\n", "    for done in step.effects:\n"),
        Edit("ledger/verbs/progress/commit.py", "    own = Done(key=step.key, fingerprint=step.fingerprint, outcome=step.outcome)\n", ""),
        Edit("ledger/ledger.py", "        done = self.engine.write(lambda tx: progress.commit(tx, key, commit), durable=True)\n"
             "        if isinstance(done, SubletError):\n            raise done\n        return done\n",
             "        from sublet.core.progress.effect import Done\n"
             "        done = Done(key=commit.key, fingerprint=commit.fingerprint, outcome=commit.outcome)\n"
             "        answer = self._write(lambda tx: progress.commit(tx, key, commit), durable=True)\n"
             "        if isinstance(answer, Committed):\n"
             "            held = self.look(key.lease_id).lease\n"
             "            self._write(lambda tx: progress._complete(tx, held, key, commit.job, done, answer.version), durable=True)\n"
             "        return answer\n"),
    ), "tests/proof/test_deep.py::test_worlds_without_a_violation", quick=False),
    one("no fence", "S2", "core/leasing/lease.py",
        '    """\'\' when a write of this epoch counts now, else why it does not (S2)."""\n',
        '    """\'\' when a write of this epoch counts now, else why it does not (S2)."""\n    return ""\n',
        CONTRACT + "test_a_fenced_holder_cannot_commit"),
    one("a fence without expiry", "S2", "core/leasing/lease.py",
        '        return "" if now < lease.expires_at else "the lease expired"\n', '        return ""\n',
        CONTRACT + "test_a_fenced_holder_cannot_commit"),
    one("an older epoch commits", "S2", "core/progress/effect.py", "    if epoch < head.epoch:\n", "    if False:\n",
        CONTRACT + "test_an_older_epoch_cannot_commit_after_a_newer_one"),
    one("results of a dead lease are stored", "S2", "ledger/verbs/queues/items.py",
        "        why = fence(lease, key.epoch, now)\n", '        why = ""\n', "tests/ledger/verbs/queues/test_items.py::test_a_result_under_a_dead_lease_is_not_stored"),
    Mutant("no compare-and-swap", "S3", (
        Edit("core/progress/effect.py", "    if head.version != commit.expected_version:\n", "    if False:\n"),
        Edit("ledger/verbs/progress/commit.py", 'strand_seq = ?, strand_hash = ? WHERE job = ? AND version = ?",\n', 'strand_seq = ?, strand_hash = ? WHERE job = ? AND version >= ? * 0",\n'),
    ), CONTRACT + "test_a_commit_that_does_not_follow_is_refused", off="the version in the UPDATE of the head"),
    one("steps with gaps", "S3", "core/progress/effect.py",
        "    if commit.begins != head.step + 1 and not (commit.starts and head.version == 0):\n", "    if False:\n",
        CONTRACT + "test_a_commit_that_does_not_follow_is_refused"),
    one("other inputs under the same key", "S4", "core/progress/effect.py", "    if effect.fingerprint != fingerprint:\n", "    if False:\n",
        CONTRACT + "test_the_same_key_with_other_inputs_is_refused"),
    one("a live owner is robbed", "S4", "core/progress/effect.py", "        if owner_alive:\n", "        if False:\n",
        CONTRACT + "test_a_live_owner_is_busy_and_a_dead_one_is_taken_over"),
    Mutant("what was done is done again", "S4", (
        Edit("core/progress/effect.py", "    if effect.completed:\n        return AlreadyCommitted(effect.version, effect.outcome)\n", ""),
        Edit("core/progress/effect.py", "    if head.version != commit.expected_version:\n", "    if False:\n"),
        Edit("core/progress/effect.py", "    if commit.begins != head.step + 1 and not (commit.starts and head.version == 0):\n", "    if False:\n"),
    ), CONTRACT + "test_the_same_commit_again_is_answered_again", off="the head's version and the order of steps"),
    one("an unknown commit counts as failed", "S5", "store/checkpoints.py",
        "                    if effect is None or not effect.completed:\n                        break\n", "                    break\n",
        "tests/store/test_checkpoints.py::test_a_commit_of_unknown_outcome_is_asked_for"),
    one("any delivery may ack", "S6", "ledger/verbs/queues/items.py",
        '    "WHERE id = ? AND queue = ? AND state = \'leased\' AND owner = ? AND delivery = ?"\n',
        '    "WHERE id = ? AND queue = ? AND state = \'leased\' AND owner >= ? * 0 AND delivery >= ? * 0"\n',
        "tests/ledger/verbs/queues/test_items.py::test_only_the_newest_delivery_counts"),
    one("ack first, publish later", "S6", "queues/intake.py",
        "                done = self._into_ledger(drafts) if drafts else Published(new=0)\n",
        "                broker.settle([message for message in messages if message.key in {d.key for d in drafts}])\n"
        "                done = self._into_ledger(drafts) if drafts else Published(new=0)\n",
        "tests/queues/test_queue.py::test_a_crash_before_settling_is_a_duplicate_later"),
    one("a hash without the row before", "S7", "core/journal/chain.py",
        '    text = f"{previous}\\n{strand}\\n{seq}', '    text = f"\\n{strand}\\n{seq}',
        "tests/core/journal/test_chain.py::test_s7_a_strand_that_begins_at_another_anchor_is_named"),
    one("a removed row is not missed", "S7", "core/journal/chain.py",
        "        if entry.seq != expected:\n", "        if False:\n",
        "tests/core/journal/test_chain.py::test_s7_a_removal_is_named_with_the_rows_that_are_missing"),
    one("a cut end is not missed", "S7", "core/journal/chain.py", "        if last != end.seq:\n", "        if False:\n",
        "tests/core/journal/test_chain.py::test_s7_a_cut_end_is_named"),
    one("room that appears is handed to nobody", "S8", "ledger/verbs/leasing/waitlist.py",
        "    if tx.pool.waiting == 0:\n        return\n", "    return\n",
        CONTRACT + "test_a_waiter_is_granted_in_the_transaction_that_made_room"),
    # --- checkpoints
    one("a copy that was not synced counts", "C1", "store/replicas/directory.py",
        '            os.fsync(self._fd)\n            failpoint("after_chunk_fsync")\n', '            failpoint("after_chunk_fsync")\n',
        "tests/store/replicas/test_directory.py::test_order_of_a_pack"),
    one("a name that was not synced counts", "C1", "store/replicas/directory.py",
        "            try:\n                os.fsync(place)\n            except OSError:\n", "            try:\n                pass\n            except OSError:\n",
        "tests/store/replicas/test_directory.py::test_order_of_a_manifest"),
    one("one copy is a quorum", "C1", "core/checkpoints/checkpoint.py",
        "    return max(0, policy.write_quorum - len(reached))\n", "    return max(0, 1 - len(reached))\n",
        "tests/store/replicas/test_quorum.py::test_a_lost_quorum_is_named_and_the_head_stays"),
    one("two copies in one domain are two", "C1", "core/checkpoints/checkpoint.py",
        "    reached = {domains[name] for name in confirmed} if not policy.single_node else set(confirmed)\n", "    reached = set(confirmed)\n",
        "tests/store/replicas/test_quorum.py::test_the_quorum_is_of_domains"),
    one("a chunk is written over in place", "C2", "store/replicas/directory.py",
        "                os.link(draft, final, src_dir_fd=drafts, dst_dir_fd=place, follow_symlinks=False)\n",
        "                os.replace(draft, final, src_dir_fd=drafts, dst_dir_fd=place)\n",
        "tests/store/replicas/test_directory.py::test_bytes_under_a_name_never_change"),
    one("a chunk is not verified", "C3", "store/replicas/quorum.py",
        "            if there and digest(into) == entry.digest:\n", "            if there:\n",
        "tests/store/replicas/test_quorum.py::test_a_tampered_replica_is_seen_and_repaired"),
    one("a manifest is not verified", "C3", "store/replicas/quorum.py",
        "            if digest(data) != name:\n                if mend:\n", "            if False:\n                if mend:\n",
        "tests/store/replicas/test_quorum.py::test_a_tampered_replica_is_seen_and_repaired"),
    one("a bad copy repairs the others", "C3", "store/replicas/quorum.py",
        "                self.chunk(chunk, view[:size], health)\n",
        "                any(r.read_pack(chunk.pack, chunk.at, view[:size]) for r in self._to_read)\n",
        "tests/store/replicas/test_quorum.py::test_damages_over_the_copies"),
    one("a bad copy passes for a good one", "C3", "store/replicas/quorum.py",
        "            return replica.read_pack(chunk.pack, chunk.at, buffer) and digest(buffer) == chunk.digest\n",
        "            return replica.read_pack(chunk.pack, chunk.at, buffer)\n",
        "tests/store/replicas/test_quorum.py::test_a_tampered_replica_is_seen_and_repaired"),
    one("a missing chunk is left out", "C4", "store/replicas/quorum.py",
        '        raise self._nowhere(f"chunk {entry.digest} (pack {entry.pack})", silent)\n', "        return\n",
        "tests/store/replicas/test_quorum.py::test_damages_over_the_copies"),
    one("a sweep does not mind the age", "C5", "store/upkeep/sweeping.py",
        "            if age * 1e6 >= limit and not self._needed(kind, name):\n", "            if not self._needed(kind, name):\n",
        "tests/store/upkeep/test_sweeping.py::test_the_age_limit"),
    one("a sweep does not look again", "C5", "store/upkeep/sweeping.py",
        "        now = self._ledger.all_versions()\n        if now != self._seen:\n            self._mark(now)\n", "        return\n",
        "tests/store/upkeep/test_sweeping.py::test_it_looks_once_more_before_it_deletes"),
    one("a save does not wait for its chunks", "C6", "store/checkpoints.py",
        '        self._replicas.require(packed.confirmed, packed.failed, "the state")\n', "",
        "tests/store/replicas/test_quorum.py::test_a_quorum_for_the_manifest_but_not_for_the_chunks"),
    one("shared chunks need no quorum", "C6", "store/replicas/quorum.py",
        "                    if pack in self._open and self._enough(self._having[pack]):\n", "                    if pack in self._open:\n",
        "tests/store/replicas/test_quorum.py::test_shared_chunks_must_still_be_on_a_quorum"),
    one("a manifest of any size is parsed", "C7", "core/checkpoints/checkpoint.py",
        "    if len(data) > MAX_MANIFEST_BYTES:\n", "    if False:\n", "tests/core/checkpoints/test_checkpoint.py::test_a_manifest_beyond_the_limit_is_not_parsed"),
    one("a state may be larger than its chunks", "C7", "core/checkpoints/checkpoint.py",
        '        raise Damaged("the manifest claims a state larger than its chunks")\n', "        pass\n",
        "tests/core/checkpoints/test_checkpoint.py::test_claims_larger_than_the_chunks_are_refused"),
    # --- tenants, meter, teardown, journal
    one("another tenant's job is there", "T1", "ledger/verbs/progress/commit.py",
        "    if head.tenant != lease.tenant or _of_another_tenant(tx, effect, lease):\n", "    if False:\n",
        CONTRACT + "test_another_tenants_job_is_not_there"),
    one("a revoked token is let in", "T1", "core/studio/token.py", "    if token.revoked_at:\n", "    if False:\n",
        "tests/ledger/verbs/studio/test_tokens.py::test_a_revoked_token_is_refused_at_once_everywhere"),
    one("no quota of leases", "T2", "core/leasing/tenancy.py", "    if tenant.max_leases and tenant.live_leases + 1 > tenant.max_leases:\n", "    if False:\n",
        CONTRACT + "test_quotas_hold_and_free_again"),
    one("no quota of VRAM", "T2", "core/leasing/tenancy.py",
        "    if tenant.max_vram_bytes and tenant.live_bytes + need_bytes > tenant.max_vram_bytes:\n", "    if False:\n",
        CONTRACT + "test_a_whole_device_counts_whole_against_the_quota"),
    one("whoever came first is first", "T3", "core/scheduling/admission.py",
        "        above,\n        used - waited * pool.policy.aging_per_1000 // 1000,\n", "        False,\n        0,\n",
        CONTRACT + "test_the_waitlist_is_by_tier_then_share_then_arrival"),
    one("who waits long stays behind", "T3", "core/scheduling/admission.py",
        "    return rank - max(0, now - waiter.joined_at) // max(1, policy.rises_after_us(rank))\n", "    return rank\n",
        "tests/core/scheduling/test_admission.py::test_t3_the_longest_waiting_is_first_after_a_bounded_time_against_any_newcomers"),
    one("the slow reaper is billed", "T4", "core/billing/meter.py", "    return max(lease.granted_at, min(now, end))\n", "    return max(lease.granted_at, now)\n",
        CONTRACT + "test_time_after_the_right_ended_is_not_billed"),
    one("a revoked lease is billed to its expiry", "T4", "core/billing/meter.py",
        "    end = lease.deadline_at if lease.state is LeaseState.REVOKING else lease.expires_at\n", "    end = lease.expires_at\n",
        CONTRACT + "test_time_after_the_right_ended_is_not_billed"),
    one("a teardown nobody proved is believed", "K1", "ledger/verbs/leasing/leases.py", "    return () if receipt.proven else slices\n", "    return ()\n",
        CONTRACT + "test_settling_an_unproven_teardown_withholds_the_device"),
    one("slices go back before the teardown", "K1", "ledger/verbs/leasing/leases.py", "    settled_at = now if settled or waiting else 0\n", "    settled_at = now\n",
        CONTRACT + "test_settling_a_proven_teardown_hands_the_slice_on"),
    Mutant("children of the holder live on", "K1", (
        Edit("processes/ladder.py", "        fresh = [c for c in descendants(root) if c.pid not in watched]\n", "        fresh: list[Stat] = []\n"),
        Edit("processes/ladder.py", "                for child in descendants(holder.pid):\n", "                for child in ():\n"),
    ), "tests/leases/warden/test_warden.py::test_the_ladder_ends_a_whole_tree_that_ignores_term", off="the walk before TERM, which sees those who do not move"),
    one("memory that is left is not looked at", "K1", "leases/warden/teardown.py", "                if left:\n", "                if False:\n",
        "tests/leases/warden/test_many_ended.py::test_what_one_of_many_leaves_is_seen"),
    one("a look from before the kill counts", "K1", "machine/single_flight.py", "            wanted = self._begun + 1\n", "            wanted = self._begun\n",
        "tests/machine/test_single_flight.py::test_one_that_began_before_the_question_does_not_answer_it"),
    one("a device moves with a lease on it", "K1", "core/leasing/hosts.py", "    if device.leases:\n", "    if False:\n",
        "tests/ledger/verbs/leasing/test_hosts.py::test_a_device_with_a_lease_that_is_not_settled_does_not_move"),
    one("the warden waits for the ledger", "K2", "leases/warden/warden.py", "        if now < watched.asked_at + CONFIRM_US:\n", "        if now < watched.asked_at + 3_600_000_000:\n",
        "tests/proof/test_found.py::test_a_silent_ledger_does_not_hold_up_the_warden"),
    one("a new warden sees only who is alive", "K3", "ledger/verbs/leasing/schedule_tick.py",
        "{SELECT_LEASE} WHERE settled_at = 0 AND host = ? AND seats = 0 ORDER BY id",
        "{SELECT_LEASE} WHERE state <> 'ended' AND settled_at = 0 AND host = ? AND seats = 0 ORDER BY id",
        CONTRACT + "test_a_warden_sees_what_it_must_enforce"),
    one("a refusal leaves no row", "A1", "ledger/verbs/progress/commit.py",
        "    write_main(tx, kind, lease.tenant, subject, {\"code\": error.code, \"reason\": error.message, \"epoch\": epoch})\n    return error\n", "    return error\n",
        CONTRACT + "test_a_fenced_holder_cannot_commit"),
    one("a secret in the journal", "A1", "ledger/verbs/leasing/waitlist.py",
        '        "reason": decision.reason,\n        "asked_bytes": request.vram_bytes,\n',
        '        "reason": decision.reason,\n        "by": secret,\n        "asked_bytes": request.vram_bytes,\n',
        "tests/ledger/verbs/journal/test_chain.py::test_no_secret_is_stored_anywhere"),
    # --- scripts that know nothing of sublet
    one("what the process is switched to is not put back", "X1", "training/program_state/program.py",
        '        put_process(roots["process"], self._environment)\n', "", "tests/training/program_state/test_process_state.py"),
    one("what a script binds in libraries is not put back", "X1", "training/program_state/program.py",
        '        self._foreign.put(roots["foreign"])\n', "", "tests/training/program_state/test_process_state.py"),
    one("variables that are read later are taken for dead", "X1", "training/program_state/program.py",
        "        return analysis.bound_anew_after(at.offset) - used\n", "        return frozenset(code.co_names)\n", SHIM + "test_exact"),
    one("who waits for a condition is forgotten", "X1", "training/program_state/live.py",
        "    threading.Condition: ConditionKind(),\n", "",
        "tests/training/program_state/test_live.py::test_who_waits_for_a_condition_goes_on_waiting"),
    one("a resume that came out differently goes on", "X2", "training/loop.py",
        "        if found:\n            raise resume_differs", "        if not found:\n            raise resume_differs",
        SHIM + "test_state_that_nobody_can_save_is_found_by_the_rehearsal"),
    one("what differs is not repeated once more", "X2", "training/scripts/script.py",
        "            if earlier is None:\n", "            if False:\n", SHIM + "test_what_differs_by_itself_is_named_and_left_out"),
    one("a script that changed is continued", "X3", "training/scripts/script.py",
        "        if found and not self._options.changed_ok:\n", "        if False:\n", SHIM + "test_a_script_that_changed_does_not_go_on_unasked"),
    one("modules beside a script are no part of what it is", "X3", "training/scripts/script.py",
        "        files = {self._around.path.name: str(self._around.path), **own}\n",
        "        files = {self._around.path.name: str(self._around.path)}\n", SHIM + "test_a_file_beside_the_script_is_a_part_of_it"),
    one("what was written since is not undone", "X4", "training/scripts/script.py",
        "            for words in self._files.undo(position):\n", "            for words in ():\n", SHIM + "test_each_line_is_written_once"),
    one("a script that ended runs again", "X4", "training/loop.py",
        "        return kept is not None and kept.version == self.version\n", "        return False\n",
        SHIM + "test_a_script_that_ended_is_not_run_again"),
    one("a device is granted that another ledger grants", "I3", "leases/warden/warden.py",
        "            taken = self._claims.claim(found)\n", "            taken: dict[str, str] = {}\n",
        "tests/leases/warden/test_one_device.py::test_a_second_ledger_is_refused_and_told_who_has_the_gpu"),
    one("a lock that somebody has is shared with everybody", "I3", "devices/device_locks.py",
        "        return holder is not None and holder.ledger == self._mine.ledger\n", "        return holder is not None\n",
        "tests/devices/test_device_locks.py::test_a_device_another_ledger_has_is_not_ours_and_its_holder_is_named"),
    one("a removed lock file is believed", "I3", "devices/device_locks.py",
        "            if not _leads_to(self._path(physical), fd):\n", "            if False:\n",
        "tests/devices/test_device_locks.py::test_a_removed_file_is_made_and_locked_again"),
    one("a taken device is ready when it is cleared", "I3", "ledger/verbs/leasing/devices.py",
        "if (old := device_of(row)).state is DeviceState.TAKEN and", "if (old := device_of(row)).state is None and",
        "tests/ledger/verbs/leasing/test_taken_devices.py::test_an_operator_cannot_clear_it_and_what_they_withheld_stays_so[sqlite]"),
    one("a full disk ends the thread that logs", "I4", "machine/process_log.py",
        "        except (OSError, ValueError):\n            self._lost += 1\n", "        finally:\n            pass\n",
        "tests/machine/test_process_log.py"),
    one("a dead loop is a late one", "I4", "core/leasing/heartbeats.py",
        "    if not beat.alive:\n        return f\"its loop '{beat.name}' has died\"\n", "", "tests/core/leasing/test_heartbeats.py"),
    one("a warden leaves its deadlines to a ledger that is away", "I4", "core/leasing/heartbeats.py",
        "        if beat.alive and beat.waits_for_ledger and has_deadlines:\n            continue\n", "",
        "tests/core/leasing/test_heartbeats.py"),
    one("a warden nobody can find stays", "I4", "core/leasing/heartbeats.py",
        "    if not findable:\n", "    if False:\n", "tests/core/leasing/test_heartbeats.py"),
    one("what no worker reported is in force", "I1", "core/studio/isolation.py",
        "    return [boundary for boundary in NEEDED if not boundary.in_force(words)]\n", "    return []\n", ISOLATION),
    one("a limit of each process bounds them all", "I1", "core/studio/worker_limits.py",
        'r"memory .+ by cgroup"', 'r"memory .+ by (cgroup|rlimit)"', ISOLATION),
    one("a host that was not tried lets everybody in", "I1", "core/studio/isolation.py",
        "        return self.mode is IsolationMode.NONE or self.elsewhere or self.separates\n", "        return True\n", ISOLATION),
    one("who comes second is let in by the ledger", "I1", "ledger/verbs/studio/sessions.py",
        "alone if alone is not None and others_have(tx, asked.tenant) else None", "None",
        "tests/studio/test_isolation.py::test_of_two_tenants_who_come_at_once_one_is_admitted"),
    one("a tenant whose session has ended left nothing", "I1", "ledger/verbs/studio/sessions.py",
        "WHERE tenant <> ? LIMIT 1", "WHERE tenant <> ? AND ended_at = 0 LIMIT 1",
        "tests/studio/test_isolation.py::test_whoever_was_there_first_stays_alone_after_leaving"),
    one("a worker is given away unseen", "I1", "studio/holder/admission.py",
        "    if refused is not None and ledger.others_have_sessions(tenant):\n", "    if False:\n",
        "tests/studio/test_isolation.py::test_the_worker_itself_is_judged_before_it_is_anybodys"),
    one("a limit is in force because it was written", "I1", "processes/sandbox/limits.py",
        "        return amount - rounded < int(knob.read_text()) <= amount\n", "        return True\n",
        "tests/processes/sandbox/test_limits.py::test_a_limit_that_is_not_read_back_is_not_in_force"),
    one("a ledger behind its stamp writes", "I5", "core/leasing/stamp.py",
        "    if not stamp.ledger_id or (stamp.ledger_id == ledger_id and state >= stamp.state):\n",
        "    if not stamp.ledger_id or stamp.ledger_id == ledger_id:\n",
        "tests/ledger/engines/sqlite/test_stamp.py::test_an_old_copy_put_back"),
    one("a copy without a stamp is a ledger", "I5", "core/leasing/stamp.py",
        "        return \"the ledger has no stamp beside it that can be read: it may be a copy from the past\"\n", "        return \"\"\n",
        "tests/ledger/engines/sqlite/test_stamp.py::test_a_copy_elsewhere"),
    one("the stamp is raised before the disk has it", "I5", "ledger/engines/sqlite/engine.py",
        "        connection.sync()\n        if committed[0]:\n            self._stamp.raise_to(*committed)\n",
        "        if committed[0]:\n            self._stamp.raise_to(*committed)\n        connection.sync()\n",
        "tests/ledger/engines/sqlite/test_stamp.py::test_the_stamp_is_never_ahead_of_what_the_disk_has"),
    one("a new ledger is made where one was lost", "I5", "ledger/engines/sqlite/engine.py",
        "        if known is not None and known.ledger_id and not _version_of(path):\n", "        if False:\n",
        "tests/ledger/engines/sqlite/test_stamp.py::test_a_file_that_is_gone"),
    one("a restore forgets what the stamp knows", "L1", "ledger/verbs/leasing/after_restore.py",
        "    pool.epoch = max(pool.epoch, highest_epoch)\n", "",
        "tests/ledger/engines/sqlite/test_stamp.py::test_a_restore_under_a_clock_that_is_behind"),
    one("the name of a removed tenant is free", "T1", "core/leasing/tenancy.py",
        "    if former and not returning:\n", "    if False:\n",
        "tests/ledger/verbs/billing/test_tenants.py::test_the_name_of_a_removed_tenant_is_not_given_to_another"),
    one("what was only counted is forgotten", "A1", "ledger/verbs/journal/refusals.py",
        "    if tally.more:\n", "    if False:\n",
        "tests/ledger/verbs/journal/test_refusals.py::test_a1_opens_that_are_refused_are_summed_up_by_the_minute"),
    one("every refusal has a row", "A1", "core/journal/refusals.py",
        "    if tally.rows < ROWS_IN_SPAN:\n", "    if tally:\n",
        "tests/core/journal/test_refusals.py::test_a1_the_first_have_a_row_each_and_the_rest_are_counted"),
    one("a long read costs nothing", "I2", "studio/edge/expensive.py",
        "        self._budget.charge(tenant, took * _MS, now)\n", "",
        "tests/studio/edge/test_expensive.py::test_what_a_read_took_is_charged_to_its_tenant_alone"),
    one("all long reads of a tenant run at once", "I2", "studio/edge/expensive.py",
        "            async with turn:\n", "            if turn:\n",
        "tests/studio/edge/test_expensive.py::test_one_at_a_time_of_each_tenant"),
    one("a host forgets what a database granted", "I5", "ledger/engines/postgres/engine.py",
        "            self._stamp.raise_to(_STAMPED, state)\n", "            return\n",
        "tests/ledger/engines/postgres/test_stamp.py::test_a_restored_database_grants_nothing_until_somebody_says_so"),
    one("the quick way of a grant does not ask what was granted", "I5", "ledger/engines/postgres/hot_verbs.py",
        "                    self.engine.highest_epoch(),\n", "                    0,\n",
        "tests/ledger/engines/postgres/test_stamp.py::test_a_restored_database_grants_nothing_until_somebody_says_so"),
)  # fmt: skip


class Rotten(ValueError):
    """An edit that does not fit the source any more."""


def applied(mutant: Mutant, source: Path) -> dict[Path, str]:
    """Each file the mutant changes, changed."""
    texts: dict[Path, str] = {}
    for edit in mutant.edits:
        path = source / edit.file
        text = texts.get(path) or path.read_text()
        found = text.count(edit.old)
        if found != 1:
            raise Rotten(f"{mutant.name}: the text to change stands {found} times in {edit.file}")
        texts[path] = text.replace(edit.old, edit.new)
    return texts


def ids_in(text: str) -> set[str]:
    """The invariants a text names: by themselves, or within "L1-L5"."""
    found = set(re.findall(r"\b[LSCTKAXI][1-8]\b", text))
    for kind, first, last in re.findall(r"\b([LSCTKX])([1-8])-\1([1-8])\b", text):
        found |= {f"{kind}{n}" for n in range(int(first), int(last) + 1)}
    return found


@cache
def _parsed(file: Path) -> ast.Module:
    """Each file of tests once: most are named by several bugs."""
    return ast.parse(file.read_text())


def guards(test: str) -> set[str]:
    """The invariants that a test says it guards: in its name or its first words, or in those of its file when the whole file is named."""
    file, _, name = test.partition("::")
    tree = _parsed(ROOT / file)
    if not name:
        return ids_in(ast.get_docstring(tree) or "")
    name = name.partition("[")[0]
    found = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name)
    return ids_in(ast.get_docstring(found) or "") | ids_in(name.upper().replace("_", " "))


@dataclass(frozen=True, slots=True)
class Covered:
    """One invariant: the bugs that break it, and the tests that see them and name it."""

    rule: str
    mutants: tuple[Mutant, ...]
    tests: tuple[str, ...]


def coverage(mutants: tuple[Mutant, ...] = MUTANTS) -> list[Covered]:
    found = []
    for rule in RULES:
        of_it = tuple(m for m in mutants if m.rule == rule)
        tests = sorted({t for m in of_it for t in m.test.split() if rule in guards(t)})
        found.append(Covered(rule, of_it, tuple(tests)))
    return found


def coverage_table(killed: dict[str, bool]) -> list[str]:
    """By invariant; `killed` is by the names of those that were tried."""
    lines = ["| invariant | bugs that break it | killed | tests that name it |", "|---|---|---|---|"]
    for c in coverage():
        tried = [killed[m.name] for m in c.mutants if m.name in killed]
        said = f"{sum(tried)} of {len(tried)}" if tried else "not tried"
        if 0 < len(tried) < len(c.mutants):
            said += f", {len(c.mutants) - len(tried)} not tried"
        names = "; ".join(m.name for m in c.mutants)
        tests = ", ".join(f"`{t.removeprefix('tests/')}`" for t in c.tests)
        lines.append(f"| {c.rule} | {names} | {said} | {tests} |")
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    mutant: Mutant
    verdict: str  # 'killed', 'SURVIVED', 'hung', or what kept the test from being run
    seconds: float

    @property
    def killed(self) -> bool:
        return self.verdict == "killed"


def run_test(test: str, source: Path, seconds: float = SECONDS) -> tuple[int | None, str]:
    """pytest's exit code, None when it took too long; and what it said."""
    environment = {**os.environ, "PYTHONPATH": f"{source.parent}:{ROOT}"}
    # Plain: that it fails is enough, and how two long lists differ may take minutes to say.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "--no-header",
        "--tb=line",
        "--assert=plain",
        *test.split(),
    ]
    # To a file: what the test left behind may hold a pipe open long after pytest itself is over.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.seek(0)
        return code, output.read().decode(errors="replace")


def try_out(mutant: Mutant) -> Tried:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sublet-mutant-") as folder:
        copy = Path(folder) / "sublet"
        # With what was compiled: it is still that of every file that is not changed.
        shutil.copytree(SOURCE, copy)
        for path, text in applied(mutant, copy).items():
            path.write_text(text)
        code, said = run_test(mutant.test, copy)
    last = said.strip().splitlines()[-1][:200] if said.strip() else ""
    verdict = {None: "hung", 0: "SURVIVED", 1: "killed"}.get(code, f"not run ({last})")
    if code == 0 and "passed" not in said:
        verdict = "not run (skipped)"
    return Tried(mutant=mutant, verdict=verdict, seconds=time.monotonic() - began)


def green(tests: list[str]) -> list[str]:
    """Those of the named tests that are not green on the source as it is: they would prove nothing."""
    return [test for test in tests if run_test(test, SOURCE, 600)[0] != 0]


def table(tried: list[Tried]) -> str:
    lines = ["| bug | breaks | verdict | by | hidden by, and off |", "|---|---|---|---|---|"]
    for t in tried:
        test = t.mutant.test.replace("tests/", "")
        lines.append(
            f"| {t.mutant.name} | {t.mutant.rule} | {t.verdict} | `{test}` | {t.mutant.off or '–'} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m proof.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="only those whose name or rule contains one of these")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args(argv)
    chosen = [
        m
        for m in MUTANTS
        if not wanted.names or any(n in (m.rule, m.name) or n in m.name for n in wanted.names)
    ]
    for mutant in MUTANTS:
        applied(mutant, SOURCE)
    red = green(sorted({m.test for m in chosen}))
    if red:
        print(f"not green before anything was changed: {red}")
        return 2
    tried: list[Tried] = []
    with ThreadPoolExecutor(wanted.jobs) as pool:
        for t in pool.map(try_out, chosen):
            tried.append(t)
            print(f"{t.verdict:10} {t.seconds:5.1f} s  {t.mutant.rule:3} {t.mutant.name}", flush=True)
    print(table(tried))
    print("\n".join(["", *coverage_table({t.mutant.name: t.killed for t in tried})]))
    if wanted.json:
        wanted.json.write_text(
            json.dumps(
                [
                    {
                        "name": t.mutant.name,
                        "rule": t.mutant.rule,
                        "test": t.mutant.test,
                        "off": t.mutant.off,
                        "verdict": t.verdict,
                    }
                    for t in tried
                ],
                indent=1,
            )
        )
    return 0 if all(t.killed for t in tried) else 1


if __name__ == "__main__":
    sys.exit(main())
