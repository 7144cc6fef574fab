"""Devices: what hosts report, and what operators decide about them.

Rules of this file:
- A device belongs to one host. `core.leasing.hosts` decides whether another may take it; this file loads and
  writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sublet.core.errors import BadInput, DeviceTaken, NotFound, SubletError
from sublet.core.leasing.hosts import Host, HostStays, Moves, common_silence_us, may_move
from sublet.core.scheduling.device import Device, DeviceState
from sublet.ledger.rows import DEVICE_COLUMNS, SELECT_DEVICE, device_of
from sublet.ledger.tx import Tx, policy_of, write_main
from sublet.ledger.verbs.leasing.waitlist import hand_out
from sublet.ports.bell import SCHEDULE_TOPIC
from sublet.ports.ledger import FoundDevice

#: States that follow from what its host reports, and from nothing an operator or a teardown said.
_OF_ITS_HOST = (DeviceState.READY, DeviceState.LOST, DeviceState.TAKEN)


def report_host(
    tx: Tx, host: str, found: Sequence[FoundDevice], complete: bool, taken: Mapping[str, str]
) -> SubletError | None:
    _ = tx.pool
    elsewhere = [
        (device, device_of(row))
        for device in found
        if (row := tx.row(f"{SELECT_DEVICE} WHERE id = ? AND host <> ?", device.id, host)) is not None
    ]
    moves: list[Moves] = []
    for _, there in elsewhere:
        decision = may_move(there, load_host(tx, there.host), tx.pool.policy, tx.now)
        if isinstance(decision, HostStays):
            return BadInput(decision.reason, remedy=decision.remedy)
        moves.append(decision)
    _beat(tx, host)
    for (device, there), decision in zip(elsewhere, moves, strict=True):
        _move(tx, device, there, host, decision)
    known = {d.id: d for d in map(device_of, tx.rows(f"{SELECT_DEVICE} WHERE host = ?", host))}
    changes = [f"+{device.id}" for device, _ in elsewhere]
    for device in found:
        if change := _note(tx, host, device, known.get(device.id), taken):
            changes.append(change)
    if complete:
        names = {d.id for d in found}
        for old in known.values():
            # What an operator, or an unproven teardown, withheld stays withheld: it must not come back as
            # ready.
            if old.id not in names and old.state in (DeviceState.READY, DeviceState.TAKEN):
                tx.run("UPDATE device SET state = 'lost', note = 'not reported' WHERE id = ?", old.id)
                changes.append(f"-{old.id}")
    if changes:
        write_main(tx, "host.reported", "", host, {"changes": sorted(changes)})
        hand_out(tx)
    return None


def _note(tx: Tx, host: str, device: FoundDevice, old: Device | None, taken: Mapping[str, str]) -> str:
    """Write what was found of one device; what changed, or ''."""
    if old is None:
        tx.run(
            f"INSERT INTO device ({DEVICE_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,0,0,0,'',?)",
            device.id,
            host,
            device.driver,
            device.ordinal,
            device.name,
            device.capacity_bytes,
            device.capacity_bytes,
            (DeviceState.TAKEN if device.id in taken else DeviceState.READY).value,
            taken.get(device.id, ""),
        )
        return f"+{device.id}"
    elif device.id in taken:
        # What an operator withheld stays withheld, whoever grants it meanwhile.
        if old.state in _OF_ITS_HOST and (old.state, old.note) != (DeviceState.TAKEN, taken[old.id]):
            tx.run("UPDATE device SET state = 'taken', note = ? WHERE id = ?", taken[old.id], old.id)
            return f"-{old.id}"
    elif old.capacity_bytes != device.capacity_bytes and old.leases == 0:
        tx.run(
            "UPDATE device SET capacity_bytes = ?, free_bytes = ?, name = ?, state = ?, note = ? "
            "WHERE id = ?",
            device.capacity_bytes,
            device.capacity_bytes,
            device.name,
            (DeviceState.READY if old.state in _OF_ITS_HOST else old.state).value,
            "" if old.state in _OF_ITS_HOST else old.note,
            device.id,
        )
        return f"~{device.id}"
    elif old.state in (DeviceState.LOST, DeviceState.TAKEN):
        tx.run("UPDATE device SET state = 'ready', note = '' WHERE id = ?", device.id)
        return f"+{device.id}"
    return ""


def load_host(tx: Tx, name: str) -> Host | None:
    row = tx.row("SELECT name, seen_at FROM host WHERE name = ?", name)
    return Host(name=row[0], seen_at=row[1]) if row is not None else None


def load_hosts(tx: Tx) -> list[Host]:
    return [
        Host(name=name, seen_at=seen_at)
        for name, seen_at in tx.rows("SELECT name, seen_at FROM host ORDER BY name")
    ]


def _move(tx: Tx, device: FoundDevice, old: Device, host: str, decision: Moves) -> None:
    tx.run(
        "UPDATE device SET host = ?, ordinal = ?, name = ?, capacity_bytes = ?, free_bytes = ?, state = ?, "
        "note = ? WHERE id = ?",
        host,
        device.ordinal,
        device.name,
        device.capacity_bytes,
        device.capacity_bytes,
        decision.state.value,
        decision.note,
        device.id,
    )
    write_main(
        tx,
        "device.moved",
        "",
        device.id,
        {"from": old.host, "to": host, "state": decision.state.value, "reason": decision.reason},
    )


def _beat(tx: Tx, host: str) -> None:
    # Looked at without a lock, for every host beats all the time; and again with it before anything is
    # changed.
    if _unheard_us(tx) and (unheard := _unheard_us(tx, locked=True)):
        tx.run("UPDATE host SET seen_at = seen_at + ?", unheard)
        write_main(
            tx, "host.unheard", "", host, {"for_us": unheard, "reason": "nobody was heard: nobody's silence"}
        )
    tx.run(
        "INSERT INTO host (name, seen_at) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET seen_at = "
        "excluded.seen_at",
        host,
        tx.now,
    )


def _unheard_us(tx: Tx, *, locked: bool = False) -> int:
    if locked:
        policy = tx.pool.policy
    else:
        row = tx.row("SELECT policy FROM pool WHERE id = 1")
        assert row is not None
        policy = policy_of(row[0])
    return common_silence_us(load_hosts(tx), policy, tx.now)


def beat_host(tx: Tx, host: str) -> None:
    _beat(tx, host)


def list_devices(tx: Tx, host: str) -> list[Device]:
    if host:
        return [device_of(r) for r in tx.rows(f"{SELECT_DEVICE} WHERE host = ? ORDER BY id", host)]
    return [device_of(r) for r in tx.rows(f"{SELECT_DEVICE} ORDER BY host, ordinal, id")]


def set_device(tx: Tx, device_id: str, state: str, note: str, actor: str) -> Device | SubletError:
    wanted = (DeviceState.READY, DeviceState.DRAINING, DeviceState.QUARANTINED)
    if state not in {s.value for s in wanted}:
        return BadInput(f"device state {state[:40]!r} is unknown: use ready, draining or quarantined")
    _ = tx.pool
    row = tx.locked(f"{SELECT_DEVICE} WHERE id = ?", device_id)
    if row is None:
        return NotFound(f"there is no device {device_id[:60]!r}", remedy="'sublet gpus' lists them")
    if (old := device_of(row)).state is DeviceState.TAKEN and state == DeviceState.READY.value:
        return DeviceTaken(old.note)
    tx.run("UPDATE device SET state = ?, note = ? WHERE id = ?", state, note, device_id)
    write_main(tx, f"device.{state}", "", device_id, {"reason": note, "by": actor, "was": row[7]})
    if state == DeviceState.READY.value:
        hand_out(tx)
    tx.rings.add(SCHEDULE_TOPIC)
    changed = tx.row(f"{SELECT_DEVICE} WHERE id = ?", device_id)
    assert changed is not None
    return device_of(changed)
