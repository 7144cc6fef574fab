"""What other people's systems do to it."""

from __future__ import annotations

from proof.parts.part import Part, asked, pytest, told


def parts() -> list[Part]:
    return [
        Part(
            name="deploy",
            shows="a real Slurm's allocations as capacity, given back in time; the command of the Kubernetes Job, told and started again",
            rules="K2 K3",
            command=pytest("tests/deploy/test_slurm.py", "tests/deploy/test_kubernetes.py"),
            environment=asked(SUBLET_DEPLOY_ROUNDS=1),
            expected_s=80,
            limit_s=900,
            counts=told(rounds_of_allocations="SUBLET_DEPLOY_ROUNDS"),
        ),
        Part(
            name="nodes",
            shows="nodes of a real Ray cluster killed, and frozen and resumed, under a job that commits and under a call; user programs the "
            "same to the last bit on SQLite, a folder and one machine as on PostgreSQL, S3 and three nodes, and through the loss of a node under "
            "two jobs, a queue's worker and a session at once",
            rules="K1-K3 L1 L2 L6 S1-S3 S6 C4",
            command=pytest("tests/placement", "tests/everywhere"),
            environment=asked(SUBLET_NODE_LOSSES=5),
            expected_s=450,
            limit_s=1800,
            counts=told(nodes_lost="SUBLET_NODE_LOSSES"),
        ),
    ]
