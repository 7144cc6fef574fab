"""One shape for `--json` and for HTTP: every field is on its page, and units are said in names."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sublet import json_shapes
from sublet.core.billing.allowance import allowance
from sublet.core.leasing.lease import Holder, LeaseRecord, LeaseState, Request
from sublet.core.leasing.tenancy import Tenant
from sublet.core.queues.items import ItemState, QueueTerms
from sublet.core.scheduling.device import Device, Slice
from sublet.ports.items import ConsumerRecord, ItemRecord, QueueRecord, QueueStats
from sublet.ports.ledger import Answer, TeardownRecord
from sublet.ports.processes import Receipt
from tests.conftest import repository

PAGE = repository("docs/reference/json.md").read_text()
LEASE = LeaseRecord(
    id="L1",
    request=Request(tenant="ada", vram_bytes=8, ttl_us=60_000_000),
    holder=Holder(host="here", pid=7),
    state=LeaseState.ACTIVE,
    slices=(Slice(device_id="d", vram_bytes=8),),
    granted_at=1_500_000,
    expires_at=61_500_000,
)
ANSWER = Answer(lease=LEASE, at=2_000_000)
DEVICE = Device(
    id="d", host="here", driver="host", ordinal=0, name="host", capacity_bytes=16, free_bytes=8, leases=1
)
TENANT = Tenant(name="ada", gpu_us_per_day=3_600_000_000)
RECEIPT = Receipt(
    proven=True,
    ladder="term",
    containment="cgroup",
    pids=(7,),
    freed_bytes=8,
    scrubbed_bytes=8,
    duration_us=2500,
)
QUEUE = QueueRecord(id=1, tenant="ada", name="q", terms=QueueTerms())
ITEM = ItemRecord(
    3, "k", ItemState.DONE, 0, 5, 5, 1, 0, 0, 9, '{"a":1}', "2", "", 1_000_000, 4_000_000, 500_000
)
SHAPES: dict[str, dict[str, Any]] = {
    "lease": json_shapes.lease_json(ANSWER, operator=True),
    "device": json_shapes.devices_json([DEVICE], [LEASE], operator=True)[0],
    "tenant": json_shapes.tenant_json(TENANT, 5_000_000, allowance(TENANT, 0, 1), sessions=1, stored_bytes=9),
    "receipt": json_shapes.receipt_json(
        TeardownRecord(lease_id="L1", tenant="ada", at=3_000_000, devices=("d",), receipt=RECEIPT),
        operator=True,
    ),
    "queue": json_shapes.queue_json(QUEUE, QueueStats(at=1, ready=3, leased=1, rate=2.0)),
    "terms": json_shapes.queue_terms_json(QUEUE.terms),
    "consumer": json_shapes.consumer_json(
        ConsumerRecord(id=9, queue=1, host="here", pid=7, started=1, pid_space=1), 2
    ),
    "item": json_shapes.item_json(ITEM),
}


def fields(shape: dict[str, Any]) -> list[str]:
    inner = [shape[name] for name in ("quotas", "allowance") if name in shape]
    return [*shape, *(name for one in inner for name in one)]


@pytest.mark.parametrize("name", SHAPES)
def test_every_field_is_on_its_page_and_says_its_unit(name: str) -> None:
    found = fields(SHAPES[name])
    assert [field for field in found if f"`{field}`" not in PAGE] == []
    assert [field for field in found if re.search(r"_(us|ms|micro)\b|_us_", field)] == []


def test_units() -> None:
    lease, item, queue = SHAPES["lease"], SHAPES["item"], SHAPES["queue"]
    assert (lease["ttl_seconds"], lease["granted_at"], lease["expires_at"], lease["at"]) == (60, 1.5, 61.5, 2)
    assert (lease["seconds_left"], lease["ended_at"], lease["pid"]) == (59.5, None, 7)
    assert (item["published_at"], item["done_at"], item["work_seconds"]) == (1, 4, 0.5)
    assert (item["body"], item["result"], item["consumer"]) == ({"a": 1}, 2, 9)
    assert (queue["depth"], queue["eta_seconds"], queue["oldest_at"]) == (4, 2, None)
    assert SHAPES["receipt"]["duration_seconds"] == 0.0025
    assert SHAPES["device"]["leases"][0]["id"] == "L1"


def test_what_only_operators_see() -> None:
    assert "pid" not in json_shapes.lease_json(ANSWER)
    assert not {"host", "note", "lease_count"} & set(json_shapes.device_json(DEVICE, [], operator=False))
