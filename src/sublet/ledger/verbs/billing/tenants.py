"""Tenants and their quotas, as operators set them."""

from __future__ import annotations

from sublet.core.billing.allowance import Allowance
from sublet.core.errors import BadInput, SubletError
from sublet.core.leasing.tenancy import Tenant, check_former
from sublet.ledger.rows import SELECT_TENANT, TENANT_COLUMNS, tenant_of
from sublet.ledger.tx import Tx, write_main
from sublet.ledger.verbs.leasing import allowances
from sublet.ledger.verbs.leasing.slices import load_tenant, unknown_tenant
from sublet.ledger.verbs.progress import storage_quota
from sublet.ledger.verbs.studio import sessions, tokens
from sublet.ports.bell import SCHEDULE_TOPIC


def list_tenants(tx: Tx) -> list[Tenant]:
    return [tenant_of(r) for r in tx.rows(f"{SELECT_TENANT} ORDER BY name")]


def get_tenant(tx: Tx, name: str) -> Tenant | SubletError:
    return load_tenant(tx, name) or unknown_tenant(name)


def get_allowance(tx: Tx, name: str) -> Allowance | SubletError:
    tenant = load_tenant(tx, name)
    return allowances.look(tx, tenant) if tenant is not None else unknown_tenant(name)


def _limits(tenant: Tenant) -> dict[str, object]:
    return {
        "weight": tenant.weight,
        "max_leases": tenant.max_leases,
        "max_vram_bytes": tenant.max_vram_bytes,
        "max_waiting": tenant.max_waiting,
        "gpu_us_per_day": tenant.gpu_us_per_day,
        "max_sessions": tenant.max_sessions,
        "max_storage_bytes": tenant.max_storage_bytes,
    }


def add_tenant(tx: Tx, tenant: Tenant, actor: str, exist_ok: bool, returning: bool) -> Tenant | SubletError:
    _ = tx.pool
    known = load_tenant(tx, tenant.name)
    if known is not None:
        return known if exist_ok or tx.again else BadInput(f"tenant {tenant.name} exists already")
    refusal = check_former(tenant.name, former=_is_former(tx, tenant.name), returning=returning)
    if refusal is not None:
        return refusal
    tx.run("DELETE FROM former_tenant WHERE name = ?", tenant.name)
    tx.run(
        f"INSERT INTO tenant ({TENANT_COLUMNS}) VALUES (?,?,?,?,?,0,0,0,0,0,?,0,?,?,?,?,?)",
        tenant.name,
        tenant.weight,
        tenant.max_leases,
        tenant.max_vram_bytes,
        tenant.max_waiting,
        tx.now,
        tenant.gpu_us_per_day,
        tenant.gpu_us_per_day,
        tx.now,
        tenant.max_sessions,
        tenant.max_storage_bytes,
    )
    told = {**_limits(tenant), "by": actor} | ({"returning": True} if returning else {})
    write_main(tx, "tenant.added", tenant.name, tenant.name, told)
    added = load_tenant(tx, tenant.name)
    assert added is not None
    return added


def _is_former(tx: Tx, name: str) -> bool:
    return tx.row("SELECT 1 FROM former_tenant WHERE name = ?", name) is not None


def set_tenant(tx: Tx, name: str, changes: dict[str, int], actor: str) -> Tenant | SubletError:
    _ = tx.pool
    tenant, changes = load_tenant(tx, name), dict(changes)  # a second try needs them whole
    if tenant is None:
        return unknown_tenant(name)
    if "gpu_us_per_day" in changes:
        allowances.change(tx, tenant, changes.pop("gpu_us_per_day"))
    if changes.get("max_storage_bytes") and not tenant.max_storage_bytes:
        storage_quota.begin_limiting(tx, name)
    for column, value in sorted(changes.items()):
        tx.run(f"UPDATE tenant SET {column} = ? WHERE name = ?", value, name)
    changed = load_tenant(tx, name)
    assert changed is not None
    tx.rings.add(SCHEDULE_TOPIC)  # somebody may be waiting for just this
    write_main(tx, "tenant.changed", name, name, {**_limits(changed), "by": actor})
    return changed


def remove_tenant(tx: Tx, name: str, actor: str) -> SubletError | None:
    _ = tx.pool
    tenant = load_tenant(tx, name)
    if tenant is None:
        return None if tx.again else unknown_tenant(name)
    if tenant.live_leases or tenant.waiting:
        return BadInput(
            f"tenant {name} still holds {tenant.live_leases} lease(s) and waits for {tenant.waiting}",
            remedy="revoke or release them first; 'sublet ps' lists them",
        )
    kept = tx.row("SELECT count(*) FROM block WHERE tenant = ? AND state <> 'gone'", name)
    if kept is not None and kept[0]:
        return BadInput(
            f"tenant {name} still has {kept[0]} block(s)",
            remedy="remove them first: 'sublet block ls' and 'sublet block rm'",
        )
    staying = tx.row("SELECT count(*) FROM studio_session WHERE tenant = ? AND ended_at = 0", name)
    if staying is not None and staying[0]:
        return BadInput(
            f"tenant {name} still has {staying[0]} session(s) open in the studio",
            remedy="end them first, on the studio's page or with the tenant's own client",
        )
    sessions.drop(tx, tx.now + 1, name)
    tokens.revoke_all(tx, name, actor, "its tenant was removed")
    tx.run("DELETE FROM tenant WHERE name = ?", name)
    tx.run("INSERT INTO former_tenant (name, removed_at) VALUES (?, ?)", name, tx.now)
    write_main(tx, "tenant.removed", name, name, {"by": actor})
    return None
