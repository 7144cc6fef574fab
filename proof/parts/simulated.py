"""What runs on simulated time."""

from __future__ import annotations

from proof.parts.part import Part, asked, often, own, pytest, seed, told, written


def parts() -> list[Part]:
    return [
        Part(
            name="deep",
            first=True,
            alone=True,
            shows="simulated worlds: the real ledger, core and store, every kind of loss, every rule asked after every event",
            rules="L1-L7 S1-S8 C1-C4 C6 T1-T4 K1-K3 A1",
            command=own(
                "proof.deep",
                *("--seed", seed(), "--events", "1500", "--faults", "1000000"),
                *("--seconds", often("SUBLET_DEEP_SECONDS", 3000)),
            ),
            expected_s=1500,
            limit_s=3100,
            counts=written(
                simulated_days="simulated_days",
                worlds="worlds",
                **{"events, every rule asked after each": "events"},
                faults="faults",
            ),
            json=True,
        ),
        Part(
            name="agrees",
            shows="the simulator beside real processes, and the figures of the recorded traces",
            rules="L2 T3",
            command=pytest("tests/sim/test_agrees.py", "tests/docs/test_traces.py", timeout_s=1500),
            environment=asked(SUBLET_AGREES=3, SUBLET_TRACES_LONG=1),
            expected_s=220,
            limit_s=1500,
            counts=told(workloads="SUBLET_AGREES"),
        ),
    ]
