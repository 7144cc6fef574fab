"""The programs of a simulated world: what a trainer, a visitor, a worker, a warden and an operator do.

Rules of this file:
- A program is a generator: it yields a message to the ledger or a sleep, and is resumed with the answer, or with the error in its place. It
  may be dropped at any yield for ever, as a killed process is.
- They follow the same order as the runtime: fail closed (L7), stop by the own clock (L6), renew as `core.leasing.renewal` says, read before anything is
  repeated (S5), and sync before acting on what was merely read.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sublet.core.errors import (
    Damaged,
    Disconnected,
    EffectBusy,
    Fenced,
    FingerprintMismatch,
    HeadMoved,
    LeaseLost,
    NotFound,
    SubletError,
)
from sublet.core.leasing.lease import EndReason, LeaseState, Request, Tier
from sublet.core.leasing.renewal import RenewalAction, Tenure, local_deadline, next_move
from sublet.core.progress.effect import AlreadyCommitted, Commit
from sublet.core.queues.items import Ack, Nack, NewItem
from sublet.core.scheduling.device import Exclusivity
from sublet.ports.bell import lease_topic
from sublet.ports.processes import Receipt

if TYPE_CHECKING:
    from proof.deep.world import Held, Process, World

Program = Generator[tuple[Any, ...], Any, Any]
GIB = 1 << 30


def call(verb: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return ("call", verb, args, kwargs)


def sleep(us: int) -> tuple[Any, ...]:
    return ("sleep", max(1, us))


# --- a lease ---------------------------------------------------------------------------------------------------


def a_request(w: World, tenant: str, *, job: str = "", tier: Tier | None = None) -> Request:
    c = w.chance
    vram = c.choice([2, 4, 8, 16]) * GIB
    return Request(
        tenant=tenant,
        vram_bytes=vram,
        ttl_us=w.unit(c.choice([60, 120, 300])),
        count=c.choice([1, 1, 1, 2]),
        least_bytes=c.choice([0, 0, vram // 2]),
        wants_offers=c.random() < 0.3,
        exclusivity=c.choice(
            [Exclusivity.SHARED, Exclusivity.SHARED, Exclusivity.SESSION, Exclusivity.DEVICE]
        ),
        tier=tier or c.choice(list(Tier)),
        wait_us=c.choice([None, 0, w.unit(100), w.unit(2000)]),
        job=job,
    )


def take(w: World, p: Process, request: Request) -> Program:
    """Acquire, wait, claim; None when there is no lease. As `leases.acquire` does it."""
    from proof.deep.world import Held

    lease_id, secret = w.name("L"), w.secret()
    sent = p.local()
    answer = None
    for attempt in range(8):
        try:
            answer = yield call("acquire", lease_id, secret, request, p.holder())
            break
        except Disconnected:
            yield sleep(w.unit(1 << min(attempt, 4)))
        except SubletError:
            return None
    while answer is not None and answer.lease.state is LeaseState.WAITING:
        lease = answer.lease
        verb = "attend"
        if lease.slices and lease.offer_until > answer.at:
            verb = w.chance.choice(["accept", "decline", "attend"])
        if verb == "attend":
            yield ("wait", w.unit(w.chance.choice([5, 20, 60])), lease_topic(lease_id))
        sent = p.local()
        try:
            answer = yield call(verb, lease_id, secret)
        except Disconnected:
            yield sleep(w.unit(2))
            try:
                answer = yield call("attend", lease_id, secret, explain=False)
            except Disconnected:
                if w.chance.random() < 0.2:
                    return None
            except SubletError:
                return None
        except SubletError:
            if verb == "attend":
                return None
    if answer is None or answer.lease.state not in (LeaseState.ACTIVE, LeaseState.REVOKING):
        return None
    if not answer.lease.claimed:
        for _ in range(3):
            sent = p.local()
            try:
                answer = yield call("renew", _key(lease_id, answer.lease.epoch, secret))
                break
            except Disconnected:
                yield sleep(w.unit(1))
            except SubletError:
                return None
        else:
            return None
    lease = answer.lease
    if lease.state is LeaseState.REVOKING:
        span = max(0, lease.deadline_at - answer.at)
    else:
        span = max(0, min(request.ttl_us, lease.expires_at - answer.at))
    held = Held(lease_id, secret, lease.epoch, span, sent, local_deadline(sent, span))
    w.checks.took_up(held.epoch)
    w.kept[lease_id] = held
    w.run_thread(p, keeper(w, p, held, request.ttl_us))
    return held


def _key(lease_id: str, epoch: int, secret: str) -> Any:
    from sublet.ports.ledger import LeaseKey

    return LeaseKey(lease_id, epoch, secret)


def keeper(w: World, p: Process, held: Held, ttl_us: int) -> Program:
    """Renews in time, notices a revoke, and says it is lost when the holder's own deadline has passed."""
    tenure = Tenure(ttl_us=held.ttl_us, sent_at=held.sent_at, seed=held.epoch, worked=True)
    looked = p.local()
    while not held.lost:
        now = p.local()
        if now >= held.deadline:
            held.lost = True
            return
        if held.revoking:
            yield sleep(held.deadline - now)
            continue
        if now - looked > held.ttl_us // 5:
            looked = sent = now
            try:
                answer = yield call("look", held.lease_id)
                _seen(held, answer, sent)
            except Disconnected:
                pass
            except SubletError:
                held.lost = True
            continue
        move = next_move(tenure, now)
        if move.todo is RenewalAction.RENEW:
            sent = p.local()
            try:
                answer = yield call("renew", held.key, busy=w.chance.random() < 0.9)
                span = max(0, min(ttl_us, answer.lease.expires_at - answer.at))
                held.deadline = local_deadline(sent, span)
                tenure = replace(tenure, ttl_us=span, sent_at=sent, attempt=0, warned=False)
            except Disconnected:
                tenure = replace(tenure, attempt=tenure.attempt + 1, tried_at=p.local())
            except SubletError:
                tenure = replace(tenure, attempt=tenure.attempt + 1, tried_at=p.local())
                try:
                    answer = yield call("look", held.lease_id)
                    _seen(held, answer, sent)
                except Disconnected:
                    pass
                except SubletError:
                    held.lost = True
        elif move.todo in (RenewalAction.WARN_IDLE, RenewalAction.WARN_UNREACHABLE):
            tenure = replace(tenure, warned=True)
        else:
            yield sleep(min(move.at - now, held.ttl_us // 5 + 1))


def _seen(held: Held, answer: Any, sent: int) -> None:
    lease = answer.lease
    if lease.state is LeaseState.ENDED or lease.epoch != held.epoch:
        held.lost = True
    elif lease.state is LeaseState.REVOKING:
        held.revoking = True
        held.deadline = sent + lease.deadline_at - answer.at


def may_work(p: Process, held: Held) -> bool:
    return not held.lost and p.local() < held.deadline


def give_back(w: World, p: Process, held: Held) -> Program:
    held.lost = True
    for _ in range(3):
        try:
            yield call("release", held.lease_id, held.secret)
            return
        except Disconnected:
            yield sleep(w.unit(1))
        except SubletError:
            return


# --- training --------------------------------------------------------------------------------------------------


def trainer(w: World, p: Process, job: str, tenant: str) -> Program:
    """Steps by reserve and commit, one after the other, for ever."""
    while True:
        held = yield from take(w, p, a_request(w, tenant, job=job))
        if held is None:
            yield sleep(w.unit(w.chance.choice([10, 60])))
            continue
        steps = 0
        while may_work(p, held) and not held.revoking:
            steps += 1
            try:
                going_on = yield from one_step(w, p, held, job)
            except Disconnected:
                yield sleep(w.unit(2))
                going_on = True
            if not going_on or (
                w.quiet and steps > 2
            ):  # batch has no hold cap: to see everybody go on, each must let the others
                break
        if w.chance.random() < 0.3 and not held.lost:
            yield sleep(w.unit(30))
        # A zombie: it does not know, or does not care, that its time is over. Whatever it writes must not count.
        if w.chance.random() < 0.2:
            yield sleep(w.unit(400))
            try:
                head = yield call("head", job)
                step = (head.step if head else 0) + 1
                yield call(
                    "commit", held.key, a_commit(job, step, head.version if head else 0, held.lease_id)
                )
            except SubletError:
                pass
        yield from give_back(w, p, held)
        if w.chance.random() < 0.1:
            yield sleep(w.unit(300))


def a_commit(job: str, step: int, version: int, by: str) -> Commit:
    key = f"{job}:{step}"
    return Commit(
        job=job,
        key=key,
        step=step,
        fingerprint=f"inputs of {key}",
        expected_version=version,
        digest=f"digest {step} {by}",
        cursor=str(step),
        outcome=f"outcome of {key}",
    )


def one_step(w: World, p: Process, held: Held, job: str) -> Program:
    """Whether to go on."""
    head = yield call("head", job)
    version, step = (head.version, head.step + 1) if head else (0, 1)
    key = f"{job}:{step}"
    try:
        reserved = yield call("reserve", held.key, effect=key, job=job, fingerprint=f"inputs of {key}")
        if isinstance(reserved, AlreadyCommitted):
            return True
        if w.chance.random() < 0.05:
            try:
                yield call("reserve", held.key, effect=key, job=job, fingerprint="other inputs")
            except FingerprintMismatch:
                pass
            else:
                w.checks.fail("S4", f"{key} was reserved with two fingerprints")
    except EffectBusy:
        yield sleep(w.unit(30))
        return True
    except (Fenced, LeaseLost, NotFound):
        return False
    if not may_work(p, held):
        return False
    w.checks.device_work(p, held)
    yield sleep(w.unit(w.chance.choice([5, 20, 60])))
    other = next(j for j in sorted(w.targets) if j.split("/")[0] != job.split("/")[0])
    if w.chance.random() < 0.03 and w.version(other):  # T1: another tenant's job is not there
        try:
            yield call("commit", held.key, a_commit(other, step, version, held.lease_id))
        except Disconnected:
            pass
        except SubletError as e:
            if e.code not in ("not_found", "fenced", "lease_lost"):
                w.checks.fail("T1", f"a commit to {other} was answered {e.code}")
    commit = a_commit(job, step, version, held.lease_id)
    while True:
        try:
            yield call("commit", held.key, commit)
            return True
        except Disconnected:
            # S5: nothing is repeated before it was read whether it happened.
            while True:
                yield sleep(w.unit(2))
                try:
                    effect = yield call("effect", key)
                    break
                except Disconnected:
                    if not may_work(p, held):
                        return False
            if effect is not None and effect.completed:
                return True
        except HeadMoved:
            return True
        except EffectBusy:
            yield sleep(w.unit(30))
            return True
        except (Fenced, LeaseLost, NotFound):
            return False


def saver(w: World, p: Process, job: str, tenant: str) -> Program:
    """The same through the checkpoint store: load, step, save; the state is what it should be, to the bit."""
    while True:
        held = yield from take(w, p, a_request(w, tenant, job=job))
        if held is None:
            yield sleep(w.unit(w.chance.choice([10, 60])))
            continue
        loaded = False
        steps = 0
        while may_work(p, held) and not held.revoking and not (w.quiet and steps > 2):
            steps += 1
            try:
                head = yield call("head", job)
            except Disconnected:
                yield sleep(w.unit(2))
                continue
            version, step = (head.version, head.step + 1) if head else (0, 1)
            try:
                if head is not None and (not loaded or w.chance.random() < 0.1):
                    w.load(p, job, head.step)
                loaded = True
                w.checks.device_work(p, held) if may_work(p, held) else None
                yield sleep(w.unit(w.chance.choice([5, 20, 60])))
                if may_work(p, held):
                    w.save(p, held, job, step, version)
            except Damaged:
                yield sleep(w.unit(100))
            except (Fenced, LeaseLost):
                break
            except SubletError:
                yield sleep(w.unit(5))
        yield from give_back(w, p, held)
        yield sleep(w.unit(w.chance.choice([1, 30])))


# --- visitors ---------------------------------------------------------------------------------------------------


def visitor(w: World, p: Process, tenant: str) -> Program:
    """Comes, computes a little, is idle a little, leaves or forgets to."""
    while True:
        yield sleep(w.unit(w.chance.choice([20, 100, 400])))
        held = yield from take(w, p, a_request(w, tenant))
        if held is None:
            continue
        for _ in range(w.chance.choice([1, 3, 10])):
            if not may_work(p, held) or held.revoking:
                break
            w.checks.device_work(p, held)
            yield sleep(w.unit(w.chance.choice([2, 10, 40])))
            try:
                yield call("mark", held.key, busy=w.chance.random() < 0.5)
            except SubletError:
                pass
        if w.chance.random() < 0.85:
            yield from give_back(w, p, held)
        else:
            held.lost = True


# --- a queue ----------------------------------------------------------------------------------------------------


def publisher(w: World, p: Process, tenant: str) -> Program:
    consumer = None
    batch = 0
    while True:
        yield sleep(w.unit(w.chance.choice([20, 60, 200])))
        try:
            if consumer is None:
                consumer = yield call("open_consumer", w.queues["images"], p.holder())
        except SubletError:
            continue
        batch += 1
        number = w.chance.randrange(1 << 30)
        drafts = [
            NewItem(body=f'{{"n": {number + i}}}', key=w.chance.choice(["", f"k{number + i}"]))
            for i in range(w.chance.randint(1, 5))
        ]
        for _ in range(20):
            try:
                yield call("publish", consumer, batch, drafts)
                break
            except Disconnected:
                yield sleep(w.unit(3))
            except NotFound:  # a backup was put back, in which there is no such consumer
                consumer = None
                break


def worker(w: World, p: Process, tenant: str) -> Program:
    """Pulls, extends, completes under a lease or without, gives back, or is too late."""
    consumer = None
    while True:
        held = None
        if w.chance.random() < 0.4:
            held = yield from take(w, p, a_request(w, tenant))
        try:
            if consumer is None:
                consumer = yield call("open_consumer", w.queues["images"], p.holder())
            got = yield call("pull", consumer, w.chance.randint(1, 3), w.unit(60), ())
        except Disconnected:
            yield sleep(w.unit(5))
            continue
        except NotFound:
            consumer = None
            continue
        if got:
            yield sleep(w.unit(w.chance.choice([5, 20, 80])))
            if w.chance.random() < 0.3:
                try:
                    yield call("extend", consumer, [(d.item, d.delivery) for d in got], w.unit(60))
                except SubletError:
                    pass
            yield from finish(w, consumer, got, held)
        else:
            yield sleep(w.unit(w.chance.choice([10, 60])))
        if held is not None:
            yield from give_back(w, p, held)


def finish(w: World, consumer: int, got: list[Any], held: Held | None) -> Program:
    failed = w.chance.random() < 0.15
    for _ in range(10):
        try:
            if failed:
                yield call(
                    "give_back",
                    consumer,
                    [Nack(item=d.item, delivery=d.delivery, failed=w.chance.random() < 0.5) for d in got],
                )
            else:
                acks = [Ack(item=d.item, delivery=d.delivery, result=f'"{d.body}"', work_us=5) for d in got]
                yield call("complete", consumer, acks, lease=held.key if held is not None else None)
            return
        except Disconnected:
            yield sleep(w.unit(3))
        except SubletError:
            return


# --- hosts ------------------------------------------------------------------------------------------------------


def warden(w: World, p: Process) -> Program:
    """Reports, runs the schedule, ends who is over, settles. After its own death it begins from rows (K3)."""
    due: dict[str, tuple[int, int]] = {}  # lease: its holder's pid, its end by the warden's clock
    rounds = 0
    while True:
        swept = False
        try:
            if rounds % 8 == 0:
                yield call("report_host", p.host, w.devices_of(p.host))
            else:
                yield call("beat_host", p.host)
            rounds += 1
            yield call("tick", p.host)
            asked = p.local()
            view = yield call("host_view", p.host)
            yield call("barrier")
            due = {}
            for lease in view.leases:
                if not lease.holder.pid:
                    continue
                holder = w.processes.get(lease.holder.pid)
                gone = holder is None or not holder.alive
                if lease.state is LeaseState.ENDED:
                    if holder is not None and holder.alive:
                        w.end(holder)
                    proven = not w.chanced(w.mix.unproven)
                    if not proven:
                        w.fault("unproven teardown")
                    yield call(
                        "settle",
                        lease.id,
                        lease.epoch,
                        Receipt(proven=proven, ladder="kill", containment="sim", duration_us=1),
                    )
                elif gone:
                    yield call(
                        "end",
                        lease.id,
                        lease.epoch,
                        reason=EndReason.HOLDER_LOST,
                        detail="its holder is gone",
                    )
                elif lease.state is not LeaseState.WAITING:
                    ends = lease.deadline_at if lease.state is LeaseState.REVOKING else lease.expires_at
                    due[lease.id] = (lease.holder.pid, asked + ends - view.at)
            swept = True
        except Disconnected:
            pass
        except SubletError:
            pass
        if swept:
            w.checks.ran["K3"] += 1
            for lease in view.leases:
                holder = w.processes.get(lease.holder.pid) if lease.holder.pid else None
                if lease.state is LeaseState.ENDED and holder is not None and holder.alive:
                    w.checks.fail("K3", f"{lease.id} ended, and pid {holder.pid} outlived a sweep")
        else:
            # K2: the ledger is silent; what is due by the warden's own clock ends all the same.
            for lease_id, (pid, at) in list(due.items()):
                if p.local() > at:
                    w.checks.ran["K2"] += 1
                    holder = w.processes.get(pid)
                    if holder is not None:
                        w.end(holder)
                    due.pop(lease_id)
        yield sleep(w.unit(20))


def operator(w: World, p: Process, tenant: str) -> Program:
    """Somebody who changes things at the wrong moment."""
    tokens: list[str] = []
    while True:
        yield sleep(int(w.unit(60) * (0.03 / max(0.001, w.mix.operator))))
        if w.quiet:
            continue
        what = w.chance.randrange(9)
        try:
            if what <= 2:
                live = w.engine.rows(
                    "SELECT id FROM lease WHERE settled_at = 0 AND state <> 'ended' ORDER BY id"
                )
                if live:
                    yield call(
                        "revoke", w.chance.choice(live)[0], reason=EndReason.REVOKED, detail="wanted back",
                        grace_us=w.chance.choice([0, w.unit(5), w.unit(100)]), actor="operator",
                    )  # fmt: skip
            elif what == 3:
                device = w.chance.choice(w.devices_of(w.chance.choice(w.hosts())))
                state = w.chance.choice(["ready", "ready", "quarantined", "draining"])
                yield call("set_device", device.id, state=state, note="looked at", actor="operator")
            elif what == 4:
                quota = w.chance.choice([0, 0, w.unit(500), w.unit(5000)])
                yield call(
                    "set_tenant",
                    w.chance.choice(["bob", "eve"]),
                    actor="operator",
                    max_leases=w.chance.choice([0, 1, 3]),
                    gpu_us_per_day=quota,
                )
            elif what == 5:
                yield call("seal")
            elif what == 6:
                token = f"{w.names.getrandbits(48):012x}"
                yield call(
                    "add_token",
                    token,
                    f"{w.names.getrandbits(256):064x}",
                    "ada",
                    actor="operator",
                    lifetime_us=w.unit(3000),
                )
                tokens.append(token)
            elif what == 7 and tokens:
                token = tokens.pop(w.chance.randrange(len(tokens)))
                yield call("revoke_token", token, actor="operator")
                found = yield call("look_token", token)
                if found is not None and not found.revoked_at:
                    w.checks.fail("T1", f"token {token} was revoked and is let in")
            else:
                dead = w.engine.rows("SELECT count(*) FROM item WHERE state = 'dead'")[0][0]
                if dead:
                    yield call("redrive", w.queues["images"], None, most=10, actor="operator")
        except SubletError:
            continue
