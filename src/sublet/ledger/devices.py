"""Devices: what hosts report, and what operators decide about them.

Rules of this file:
- A device is of one host. Another may have it when the first is silent or does not report it any more, and nothing of the first is left on it:
  a cloud gives the same GPU to the next machine, under another name.
"""

from __future__ import annotations

from collections.abc import Sequence

from sublet.core.device import Device, DeviceState
from sublet.core.errors import BadInput, NotFound, SubletError
from sublet.ledger.rows import DEVICE_COLUMNS, SELECT_DEVICE, device_of
from sublet.ledger.tx import Tx, write_main
from sublet.ledger.waitlist import hand_out
from sublet.ports.ledger import FoundDevice
from sublet.ports.topics import SCHEDULE_TOPIC


def report_host(tx: Tx, host: str, found: Sequence[FoundDevice], complete: bool) -> SubletError | None:
    _ = tx.pool
    elsewhere = [
        (device, device_of(row))
        for device in found
        if (row := tx.row(f"{SELECT_DEVICE} WHERE id = ? AND host <> ?", device.id, host)) is not None
    ]
    for _, there in elsewhere:
        refusal = _not_ours(tx, there)
        if refusal is not None:
            return refusal
    _beat(tx, host)
    for device, there in elsewhere:
        _move(tx, device, there, host)
    known = {d.id: d for d in map(device_of, tx.rows(f"{SELECT_DEVICE} WHERE host = ?", host))}
    changes = [f"+{device.id}" for device, _ in elsewhere]
    for device in found:
        old = known.get(device.id)
        if old is None:
            tx.run(
                f"INSERT INTO device ({DEVICE_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,0,0,0,'','')",
                device.id,
                host,
                device.driver,
                device.ordinal,
                device.name,
                device.capacity_bytes,
                device.capacity_bytes,
                DeviceState.READY.value,
            )
            changes.append(f"+{device.id}")
        elif old.capacity_bytes != device.capacity_bytes and old.leases == 0:
            tx.run(
                "UPDATE device SET capacity_bytes = ?, free_bytes = ?, name = ?, state = ? WHERE id = ?",
                device.capacity_bytes,
                device.capacity_bytes,
                device.name,
                (old.state if old.state is not DeviceState.LOST else DeviceState.READY).value,
                device.id,
            )
            changes.append(f"~{device.id}")
        elif old.state is DeviceState.LOST:
            tx.run("UPDATE device SET state = 'ready', note = '' WHERE id = ?", device.id)
            changes.append(f"+{device.id}")
    if complete:
        names = {d.id for d in found}
        for old in known.values():
            # What an operator, or an unproven teardown, withheld stays withheld: it must not come back as ready.
            if old.id not in names and old.state is DeviceState.READY:
                tx.run("UPDATE device SET state = 'lost', note = 'not reported' WHERE id = ?", old.id)
                changes.append(f"-{old.id}")
    if changes:
        write_main(tx, "host.reported", "", host, {"changes": sorted(changes)})
        hand_out(tx)
    return None


def _not_ours(tx: Tx, old: Device) -> SubletError | None:
    """None when the device may be another host's from now on."""
    heard = tx.row("SELECT seen_at FROM host WHERE name = ?", old.host)
    silent = heard is None or heard[0] < tx.now - tx.pool.policy.host_silence_us
    if not silent and old.state is not DeviceState.LOST:
        return BadInput(
            f"device {old.id} already belongs to host {old.host}, whose warden is running",
            remedy="give each machine its own SUBLET_HOST, and each device one",
        )
    if old.leases:
        return BadInput(
            f"device {old.id} was on host {old.host}, which is silent, with {old.leases} lease(s) not settled yet",
            remedy="start the warden of that host again, or wait: they end at their deadlines, and a host silent for the policy's "
            "host_gone is given up",
        )
    return None


def _move(tx: Tx, device: FoundDevice, old: Device, host: str) -> None:
    """What was withheld stays withheld."""
    state = DeviceState.READY if old.state is DeviceState.LOST else old.state
    tx.run(
        "UPDATE device SET host = ?, ordinal = ?, name = ?, capacity_bytes = ?, free_bytes = ?, state = ?, note = ? WHERE id = ?",
        host,
        device.ordinal,
        device.name,
        device.capacity_bytes,
        device.capacity_bytes,
        state.value,
        "" if state is DeviceState.READY else old.note,
        device.id,
    )
    write_main(tx, "device.moved", "", device.id, {"from": old.host, "to": host, "state": state.value})


def _beat(tx: Tx, host: str) -> None:
    tx.run(
        "INSERT INTO host (name, seen_at) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET seen_at = excluded.seen_at",
        host,
        tx.now,
    )


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
    tx.run("UPDATE device SET state = ?, note = ? WHERE id = ?", state, note, device_id)
    write_main(tx, f"device.{state}", "", device_id, {"reason": note, "by": actor, "was": row[7]})
    if state == DeviceState.READY.value:
        hand_out(tx)
    tx.rings.add(SCHEDULE_TOPIC)
    changed = tx.row(f"{SELECT_DEVICE} WHERE id = ?", device_id)
    assert changed is not None
    return device_of(changed)
