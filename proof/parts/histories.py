"""Histories of real processes, every answer of which must be explained."""

from __future__ import annotations

from proof.parts.part import Part, often, own, seed, written


def parts() -> list[Part]:
    return [
        history(
            "sqlite",
            "histories of four processes on each of four SQLite ledgers, some killed: one order explains every answer",
            ops=often("SUBLET_LINEAR_OPS", 1_000_000),
            seconds=often("SUBLET_LINEAR_SECONDS", 1200),
            expected_s=850,
        ),
        history(
            "postgres",
            "the same on PostgreSQL",
            ops=often("SUBLET_LINEAR_POSTGRES_OPS", 40_000),
            seconds=often("SUBLET_LINEAR_SECONDS", 400),
            expected_s=120,
        ),
    ]


def history(engine: str, shows: str, *, ops: str, seconds: str, expected_s: int) -> Part:
    return Part(
        name=f"linear-{engine}",
        first=True,
        shows=shows,
        rules="L2 L3 S1 S3 S4",
        command=own(
            "proof.linear",
            *("--engine", engine, "--ops", ops, "--seconds", seconds),
            *("--kill-every", "2", "--seed", seed()),
        ),
        expected_s=expected_s,
        limit_s=1500,
        counts=written(operations_explained="operations", kills="kills"),
        json=True,
    )
