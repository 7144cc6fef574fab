"""docs/proof-matrix.md, from the verdicts."""

from __future__ import annotations

from collections import Counter
from typing import Any

from proof.matrix.trial import MUST_NOT_BE


def page(summary: dict[str, Any]) -> str:
    rows = summary["programs"]
    count = Counter(row["verdict"] for row in rows)
    machine = ", ".join(f"{k} {v}" for k, v in summary["machine"].items())
    bad = sum(count[verdict] for verdict in MUST_NOT_BE)
    out = [
        "# Programs under the shim, disturbed",
        "",
        "Written by `make matrix`. Each program is built as the published script beside its name, with tiny data, unchanged between plain `python` and",
        f"`python -m sublet.shim`. Under the shim it runs once undisturbed, and once with {summary['kills']} × kill -9, a notice (SIGTERM) and a revoke of its lease at",
        "random moments, started again the same way each time. Compared with plain Python, to the last bit: the model file with everything that",
        "matters, every other file it wrote (times masked), and the lines it printed.",
        "",
        f"Run of {summary['at']}, {summary['seconds'] / 60:.0f} minutes, seed {summary['seed']}; {machine}. "
        f"Load of the machine before it began: {summary['load_before']:.1f}. Again: `make matrix SEED={summary['seed']}`, or with `ONLY=name` one of them.",
        "",
        *(
            [f"{summary['tried']} were tried in this run, the others before it.", ""]
            if summary["tried"] < len(rows)
            else []
        ),
        "| verdict | programs |",
        "|---|---|",
        *(f"| {verdict} | {number} |" for verdict, number in count.most_common()),
        "",
        f"Of {len(rows)} programs {bad} ended in a way that must not be ({', '.join(MUST_NOT_BE)}).",
        "",
        "| program | built as | loop of | verdict | lines printed | disturbed | changed lines | step overhead | resume |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = Counter(_kind(d) for d in row["disturbed"])
        storm = ", ".join(f"{n} {kind}" for kind, n in times.items() if kind)
        out.append(
            f"| {row['name']} | {row['model_of']} | {row['loop_of']} | {row['verdict']} | {_cell(row['stdout'])} | {storm or '–'} "
            f"| {row['changed_lines']} | {_percent(row['overhead'])} | {_seconds(row['resume_s'])} |"
        )
    out += ["", "## What was said, and what differed", ""]
    for row in rows:
        if not (row["said"] or row["warnings"] or row["files_differ"]):
            continue
        out.append(
            f"- **{row['name']}**, {row['verdict']}" + (f" at {row['at']}" if row["at"] else "") + _said(row)
        )
        out += [f"  - warned: {_cell(text)}" for text in row["warnings"]]
        out += [
            f"  - `{name}`: {_cell(how)}"
            for name, how in [*row["model_differs"].items(), *row["files_differ"].items()][:6]
        ]
    return "\n".join(out) + "\n"


def _said(row: dict[str, Any]) -> str:
    return f": {_cell(row['said'])}" if row["said"] else ""


def _kind(disturbed: str) -> str:
    kind = disturbed.split(" @")[0].split(" before")[0]
    return "" if kind.startswith(("its end", "nothing")) else "kill -9" if kind.startswith("kill") else kind


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ").replace("<", "&lt;")


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:+.0%}"


def _seconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{max(seconds, 0):.1f} s"
