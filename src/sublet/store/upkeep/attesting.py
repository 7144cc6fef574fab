"""Does the store have what the ledger says was committed? Looks, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

from sublet.core.errors import Damaged
from sublet.core.journal.replay import Flaw
from sublet.core.journal.step_audit import Proof
from sublet.store.upkeep.lineage import is_digest
from sublet.store.upkeep.upkeep import Upkeep


def attest(upkeep: Upkeep, proof: Proof, *, deep: bool = False) -> Iterator[Flaw]:
    """Check that the head's manifest is on the replicas and agrees with the head. `deep` also reads every
    copy of every pack it needs."""
    row = f"checkpoint {proof.job} version {proof.version}"
    if not is_digest(proof.digest):
        return  # committed without a checkpoint
    try:
        # By its digest: a run that goes on may have moved the head since.
        manifest = upkeep.read_manifest(proof.digest)
    except Damaged as e:
        yield Flaw(row, "C1", f"its manifest cannot be read: {e.message}")
        return
    pairs = [
        ("job", manifest.name, proof.job),
        ("version", manifest.version, proof.version),
        ("step", manifest.step, proof.step),
    ]
    for what, there, told in pairs:
        if there != told:
            yield Flaw(row, "C1", f"the manifest's {what} is {there}, the journal says {told}")
    missing = [pack for pack in manifest.packs if not _anywhere(upkeep, pack)]
    if missing:
        yield Flaw(row, "C1", f"{len(missing)} of its {len(manifest.packs)} packs are on no replica")
    if deep:
        for replica, pack, state in upkeep.verify(proof.job):
            if state != "good":
                yield Flaw(row, "C3", f"pack {pack[:16]} on {replica} is {state}")


def _anywhere(upkeep: Upkeep, pack: str) -> bool:
    for replica in upkeep.replicas:
        try:
            if replica.has_pack(pack):
                return True
        except OSError:
            continue
    return False
