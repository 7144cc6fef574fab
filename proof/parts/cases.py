"""Random cases, hostile requests, a long queue, and the bugs that were put in on purpose."""

from __future__ import annotations

import json
from pathlib import Path

from proof.parts.part import Counts, Part, asked, own, printed, pytest, told


def parts() -> list[Part]:
    return [
        Part(
            name="mutants",
            first=True,
            shows="seeded bugs, each seen by its named test",
            rules="every one",
            command=own("proof.mutants", "--jobs", "1"),
            expected_s=500,
            limit_s=1800,
            counts=killed_bugs,
            json=True,
        ),
        Part(
            name="properties",
            shows="random cases of every pure rule, and of the ledgers beside their models",
            rules="L1-L6 S2-S4 S7 T2-T4 C7",
            command=pytest(
                "tests/core",
                "tests/devices/test_leaks.py",
                "tests/devices/test_contract.py",
                "tests/devices/test_selftest.py",
                "tests/store/test_tree.py",
                "tests/ledger/test_sql_equals_core.py",
                "tests/ledger/test_model.py",
                "tests/ledger/engines/postgres/test_engine.py::test_hot_verbs_equal_the_generic_ones",
                timeout_s=1800,
            ),
            environment=asked(SUBLET_MORE_EXAMPLES=3),
            expected_s=220,
            limit_s=1800,
            counts=told(times_the_usual_examples="SUBLET_MORE_EXAMPLES"),
        ),
        Part(
            name="pages",
            shows="the studio's page and a notebook in a browser, in every width and colour; the meters in random storms",
            rules="T1 T4",
            command=pytest(
                "tests/studio/test_page.py",
                "tests/studio/views/test_metrics.py",
                "tests/notebook/test_lab.py",
                "tests/notebook/test_recipe_11.py",
            ),
            environment=asked(SUBLET_MORE_EXAMPLES=5),
            expected_s=150,
            limit_s=900,
            counts=told(storms_on_each_ledger="SUBLET_MORE_EXAMPLES"),
        ),
        Part(
            name="long-queue",
            shows="a queue of a million items in little memory",
            rules="S6",
            command=pytest("tests/cli/queues/test_queue.py", "-k", "memory", timeout_s=1500),
            environment=asked(SUBLET_QUEUE_ITEMS=1_000_000),
            expected_s=150,
            limit_s=1500,
            counts=told(items="SUBLET_QUEUE_ITEMS"),
        ),
        Part(
            name="studio-fuzz",
            shows="requests made from the studio's own description, well-formed and not",
            rules="T1",
            command=pytest("tests/studio/test_fuzz.py", timeout_s=2700),
            environment=asked(SUBLET_FUZZ_REQUESTS=15_000),
            expected_s=150,
            limit_s=2700,
            counts=printed(requests=r"(\d+) requests:"),
        ),
    ]


def killed_bugs(said: str, numbers: Path, environment: dict[str, str]) -> Counts:
    return [("bugs killed", sum(m["verdict"] == "killed" for m in json.loads(numbers.read_text())))]
