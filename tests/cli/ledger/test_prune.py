"""`sublet journal prune`, and what verify, audit and report say after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sublet.cli.ledger.journal import journal
from sublet.cli.runs.audit import audit
from sublet.cli.studio.report import report
from sublet.core.errors import BadInput, NotFound
from tests.ledger.rig import MINUTE, sqlite_rig


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The ledger of a site whose clock stood in 2023, looked at today."""
    rig = sqlite_rig(tmp_path)
    rig.tenant("ada")
    rig.device(gb=100)
    for number in range(3):
        held = rig.ask(10, lease_id=f"lease-{number}")
        rig.later(MINUTE)
        rig.commit(held, number + 1)
        rig.release(held)
    rig.close()
    monkeypatch.setenv("SUBLET_LEDGER", rig.url)
    monkeypatch.setenv("SUBLET_HOME", str(tmp_path / "home"))
    return tmp_path


def said(command: Any, *args: str) -> str:
    done = CliRunner().invoke(command, args, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_prune_says_what_it_did_and_what_is_left_says_so_too(old: Path) -> None:
    before = json.loads(said(report, "--days", "3650", "--by", "tenant", "--json"))
    would = json.loads(said(journal, "prune", "--dry-run", "--json"))
    assert (would["leases"], would["dry_run"], would["files"]) == (3, True, [])
    into = str(old / "archive")
    told = said(journal, "prune", "--keep", "90d", "--into", into)
    assert "3 leases" in told
    assert "archived in" in told
    after = json.loads(said(report, "--days", "3650", "--by", "tenant", "--json"))
    assert after["pruned_before"] > 0
    for name in ("held_gpu_seconds", "overhead_gpu_seconds", "commits", "steps", "leases"):
        assert after["total"][name] == before["total"][name], name
    assert "pruned before 20" in said(report, "--days", "3650")
    assert "pruned before 20" in said(journal, "verify")
    whole = json.loads(said(journal, "verify", "--archive", into, "--json"))
    assert (whole["ok"], whole["with_archive"]) == (True, True)
    with pytest.raises(NotFound, match="pruned before 20"):
        said(audit, "train", "--no-store")
    [proof] = json.loads(said(audit, "train", "--no-store", "--archive", into, "--json"))
    assert proof["proven"] is True
    assert json.loads(said(journal, "prune", "--json", "--into", into))["journal_rows"] == 0


def test_what_cannot_be_pruned_or_read(old: Path) -> None:
    with pytest.raises(BadInput, match="hour"):
        said(journal, "prune", "--keep", "5m")
    other = old / "notes.txt"
    other.write_text("something else\n")
    with pytest.raises(BadInput, match="not an archive"):
        said(journal, "verify", "--archive", str(other))
