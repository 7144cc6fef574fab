"""Where the service is root, a tenant's worker is a user of its own or is refused. Never root."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sublet.core.studio import own_uid
from sublet.core.studio.isolation import OWN_UID
from sublet.processes.sandbox import containment, tenant_sandbox
from sublet.processes.sandbox.tenant_sandbox import UID_BASE, NotEntered
from tests.conftest import need
from tests.processes.conftest import REPOSITORY, end_zygotes
from tests.waiting import wait_until

SCRIPT = Path(__file__).parents[1] / "weaker_root.py"


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not below /tmp, which a session does not see, nor below a folder that others cannot pass."""
    need(os.getuid() == 0, "root")
    with tempfile.TemporaryDirectory(dir="/opt", prefix="sublet-test-") as made:
        os.chmod(made, 0o755)
        yield Path(made)
        end_zygotes(Path(made) / "home")


def _started(folder: Path, what: str, *before: str, expose: str = "") -> dict[str, str]:
    done = subprocess.run(
        [*before, sys.executable, str(SCRIPT), what, str(folder / "home")],
        capture_output=True,
        text=True,
        cwd="/",
        env=dict(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, (f"{REPOSITORY}/src", expose)))},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_root_with_all_its_rights_gives_the_tenant_a_user_of_its_own(folder: Path) -> None:
    found = _started(folder, "nothing is missing")
    if "message" not in found:  # without namespaces this machine's Python may lie where only root can read
        assert found["uid"] == UID_BASE + 7
        assert OWN_UID in found["containment"]


def test_a_python_that_only_root_can_read(folder: Path) -> None:
    """Installed with umask 077."""
    closed = folder / "site-packages"
    closed.mkdir(mode=0o700)
    found = _started(folder, "nothing is missing", expose=str(closed))
    assert "cannot read the files that Python runs from" in found["message"]
    assert "nothing ran" in found["message"]
    assert str(folder) not in found["message"], "a tenant may see it"
    assert str(closed) in found["remedy"]
    closed.chmod(0o755)
    assert "site-packages" not in _started(folder, "nothing is missing", expose=str(closed)).get("remedy", "")


@pytest.mark.parametrize("what", ["no setuid", "no setgid", "no chown"])
def test_a_root_that_may_not_change_its_user(folder: Path, what: str) -> None:
    found = _started(folder, what)
    assert "not allow the change to the tenant's own user" in found["message"]
    assert "SETUID" in found["remedy"]


def test_a_root_of_a_namespace_with_one_user(folder: Path) -> None:
    unshare = shutil.which("unshare")
    need(unshare is not None, "unshare")
    alone = [str(unshare), "--user", "--map-root-user"]
    need(subprocess.run([*alone, "true"], check=False).returncode == 0, "user namespaces")
    found = _started(folder, "nothing is missing", *alone)
    assert "maps no user for tenant number 7" in found["message"]
    assert "/etc/subuid" in found["remedy"]


def test_a_scratch_folder_that_cannot_be_made(folder: Path) -> None:
    need(containment.namespaces_work(), "namespaces")
    home = folder / "home"
    home.mkdir()
    tenant_sandbox.scratch_root(home, True).write_text("in its way")
    assert "sandbox could not be set up (File exists)" in _started(folder, "nothing is missing")["message"]


@pytest.mark.parametrize("call", ["setgroups", "setresgid", "setresuid"])
@pytest.mark.parametrize("number", [errno.EPERM, errno.EAGAIN])
def test_each_call_that_fails_is_a_refusal(monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    def works(*_: object) -> None: ...

    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    for name in ("setgroups", "setresgid", "setresuid"):
        monkeypatch.setattr(os, name, fails if name == call else works)
    with pytest.raises(NotEntered, match=os.strerror(number)):
        tenant_sandbox.become(UID_BASE, [])


def test_a_change_that_did_not_happen_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the kernel answered: what counts is who it is now."""
    for name in ("setgroups", "setresgid", "setresuid"):
        monkeypatch.setattr(os, name, lambda *_: None)
    with pytest.raises(NotEntered, match="only in part"):
        tenant_sandbox.become(UID_BASE, [])


@pytest.mark.parametrize(
    "made",
    [
        lambda: own_uid.not_mapped(7),
        lambda: own_uid.not_readable(700_007, "/root/venv"),
        lambda: own_uid.not_allowed("Operation not permitted"),
        lambda: own_uid.not_prepared("No space left on device"),
    ],
)
def test_each_refusal_says_what_was_not_lost_and_what_to_do(
    made: Callable[[], own_uid.IsolationRefusal],
) -> None:
    refusal = made()
    assert "nothing ran" in refusal.reason
    assert "/root" not in refusal.reason
    assert refusal.remedy


def test_nothing_of_a_refused_worker_is_left(folder: Path) -> None:
    closed = folder / "site-packages"
    closed.mkdir(mode=0o700)
    _started(folder, "nothing is missing", expose=str(closed))
    scratch = tenant_sandbox.scratch_root(folder / "home", True)
    wait_until(lambda: not scratch.is_dir() or not any(scratch.iterdir()))
