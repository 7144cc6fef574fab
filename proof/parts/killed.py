"""Real processes and servers that are killed, stopped and cut off."""

from __future__ import annotations

from proof.parts.part import Part, asked, printed, pytest, told


def parts() -> list[Part]:
    return [*training(), *leases_and_queues(), *sessions()]


def training() -> list[Part]:
    return [
        Part(
            name="training-kills",
            first=True,
            shows="kill -9 of training processes at random moments: each step once, the final state bit-equal",
            rules="S1-S5 C6",
            command=pytest("tests/training/test_kills.py", timeout_s=3000),
            environment=asked(SUBLET_TRAINING_KILLS=10_000),
            expected_s=1500,
            limit_s=3000,
            counts=printed(
                kills=r"(\d+) killed, \d+ jobs finished", commits_in_between=r"(\d+) commits in between"
            ),
        ),
        Part(
            name="training-other",
            shows="losses, races for one step, drains and resumes of training runs",
            rules="S1-S5 S8",
            command=pytest(
                "tests/training",
                *("--ignore", "tests/training/test_kills.py", "--ignore", "tests/training/test_shim.py"),
                *("--ignore", "tests/training/test_programs.py"),
                timeout_s=1500,
            ),
            environment=asked(SUBLET_STEP_RACES=50, SUBLET_TRAINING_LOSSES=15),
            expected_s=200,
            limit_s=1500,
            counts=told(races_for_one_step="SUBLET_STEP_RACES", losses_a_run="SUBLET_TRAINING_LOSSES"),
        ),
        Part(
            name="scripts",
            shows="scripts that were made resumable, and drills, disturbed",
            rules="S1-S5 S8 X1-X4",
            command=pytest("tests/training/test_shim.py", "tests/cli/runs/test_drill.py", timeout_s=1500),
            environment=asked(SUBLET_SHIM_DISTURBED=20, SUBLET_DRILL=60),
            expected_s=160,
            limit_s=1500,
            counts=told(disturbed_runs="SUBLET_SHIM_DISTURBED", losses_in_a_drill="SUBLET_DRILL"),
        ),
        Part(
            name="programs",
            shows="random programs under the shim, killed and resumed: exact, or refused in words",
            rules="X1 X2 X4",
            command=pytest("tests/training/test_programs.py", timeout_s=2700),
            environment=asked(SUBLET_PROGRAMS=2000),
            expected_s=1500,
            limit_s=3000,
            counts=told(programs="SUBLET_PROGRAMS"),
        ),
    ]


