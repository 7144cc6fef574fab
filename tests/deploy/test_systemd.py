"""The units: systemd's own verdict on them, commands that parse, settings that exist, and hardening that has not been lost."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sublet.processes.sandbox.limits import LEAF
from tests.conftest import need, repository
from tests.deploy.checking import check_command, check_variables

FOLDER = repository("deploy/systemd")
UNITS = sorted(FOLDER.glob("*.service"))


def read(unit: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(unit)
    return parser


@pytest.fixture(params=UNITS, ids=lambda p: p.name)
def unit(request: pytest.FixtureRequest) -> Path:
    return request.param  # type: ignore[no-any-return]


def test_there_are_units() -> None:
    assert {u.name for u in UNITS} == {"sublet-warden.service", "sublet-studio.service"}


def test_its_command_and_settings_are_ours(unit: Path) -> None:
    service = read(unit)["Service"]
    check_command(service["ExecStart"].split())
    check_variables(re.findall(r"SUBLET_\w+", unit.read_text()))


def test_the_example_names_settings() -> None:
    names = re.findall(r"^(\w+)=", (FOLDER / "sublet.env.example").read_text(), re.M)
    assert names
    check_variables(names)


def test_a_restart_ends_nobodys_work(unit: Path) -> None:
    service = read(unit)["Service"]
    assert (service["KillMode"], service["Restart"]) == ("process", "always")
    assert read(unit)["Unit"]["StartLimitIntervalSec"] == "0"


def test_systemd_finds_no_fault(unit: Path, tmp_path: Path) -> None:
    """Our program is not where the unit says: any that exists will do."""
    need(shutil.which("systemd-analyze") is not None, "systemd-analyze")
    copy = tmp_path / unit.name
    text = unit.read_text().replace("/opt/sublet/bin/sublet", sys.executable)
    said = subprocess.run(["systemd-analyze", "--version"], capture_output=True, text=True).stdout
    if int(said.split()[1]) < 254:  # it would say that it ignores the line
        text = text.replace("DelegateSubgroup=sublet-service\n", "")
    copy.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(copy)],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr.strip()) == (0, "")


def test_the_service_is_put_where_its_workers_can_be_limited_beside_it() -> None:
    service = read(FOLDER / "sublet-studio.service")["Service"]
    assert (service["Delegate"], service["DelegateSubgroup"]) == ("yes", LEAF)


@pytest.mark.parametrize(("name", "most"), [("sublet-warden", 40), ("sublet-studio", 75)])
def test_it_is_as_closed_as_it_was(name: str, most: int) -> None:
    """systemd's exposure, in tenths: what a mistake in it could reach. A unit without any hardening has 96."""
    need(shutil.which("systemd-analyze") is not None, "systemd-analyze")
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--json=short", str(FOLDER / f"{name}.service")],
        capture_output=True,
        text=True,
    )
    rows = json.loads(done.stdout)
    assert len(rows) > 50
    within = subprocess.run(
        [
            "systemd-analyze",
            "security",
            "--offline=true",
            f"--threshold={most}",
            str(FOLDER / f"{name}.service"),
        ],
        capture_output=True,
        text=True,
    )
    assert within.returncode == 0, within.stdout[-200:]
