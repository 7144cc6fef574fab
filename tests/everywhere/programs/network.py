"""The demo's network, trained on a leased device through every lease it loses."""

import hashlib
import json
import sys
import time

import sublet
from sublet.cli.demo.job import Network

name, steps = sys.argv[1], int(sys.argv[2])
to_be_lost_at = [int(step) for step in sys.argv[3:]]  # there it stays until its lease is taken
done = False
while not done:
    try:
        with (
            sublet.gpu(vram="64MiB", ttl="20s", exclusivity="device", holder="worker") as lease,
            lease.open() as gpu,
        ):
            network = Network(gpu, lease.devices[0])
            run = sublet.train(name, {"network": network}, lease=lease, every=5, progress=False)
            print(json.dumps({"lease": lease.id, "device": lease.devices[0]}), flush=True)
            for step in run.steps(steps):
                network.train_one(step.number)
                print(json.dumps({"step": step.number}), flush=True)
                if step.number in to_be_lost_at:
                    to_be_lost_at.remove(step.number)
                    while lease.status == "active":
                        time.sleep(0.02)
            digest = hashlib.sha256(network.state_dict()["weights"]).hexdigest()
            done = True
    except (sublet.LeaseLost, sublet.Preempted) as lost:
        print(json.dumps({"lost": lost.code}), flush=True)
print(json.dumps({"digest": digest}), flush=True)
