"""The storm of `tests/storms/test_queue_storm.py` on items that come from a broker: every message ends as one result, whoever dies between receiving, publishing,
settling and completing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import sublet
from sublet import wiring
from sublet.core.leasing.tenancy import Tenant
from sublet.settings import load_settings
from tests.queues.brokers.servers import Places
from tests.storms.test_queue_storm import Swarm, check, environment, storm

ITEMS = int(os.environ.get("SUBLET_QUEUE_STORM", "500"))

pytestmark = [pytest.mark.storm, pytest.mark.timeout(600)]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    wiring.close_all()


@pytest.mark.parametrize("kind", ["amqp", "redis"])
def test_every_message_ends_as_one_result(folder: Path, places: Places, kind: str) -> None:
    place = places[kind]
    name = place.new_queue()
    # What a killed one had received comes again when RabbitMQ sees its connection end, and from Redis after its visibility there.
    url = place.url(visibility=2) if kind == "redis" else place.url()
    told = environment(folder, STORM_BROKER=url)
    settings = load_settings(home=told["SUBLET_HOME"], tenant="storm")
    ledger = wiring.open_ledger(settings)
    ledger.add_tenant(Tenant(name="storm"), actor="storm", exist_ok=True)
    ledger.open_queue("storm", name, None)
    bodies = {f"image {n}" for n in range(ITEMS)}
    broker = place.open(name)
    broker.publish([(f"key {body}", body) for body in sorted(bodies)])
    for body in sorted(bodies)[::50]:
        broker.publish([(f"key {body}", body)])  # sent twice, as at-least-once senders do
    bodies.add("from elsewhere")
    place.foreign(name, json.dumps("from elsewhere").encode())
    broker.close()
    queue = sublet.queue(name, settings=settings)
    swarm = Swarm(told, name, folder)
    try:
        kills = storm(queue, swarm, len(bodies))
    finally:
        swarm.end()
    check(queue, swarm, bodies)
    print(f", {kills} killed", end=" ")
    after = place.open(name)
    try:
        # What was received by one that was killed comes again, and is a duplicate.
        assert {message.body for message in after.receive(1000, wait_us=100_000)} <= bodies
    finally:
        after.close()
