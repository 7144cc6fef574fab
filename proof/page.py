"""docs/proof.md, from the numbers of a run."""

from __future__ import annotations

from typing import Any

from proof.mutants import coverage_table

#: What the claim asks for, by what is counted: (label, wanted, which counts add up to it).
GOALS = (
    ("simulated days", 365, ("simulated days",)),
    ("faults in simulated worlds", 1_000_000, ("faults",)),
    ("kills of real processes", 10_000, ("kills",)),
    ("crashes of PostgreSQL", 500, ("server crashes",)),
    ("crash points at system calls", 1_000, ("crash points",)),
    ("operations checked for linearizability", 1_000_000, ("operations explained",)),
)


#: Below it 3/n is not the limit any more, and would say little.
FEWEST_FOR_A_BOUND = 30
#: A count that says how much was done, not how often a violation could have shown.
NOT_TRIALS = frozenset({"bugs killed", "seconds away", "times the usual examples"})


def bound(what: str, count: int) -> str:
    """With no violation in n independent trials, the chance of one in a trial is below 3/n, at 95 %."""
    return f"{3 / count:.1e}" if count >= FEWEST_FOR_A_BOUND and what not in NOT_TRIALS else "–"


def made_of(summary: dict[str, Any]) -> str:
    """Whether the page shows one run, and if not, which parts are of others or of none."""
    found = summary["parts"]
    others = [p for p in found if p.get("run") != summary["run"]]
    never = summary.get("never", [])
    if not others and not never:
        return f"All {len(found)} parts were tried in this one run, up to {summary['lanes']} at a time."
    tried = summary.get("tried", len(found) - len(others))
    said = [
        f"{tried} part{'s were' if tried != 1 else ' was'} tried in this run, up to {summary['lanes']} at a time."
    ]
    for began in dict.fromkeys(p.get("run", "") for p in others):
        of_it = [p["name"] for p in others if p.get("run", "") == began]
        said.append(f"From the run that began {began}, {len(of_it)}: {', '.join(of_it)}.")
    if never:
        said.append(f"Not tried: {', '.join(never)}.")
    return " ".join(said)


def page(summary: dict[str, Any]) -> str:
    found = summary["parts"]
    machine = ", ".join(f"{k} {v}" for k, v in summary["machine"].items())
    out = [
        "# What was tried, and what it supports",
        "",
        "Written by `make proof`; how to read it and how to see a seed again: [Proof](explain/proof.md).",
        "",
        f"Run of {summary['at']}, {summary['seconds'] / 60:.0f} minutes, seed {summary['seed']}; {machine}. "
        f"Load of the machine before it began: {summary['load_before']:.1f}.",
        "",
        made_of(summary),
        "",
        "A line counts only if its part finished and held. The bound is the 95 % upper limit of the rate of violations that a count of trials without one",
        f"supports, 3/n: it is about trials like these, and says nothing of faults nobody thought of. Fewer than {FEWEST_FOR_A_BOUND} support none.",
        "",
        "| wanted | at least | counted | |",
        "|---|---|---|---|",
    ]
    total: dict[str, int] = {}
    for part in found:
        for what, number in part["counts"]:
            total[what] = total.get(what, 0) + number
    for label, least, names in GOALS:
        counted = sum(total.get(name, 0) for name in names)
        out.append(
            f"| {label} | {least:,} | {counted:,} | {'reached' if counted >= least else 'not reached in this run'} |"
        )
    out += [
        "",
        "| part | shows | rules | verdict | trials | violations | 95 % bound | minutes | at, of |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for part in found:
        held = part["verdict"] == "held"
        violations = "0" if held else "see below" if part["verdict"] == "VIOLATED" else "–"
        for number, (what, n) in enumerate(part["counts"] or [("–", 0)]):
            about = (
                (part["name"], part["shows"], part["rules"], part["verdict"]) if number == 0 else ("",) * 4
            )
            out.append(
                f"| {' | '.join(about)} | {f'{n:,} {what}' if n else '–'} | {violations} | {bound(what, n) if held else '–'} "
                f"| {part['seconds'] / 60:.1f} | {part.get('at', '')} {part.get('commit', '')} |"
            )
    bad = [p for p in found if p["verdict"] != "held"]
    if bad:
        out += ["", "## What did not hold, or was not finished", ""]
        for part in bad:
            out += [
                f"- **{part['name']}**: {part['verdict']} after {part['seconds']:.0f} s. Again: `{part['replay'] or '–'}`"
            ]
    deep = next((p["numbers"] for p in found if p["name"] == "deep" and p.get("numbers")), None)
    if deep:
        out += ["", "## In the simulated worlds", "", "| fault | times |", "|---|---|"]
        out += [f"| {what} | {n:,} |" for what, n in deep["faults_by_kind"].items()]
        out += ["", "| rule | asked |", "|---|---|"]
        out += [f"| {what} | {n:,} |" for what, n in deep["checks"].items()]
        out += ["", "| what went on meanwhile | times |", "|---|---|"]
        out += [f"| {what} | {n:,} |" for what, n in deep["work"].items()]
    mutants = next((p["numbers"] for p in found if p["name"] == "mutants" and p.get("numbers")), None)
    if mutants:
        out += [
            "",
            "## Seeded bugs",
            "",
            "| bug | breaks | verdict | seen by | hidden by, and off |",
            "|---|---|---|---|---|",
        ]
        out += [
            f"| {m['name']} | {m['rule']} | {m['verdict']} | `{m['test'].removeprefix('tests/')}` | {m['off'] or '–'} |"
            for m in mutants
        ]
        out += [
            "",
            "## By invariant",
            "",
            *coverage_table({m["name"]: m["verdict"] == "killed" for m in mutants}),
        ]
    return "\n".join(out) + "\n"
