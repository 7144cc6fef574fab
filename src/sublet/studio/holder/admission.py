"""The last look before a worker is a tenant's: whether it is kept apart as the table says (I1).

The service refuses a second tenant's session when it is opened, by what it tried when it started. This looks
at the very worker, before any code of the tenant's runs in it: a machine may have changed meanwhile, and a
host of a cluster is known only now.
"""

from __future__ import annotations

from sublet.core.studio.isolation import admission, parse_mode
from sublet.ports.ledger import Ledger
from sublet.ports.worker import Worker
from sublet.settings import Settings


def admitted(settings: Settings, ledger: Ledger, worker: Worker, tenant: str) -> Worker:
    """The worker, or `NotIsolated`, and then it has been ended."""
    refused = admission(parse_mode(settings["isolation"]), worker.containment)
    if refused is not None and ledger.others_have_sessions(tenant):
        worker.end("it is not kept apart from another tenant")
        raise refused
    return worker
