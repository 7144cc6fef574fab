"""A job that commits with `sublet.train`: a chain of digests, in which no step may be missing and none may be there twice."""

import hashlib
import json
import os
import sys
import time

import sublet


class Chain:
    def __init__(self) -> None:
        self.digest = b""

    def advance(self, step: int) -> None:
        self.digest = hashlib.sha256(self.digest + step.to_bytes(4, "big")).digest()

    def state_dict(self) -> dict[str, bytes]:
        return {"digest": self.digest}

    def load_state_dict(self, state: dict[str, bytes]) -> None:
        self.digest = bytes(state["digest"])


name, steps, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
chain = Chain()
run = sublet.train(name, {"chain": chain}, every=2, progress=False)
where = {
    "host": os.environ.get("SUBLET_HOST"),
    "lease": os.environ.get("SUBLET_LEASE_ID"),
    "pid": os.getpid(),
}
print(json.dumps(where), file=sys.stderr, flush=True)
for step in run.steps(steps):
    chain.advance(step.number)
    time.sleep(pause)
    while len(sys.argv) > 4 and step.number == 5 and not os.path.exists(sys.argv[4]):
        time.sleep(0.05)  # in the middle of its work, until it may go on
print(json.dumps({"digest": chain.digest.hex()}), flush=True)