def leases_and_queues() -> list[Part]:
    return [
        Part(
            name="postgres-crashes",
            first=True,
            shows="kill -9 of the whole PostgreSQL server under eight clients, each after grants and commits were confirmed: "
            "nothing granted twice, nothing acknowledged lost",
            rules="L1-L5 S1-S3 S7 T4",
            command=pytest(
                "tests/storms/test_lease_storm.py::test_kill_9_of_holders_and_of_postgres", timeout_s=2700
            ),
            environment=asked(SUBLET_POSTGRES_CRASHES=500),
            expected_s=350,
            limit_s=2700,
            counts=printed(
                server_crashes=r"} crashes (\d+)",
                kills=r"} crashes \d+ kills (\d+)",
                commits_confirmed=r"'committed': (\d+), 'rows'",
            ),
        ),
        Part(
            name="lease-storm",
            shows="eight processes on each engine, calm, and with kills of holders and wardens",
            rules="L1-L5 S1-S3 S7 T4 K3",
            command=pytest("tests/storms/test_lease_storm.py", "-k", "not of_postgres"),
            environment=asked(SUBLET_STORM_SECONDS=40),
            expected_s=115,
            limit_s=900,
            counts=printed(grants=r"'granted': (\d+)", commits=r"'committed': (\d+)", kills=r"kills (\d+)"),
        ),
        Part(
            name="disk-full",
            shows="the disk of ledger, log and run files fills up at random moments while leases come due: each is settled, and the next one "
            "granted, within seconds of space returning",
            rules="I4 K2 S7",
            command=pytest(
                "tests/leases/warden/test_quiet_death.py::test_a_full_disk_is_survived_by_the_warden",
                timeout_s=900,
            ),
            environment=asked(SUBLET_DISK_FULL=20, SUBLET_DISK_FULL_SECONDS=6),
            expected_s=180,
            limit_s=900,
            counts=told(times_the_disk_was_full="SUBLET_DISK_FULL"),
        ),
        Part(
            name="postgres-crowd",
            shows="fifty processes on one PostgreSQL ledger, at the pace of 100,000 leases a day and as fast as it goes: no deadlock, no lost "
            "update, no growing process, no snapshot held, no bloat",
            rules="L2 S3 S6 S7",
            command=pytest("tests/storms/test_postgres_crowd.py"),
            environment=asked(SUBLET_CROWD_SECONDS=120, SUBLET_CROWD=50),
            expected_s=280,
            limit_s=900,
            counts=printed(leases=r"(\d+) leases, \d+ commits", commits=r"leases, (\d+) commits"),
        ),
        Part(
            name="partitions",
            shows="hosts in network namespaces cut off from their PostgreSQL ledger, silently or not, one way or both, for a moment or for longer than a "
            "lease lasts: nobody works past its lease, nothing granted or committed twice, every job the same to the last bit",
            rules="K1 K2 L1-L7 S1-S3 S5 S7 S8 T4",
            command=pytest("tests/storms/test_partitions.py", timeout_s=1500),
            environment=asked(SUBLET_CUTS=60),
            expected_s=220,
            limit_s=1500,
            counts=printed(
                cuts_under_random_verbs=r"(\d+) cuts under random",
                cuts_under_jobs=r"(\d+) cuts under \d+ jobs",
            ),
        ),
        Part(
            name="queue-storm",
            shows="queues and brokers with killed workers: each result stored once",
            rules="S6",
            command=pytest("tests/storms/test_queue_storm.py", "tests/queues/brokers/test_storm.py"),
            environment=asked(SUBLET_QUEUE_STORM=10_000),
            expected_s=75,
            limit_s=1500,
            counts=printed(items=r"(\d+) items once each", kills=r", (\d+) killed"),
        ),
    ]


def sessions() -> list[Part]:
    return [
        Part(
            name="hostile",
            shows="holders that fork, detach and ignore signals, what they leave on a device, and a thousand of them ended at once",
            rules="K1 K2",
            command=pytest(
                "tests/leases/warden/test_many_ended.py",
                "tests/storms/test_hostile.py",
                "tests/storms/test_canary.py",
                "tests/devices/test_cuda.py::test_handovers_with_scrubbing",
                timeout_s=1800,
            ),
            environment=asked(SUBLET_HOSTILE=600, SUBLET_HANDOVERS=1000, SUBLET_ENDED_AT_ONCE=1000),
            expected_s=430,
            limit_s=1800,
            counts=told(
                hostile_sessions="SUBLET_HOSTILE",
                handovers="SUBLET_HANDOVERS",
                leases_ended_at_once="SUBLET_ENDED_AT_ONCE",
            ),
        ),
        Part(
            name="red-team",
            shows="attacks of a tenant from inside its session and over HTTP, on its neighbour, the service and the machine, in four set-ups: "
            "none succeeds where a second tenant is let in; bombs and floods, and the neighbour is answered through each",
            rules="I1 I2 T1",
            command=pytest("tests/studio/red_team"),
            environment=asked(SUBLET_RED_TEAM=1),
            expected_s=240,
            limit_s=1200,
            counts=printed(attacks=r"(\d+) attacks held", bombs_and_floods=r"(\d+) bombs and floods borne"),
        ),
        Part(
            name="studio",
            shows="a studio's service killed under load on both ledgers, and a hostile client among two hundred",
            rules="K3 T1 T4",
            command=pytest("tests/studio/test_service_killed.py", "tests/studio/test_crowd.py"),
            environment=asked(SUBLET_SERVICE_KILLS=50, SUBLET_CROWD_ROUNDS=5),
            expected_s=110,
            limit_s=1200,
            counts=told(kills_of_the_service_on_each_ledger="SUBLET_SERVICE_KILLS"),
        ),
    ]
