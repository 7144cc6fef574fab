"""What is written to disks and object stores: torn, killed at a call, damaged, swept."""

from __future__ import annotations

from proof.parts.part import Part, asked, printed, pytest, told


def parts() -> list[Part]:
    return [
        Part(
            name="power-loss",
            shows="legal crash states of recorded writes: old or new, never between",
            rules="C1 C6",
            command=pytest("tests/store/test_power_loss.py", "tests/queues/sinks/test_files.py"),
            environment=asked(SUBLET_CRASH_STATES=5000),
            expected_s=60,
            limit_s=900,
            counts=told(crash_states="SUBLET_CRASH_STATES"),
        ),
        Part(
            name="system-calls",
            first=True,
            shows="kill -9 at the n-th system call of a save, of a block's checkpoint and of each verb of the embedded ledger, or an error from it",
            rules="C6 L1 S1 S6",
            command=pytest(
                "tests/store/test_killed_at_a_call.py",
                "tests/ledger/test_killed_at_a_call.py",
                "tests/leases/blocks/test_durable.py",
                timeout_s=1500,
            ),
            environment={"SUBLET_KILLS": "all", **asked(SUBLET_BLOCK_SYSCALLS=1000)},
            expected_s=500,
            limit_s=1500,
            counts=printed(crash_points=r": (\d+) places"),
        ),
        Part(
            name="damage",
            shows="damaged copies, hostile manifests, races of writers, flipped bits in blocks",
            rules="C2-C4 C7",
            command=pytest(
                "tests/store/replicas/test_quorum.py",
                "tests/store/test_hostile_manifests.py",
                "tests/store/test_races.py",
                "tests/store/test_regions.py",
                "tests/store/test_codec.py",
                timeout_s=1500,
            ),
            environment=asked(
                SUBLET_DAMAGES=10_000,
                SUBLET_MANIFESTS=10_000,
                SUBLET_RACES=300,
                SUBLET_BLOCK_FLIPS=10_000,
                SUBLET_BLOCK_CRASHES=8000,
                SUBLET_CODEC_MUTATIONS=10_000,
            ),
            expected_s=150,
            limit_s=1500,
            counts=told(
                damaged_copies="SUBLET_DAMAGES",
                hostile_manifests="SUBLET_MANIFESTS",
                races="SUBLET_RACES",
                flipped_bits="SUBLET_BLOCK_FLIPS",
                block_crash_states="SUBLET_BLOCK_CRASHES",
                mutated_values="SUBLET_CODEC_MUTATIONS",
            ),
        ),
        Part(
            name="sweep",
            shows="sweeps among savers, readers and movers, and killed ones",
            rules="C5",
            command=pytest("tests/store/upkeep/test_sweeping.py"),
            environment=asked(SUBLET_SWEEP_EXAMPLES=200, SUBLET_SWEEP_STORM_SECONDS=30),
            expected_s=130,
            limit_s=900,
            counts=told(random_lives="SUBLET_SWEEP_EXAMPLES"),
        ),
        Part(
            name="outages",
            shows="a bucket that is away for 20 seconds in the middle of a training, frozen, killed or refusing, alone and as one of several: "
            "training goes on, saves catch up, the state is bit for bit that of an undisturbed run",
            rules="C1 C6 S3",
            command=pytest("tests/training/test_store_outage.py", timeout_s=900),
            environment=asked(SUBLET_OUTAGE_SECONDS=20),
            expected_s=330,
            limit_s=900,
            counts=told(seconds_away="SUBLET_OUTAGE_SECONDS"),
        ),
        Part(
            name="buckets",
            shows="object stores that fail, lag and answer late",
            rules="C1-C4",
            command=pytest("tests/store/test_bucket_states.py::test_a_storm_of_faults"),
            environment=asked(SUBLET_BUCKET_STORM=150),
            expected_s=70,
            limit_s=900,
            counts=told(storms="SUBLET_BUCKET_STORM"),
        ),
    ]
