"""The command line as people use it: real processes, real exit codes, text and JSON."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sublet.cli.main import COMMANDS
from tests import forked
from tests.homes import Home, wait_until


def sublet(
    home: Home, *args: str, timeout: float = 60, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sublet", *args]
    return forked.run(command, env=home.environment | environment, timeout=timeout, children_too=True)


def as_json(home: Home, *args: str):
    done = sublet(home, *args, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def home(sqlite_home: Home) -> Home:
    return sqlite_home


def test_a_lease_from_acquire_to_release(home: Home) -> None:
    made = as_json(home, "lease", "acquire", "--vram", "8GB", "--ttl", "1m", "--job", "j")
    assert (made["state"], made["vram_bytes"], made["epoch"]) == ("active", 8 * 10**9, 1)
    listed = sublet(home, "ps").stdout.splitlines()
    assert listed[0].split()[:5] == ["LEASE", "JOB", "TENANT", "TIER", "ST"]
    assert listed[1].split()[:2] == [made["id"], "j"]
    assert " R " in listed[1]
    renewed = as_json(home, "lease", "renew", made["id"])
    assert renewed["expires_at"] > made["expires_at"]
    assert as_json(home, "gpus")[0]["free_bytes"] == (16 << 30) - 8 * 10**9
    assert as_json(home, "lease", "release", made["id"])["state"] == "ended"
    assert as_json(home, "ps") == []
    assert as_json(home, "ps", "--all")[0]["reason"] == "released"
    assert sublet(home, "lease", "show", made["id"], "--check").returncode == 76
    assert "no faults" in sublet(home, "journal", "verify").stderr


def test_a_lease_can_be_bound_to_a_running_process(home: Home) -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    made = as_json(home, "lease", "acquire", "--pid", str(sleeper.pid), "--ttl", "10m")
    assert made["pid"] == sleeper.pid
    sleeper.kill()
    sleeper.wait()
    wait_until(lambda: as_json(home, "lease", "show", made["id"])["settled_at"])
    assert as_json(home, "lease", "show", made["id"])["reason"] == "holder_lost"


def test_short_output_is_for_scripts(home: Home) -> None:
    assert sublet(home, "lease", "acquire", "--short").stdout.strip().endswith("-host0")


def test_waiting_tells_place_and_reason_and_revoke_makes_room(home: Home) -> None:
    first = as_json(home, "lease", "acquire", "--vram", "16GiB", "--ttl", "10m", "--job", "night")
    waiter = forked.Forked(
        [sys.executable, "-m", "sublet", "lease", "acquire", "--vram", "10GiB", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env=home.environment,
    )
    wait_until(lambda: len(as_json(home, "ps")) == 2)
    waiting = next(r for r in as_json(home, "ps") if r["state"] == "waiting")
    assert waiting["position"] == 1
    assert "needs 10GiB" in waiting["detail"]
    assert "PD" in sublet(home, "ps").stdout
    said = sublet(home, "revoke", "night", "--grace", "0s", "--reason", "tests need it")
    assert "tests need it" in said.stdout
    made = json.loads(waiter.communicate(timeout=30)[0])
    assert made["state"] == "active"
    assert as_json(home, "lease", "show", first["id"])["reason"] == "revoked"


def test_gpu_hours_a_day_are_set_shown_and_used_up(home: Home) -> None:
    [made] = as_json(home, "tenant", "add", "ada", "--gpu-hours-per-day", "0.5")
    assert (made["quotas"]["gpu_seconds_per_day"], made["allowance"]["left_seconds"]) == (1800, 1800)
    assert (
        as_json(home, "quota", "set", "ada", "--gpu-hours-per-day", "2")[0]["allowance"]["left_seconds"]
        == 7200
    )
    held = as_json(home, "lease", "acquire", "--tenant", "ada", "--vram", "16GiB", "--ttl", "1h")
    [seen] = as_json(home, "quota", "show", "ada")
    assert seen["allowance"]["left_seconds"] > 7100  # used as it is used
    assert seen["allowance"]["paid_ahead_seconds"] > 3500
    assert re.search(r"left \d.* of 2h00m, full again at \d{4}-", sublet(home, "quota", "show", "ada").stdout)
    as_json(home, "quota", "set", "ada", "--gpu-hours-per-day", "0.01")
    refused = sublet(home, "lease", "acquire", "--tenant", "ada", "--vram", "1GiB", "--nonblock")
    assert refused.returncode == 75
    assert re.search(
        r"asked for \S+ of GPU time, left are 0ms of 36s a day, refill at \d{4}-", refused.stderr
    )
    sublet(home, "lease", "release", held["id"])
    assert as_json(home, "quota", "set", "ada", "--gpu-hours-per-day", "none")[0]["allowance"] is None
    assert sublet(home, "quota", "set", "ada", "--gpu-hours-per-day", "lots").returncode == 2
    assert "∞" in sublet(home, "quota", "show", "ada").stdout


def test_tenants_and_quotas(home: Home) -> None:
    assert sublet(home, "tenant", "add", "ada", "--max-vram", "4GB", "--weight", "200").returncode == 0
    assert sublet(home, "tenant", "add", "ada").returncode == 2
    refused = sublet(home, "lease", "acquire", "--tenant", "ada", "--vram", "8GB", "--nonblock")
    assert refused.returncode == 75
    assert "may hold 4GB" in refused.stderr
    assert as_json(home, "quota", "set", "ada", "--max-vram", "none")[0]["quotas"]["max_vram_bytes"] == 0
    held = as_json(home, "lease", "acquire", "--tenant", "ada", "--vram", "8GB")
    assert as_json(home, "quota", "show", "ada")[0]["live_bytes"] == 8 * 10**9
    assert sublet(home, "tenant", "rm", "ada").returncode == 2
    sublet(home, "lease", "release", held["id"])
    assert sublet(home, "tenant", "rm", "ada").returncode == 0
    assert sublet(home, "quota", "set", "ada").returncode == 2


def test_quarantine_by_hand(home: Home) -> None:
    device = as_json(home, "gpus")[0]["id"]
    assert sublet(home, "quarantine", "set", device, "--reason", "fan").returncode == 0
    assert as_json(home, "quarantine", "ls")[0]["note"] == "fan"
    assert sublet(home, "lease", "acquire", "--nonblock").returncode == 75
    assert sublet(home, "quarantine", "clear", device).returncode == 0
    assert sublet(home, "lease", "acquire", "--nonblock").returncode == 0


BAD_INPUT: list[tuple[list[str], int, str]] = [
    (["lease", "acquire", "--vram", "-8GB"], 2, "is not a size"),
    (["lease", "acquire", "--vram", "0"], 2, "not positive"),
    (["lease", "acquire", "--ttl", "0s"], 2, "ttl 0ms is out of range"),
    (["lease", "acquire", "--ttl", "900d"], 2, "longer than a year"),
    (["lease", "acquire", "--ttl", "30d"], 2, "out of range"),
    (["lease", "acquire", "--exclusivity", "mine"], 2, "use shared, session or device"),
    (["lease", "acquire", "--tier", "vip"], 2, "use interactive, batch or spot"),
    (["lease", "acquire", "--tenant", "nobody"], 2, "tenant nobody is unknown"),
    (["lease", "acquire", "--tenant", "a'; DROP TABLE lease;--"], 2, "is not a name"),
    (["lease", "acquire", "--count", "0"], 2, "count 0 is out of range"),
    (["lease", "acquire", "--count", "99"], 75, "never fits"),
    (["lease", "acquire", "--vram", "900GB"], 75, "never fits"),
    (["lease", "acquire", "--pid", "4194304"], 2, "there is no process"),
    (["lease", "renew", "../../etc/passwd"], 2, "is not a lease id"),
    (["lease", "renew", "Lnope"], 2, "did not acquire"),
    (["lease", "show", "Lnope"], 2, "there is no lease"),
    (["revoke", "Lnope"], 2, "there is no lease"),
    (["revoke", "no-such-run"], 2, "no run or job named 'no-such-run' has a lease"),
    (["revoke", "Lnope", "--grace", "soon"], 2, "is not a duration"),
    (["quarantine", "clear", "nodevice"], 2, "there is no device"),
    (["tenant", "add", "a b"], 2, "is not a name"),
    (["tenant", "add", "x", "--weight", "0"], 2, "weight 0 is out of range"),
    (["tenant", "rm", "ghost"], 2, "is unknown"),
    (["frobnicate"], 2, "No such command"),
    (["migrate", "--restore", "/nonexistent"], 2, "does not exist"),
]


def test_bad_input_is_one_sentence_with_a_remedy(home: Home) -> None:
    sublet(home, "gpus")
    before = len(as_json(home, "journal", "tail", "-n", "1000"))
    for args, code, says in BAD_INPUT:
        done = sublet(home, *args)
        assert done.returncode == code, (args, done.stderr)
        assert says in done.stderr, (args, done.stderr)
        assert "Traceback" not in done.stderr
    changed = [e["kind"] for e in as_json(home, "journal", "tail", "-n", "1000")[before:]]
    assert set(changed) <= {"lease.refused", "tenant.added"}, "bad input changed something"
    assert changed.count("tenant.added") <= 1  # the user's own, on first use
    assert as_json(home, "ps", "--all") == []


def test_errors_are_json_when_asked(home: Home) -> None:
    done = sublet(home, "lease", "acquire", "--vram", "900GB", "--json")
    error = json.loads(done.stderr)["error"]
    assert error["code"] == "never_fits"
    assert error["remedy"]


def test_gpus_is_a_word_for_count_and_a_size_needs_a_unit(home: Home) -> None:
    (device,) = as_json(home, "lease", "acquire", "--gpus", "1", "--vram", "1G", "--ttl", "10s")["devices"]
    assert device.startswith(home.settings["host"])
    for command in (
        ("lease", "acquire", "--gpus", "1", "--vram", "8"),
        ("run", "--gpus", "1", "--vram", "8", "--", "true"),
    ):
        done = sublet(home, *command)
        assert done.returncode == 2, (command, done.stderr)
        assert "8 is 8 bytes" in done.stderr
        assert "8GiB" in done.stderr


def test_wrong_settings_are_named(home: Home, tmp_path) -> None:
    assert sublet(home, "ps", SUBLET_LEDGER="oracle:thing").returncode == 78
    assert sublet(home, "ps", SUBLET_LEDGER="nothing").returncode == 78
    assert sublet(home, "gpus", SUBLET_DEVICES="tpu:4").returncode == 78
    assert "could not start" in sublet(home, "gpus", SUBLET_DEVICES="tpu:4", SUBLET_HOST="other").stderr
    bad = sublet(home, "ps", SUBLET_LEDGER="postgresql://nobody@127.0.0.1:1/none")
    assert bad.returncode == 69
    assert "127.0.0.1" not in bad.stderr
    (tmp_path / "home" / "sublet.toml").write_text("colour = 'red'\n")
    unknown = sublet(home, "ps")
    assert unknown.returncode == 78
    assert "unknown setting 'colour'" in unknown.stderr


def test_settings_by_precedence_and_origin(home: Home, tmp_path) -> None:
    (tmp_path / "home").mkdir(exist_ok=True)
    (tmp_path / "home" / "sublet.toml").write_text("tenant = 'filed'\n[policy]\ngrace = '3s'\n")
    found = {s["name"]: s for s in as_json(home, "doctor")["settings"]}
    assert found["SUBLET_TENANT"]["value"] == "filed"
    assert found["SUBLET_TENANT"]["origin"].endswith("sublet.toml")
    assert found["SUBLET_HOME"]["origin"] == "SUBLET_HOME"
    assert found["SUBLET_STORE"]["origin"] == "default"
    over = json.loads(sublet(home, "doctor", "--json", SUBLET_TENANT="loud").stdout)
    assert {s["name"]: s["origin"] for s in over["settings"]}["SUBLET_TENANT"] == "SUBLET_TENANT"


def test_doctor_hides_secrets_and_names_what_fails(home: Home) -> None:
    well = sublet(home, "doctor", SUBLET_TOKEN="tok-canary")
    assert well.returncode == 0, well.stdout
    assert "tok-canary" not in well.stdout
    assert "(set)" in well.stdout
    assert "workers are contained by" in well.stdout or "subreaper only" in well.stdout
    password = sublet(home, "doctor", SUBLET_LEDGER="postgresql://u:pw-canary@127.0.0.1:1/x")
    assert password.returncode == 78
    assert "pw-canary" not in password.stdout + password.stderr
    assert "fail" in password.stdout


def test_doctor_tries_the_devices(home: Home) -> None:
    done = sublet(home, "doctor", "--gpu", "--json", SUBLET_DEVICES="host:2x1GiB")
    assert done.returncode == 0, done.stderr
    devices = json.loads(done.stdout)["devices"]
    assert [d["id"].rpartition("-")[2] for d in devices] == ["host0", "host1"]
    for device in devices:
        statuses = {c["check"]: c["status"] for c in device["checks"]}
        assert statuses.pop("scrub") == "skip"
        assert set(statuses.values()) == {"ok"}, device
    named = sublet(home, "doctor", "--gpu", "--device", devices[1]["id"], SUBLET_DEVICES="host:2x1GiB")
    assert named.returncode == 0, named.stderr
    assert {line.split()[0] for line in named.stdout.splitlines()[1:]} == {devices[1]["id"]}
    assert home.warden_pid() == 0, "it leases nothing, so it needs nobody"


def test_doctor_names_the_checks_a_device_failed(home: Home) -> None:
    done = sublet(home, "doctor", "--gpu", SUBLET_DEVICES="host:1x1GiB!oom=1MiB")
    assert done.returncode == 71
    assert "2 check(s) failed: alloc on " in done.stderr
    assert "watchdog on " in done.stderr
    assert "the device has not 8MiB left" in done.stdout


def test_doctor_leaves_leased_devices_alone(home: Home) -> None:
    held = as_json(home, "lease", "acquire", "--ttl", "10m")
    refused = sublet(home, "doctor", "--gpu")
    assert refused.returncode == 75
    assert "every device is leased" in refused.stderr
    assert "add --force" in refused.stderr
    assert "1 live lease(s): it was not touched" in refused.stdout
    assert sublet(home, "doctor", "--gpu", "--force").returncode == 0
    sublet(home, "lease", "release", held["id"])
    wait_until(lambda: as_json(home, "lease", "show", held["id"])["settled_at"])
    assert sublet(home, "doctor", "--gpu").returncode == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--gpu", "--device", "nope"], "no device 'nope'"),
        (["--force"], "go with --gpu"),
        (["--device", "x"], "--gpu"),
    ],
)
def test_doctor_refuses_what_makes_no_sense(home: Home, args: list[str], words: str) -> None:
    done = sublet(home, "doctor", *args)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_backup_put_back_fences_old_holders(home: Home, tmp_path) -> None:
    held = as_json(home, "lease", "acquire", "--ttl", "10m")
    backup = tmp_path / "backup.db"
    assert sublet(home, "migrate", "--backup", str(backup)).returncode == 0
    assert sublet(home, "migrate", "--backup", str(backup)).returncode == 2
    later = as_json(home, "lease", "acquire", "--ttl", "10m")
    refused = sublet(home, "migrate", "--restore", str(backup))
    assert refused.returncode == 2
    assert "a warden" in refused.stderr
    home.end_warden()
    assert sublet(home, "migrate", "--restore", str(backup)).returncode == 0
    assert sublet(home, "lease", "renew", held["id"]).returncode == 76
    assert sublet(home, "lease", "renew", later["id"]).returncode == 76
    fresh = as_json(home, "lease", "acquire")
    assert fresh["epoch"] > later["epoch"] + 2**39
    assert sublet(home, "journal", "verify").returncode == 0


def test_a_removed_tenants_name_stays_reserved(home: Home) -> None:
    """T1: who is added under it later would see what the removed one had."""
    assert sublet(home, "tenant", "add", "ada").returncode == 0
    removed = sublet(home, "tenant", "rm", "ada")
    assert "its name stays reserved" in removed.stdout
    refused = sublet(home, "tenant", "add", "ada")
    assert refused.returncode == 2
    assert "the name ada is reserved" in refused.stderr
    assert sublet(home, "tenant", "add", "ada", "--returning").returncode == 0


def test_a_ledger_from_the_past_is_read_and_not_written(home: Home, tmp_path) -> None:
    """I5: an old copy put back by hand is refused in words by everything that writes, until somebody says so."""
    first = as_json(home, "lease", "acquire", "--ttl", "10m")
    old = tmp_path / "old.db"
    assert sublet(home, "migrate", "--backup", str(old)).returncode == 0
    later = as_json(home, "lease", "acquire", "--ttl", "10m")
    home.end_warden()
    ledger = tmp_path / "home" / "ledger.db"
    for end in ("-wal", "-shm"):
        Path(f"{ledger}{end}").unlink(missing_ok=True)
    shutil.copyfile(old, ledger)
    assert [lease["id"] for lease in as_json(home, "ps")] == [first["id"]]
    for words in (
        ["lease", "acquire"],
        ["lease", "renew", first["id"]],
        ["tenant", "add", "eve"],
        ["warden"],
    ):
        refused = sublet(home, *words)
        assert refused.returncode == 78, (words, refused.stderr)
        assert "went back in time" in refused.stderr, (words, refused.stderr)
        assert "sublet migrate --restored" in refused.stderr
        assert "Traceback" not in refused.stderr
    doctor = sublet(home, "doctor")
    assert doctor.returncode != 0
    assert "went back in time" in doctor.stdout
    assert sublet(home, "migrate", "--restored").returncode == 0
    assert as_json(home, "lease", "acquire")["epoch"] > later["epoch"]
    assert sublet(home, "lease", "renew", first["id"]).returncode == 76


def test_journal_verify_catches_an_edit(home: Home, tmp_path) -> None:
    import apsw

    as_json(home, "lease", "acquire")
    db = apsw.Connection(str(tmp_path / "home" / "ledger.db"))
    db.set_busy_timeout(10_000)  # a warden writes there too
    db.execute("UPDATE journal SET body = replace(body, 'interactive', 'spot') WHERE kind = 'lease.granted'")
    db.close()
    done = sublet(home, "journal", "verify")
    assert done.returncode == 73
    assert "was edited" in done.stdout


def test_follow_prints_as_it_happens(home: Home) -> None:
    sublet(home, "gpus")
    follower = forked.Forked(
        [sys.executable, "-m", "sublet", "journal", "tail", "-f"],
        stdout=subprocess.PIPE,
        text=True,
        env=home.environment,
    )
    time.sleep(0.5)
    made = as_json(home, "lease", "acquire")
    assert any(made["id"] in line for line in follower.stdout), "the grant was not printed"
    follower.kill()
    follower.wait()
    follower.stdout.close()


def test_every_command_has_help_with_an_example(home: Home) -> None:
    for name in COMMANDS:
        text = sublet(home, name, "--help").stdout
        if "Commands:" in text:
            children = [line.split()[0] for line in text.split("Commands:")[1].splitlines() if line.strip()]
            for child in children:
                assert "Example:" in sublet(home, name, child, "--help").stdout, f"{name} {child}"
        else:
            assert "Example:" in text, name


@pytest.mark.parametrize(
    "program", [[sys.executable, "-m", "sublet"], [f"{Path(sys.executable).parent}/sublet"]]
)
def test_started_by_itself(home: Home, program: list[str]) -> None:
    """By a new interpreter, as people do it; the other tests fork one that has imported it."""
    for words, code, said in (
        (["gpus"], 0, "host0"),
        (["lease", "show", "nobody"], 2, "sublet:"),
        (["leese"], 2, "No such"),
    ):
        done = subprocess.run(
            [*program, *words], capture_output=True, text=True, env=home.environment, timeout=60, check=False
        )
        same = sublet(home, *words)
        assert done.returncode == same.returncode == code, done.stderr
        assert said in done.stdout + done.stderr
        assert (words == ["leese"]) or (done.stdout, done.stderr) == (same.stdout, same.stderr)


def test_help_and_import_load_no_heavy_module() -> None:
    code = (
        "import sys, sublet\n"
        "assert not {'apsw', 'rich', 'click', 'psycopg', 'asyncio'} & set(sys.modules), sys.modules.keys()\n"
        "import sublet.cli.main\n"
        "assert not {'apsw', 'rich', 'psycopg', 'sublet.wiring'} & set(sys.modules), sys.modules.keys()\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_demo_proves_its_claim(home: Home) -> None:
    done = sublet(home, "demo", "--seed", "7", timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("  yes") == 6
    assert "  NO" not in done.stdout


def test_checkpoints_from_the_command_line(home: Home, tmp_path: Path) -> None:
    """Saved by a program, listed, damaged on one replica, found, repaired."""
    places = [tmp_path / "a", tmp_path / "b"]
    store = {"SUBLET_STORE": ",".join(f"dir:{p}@{p.name}" for p in places)}
    code = (
        "import numpy, sublet\n"
        "with sublet.gpu(vram='1GiB', ttl='1m') as lease, sublet.checkpoints() as store:\n"
        "    store.save('m', {'w': numpy.arange(1000.0), 'opt': {0: numpy.ones(3, 'f4')}}, expected_version=0, lease=lease)\n"
    )
    assert sublet(home, "checkpoint", "ls", **store).stdout + sublet(home, "checkpoint", "ls", **store).stderr
    forked.run([sys.executable, "-c", code], env=home.environment | store, check=True)
    (listed,) = json.loads(sublet(home, "checkpoint", "ls", "--json", **store).stdout)
    assert (listed["name"], listed["version"], listed["step"]) == ("m", 1, 1)
    assert "m " in sublet(home, "checkpoint", "ls", **store).stdout
    shown = json.loads(sublet(home, "checkpoint", "show", "m", "--json", **store).stdout)
    assert {(t["path"], t["dtype"], tuple(t["shape"])) for t in shown["tensors"]} == {
        ("w", "<f8", (1000,)),
        ("opt.0", "<f4", (3,)),
    }
    assert shown["bytes_new"] == shown["bytes"] > 8012
    assert "<f8" in sublet(home, "checkpoint", "show", "m", **store).stdout
    assert sublet(home, "checkpoint", "verify", "m", **store).returncode == 0
    (pack,) = (places[1] / "packs").iterdir()
    pack.write_bytes(pack.read_bytes()[:100])
    found = sublet(home, "checkpoint", "verify", "m", **store)
    assert found.returncode == 74, found.stderr
    assert "sublet checkpoint repair m" in found.stderr
    repaired = sublet(home, "checkpoint", "repair", "m", **store)
    assert repaired.returncode == 0, repaired.stderr
    assert f"repaired: dir:{places[1]}" in repaired.stdout
    assert "set aside" in repaired.stdout
    assert sublet(home, "checkpoint", "verify", "m", **store).returncode == 0
    assert "good copy of everything" in sublet(home, "checkpoint", "repair", "m", **store).stdout
    missing = sublet(home, "checkpoint", "show", "nothing", **store)
    assert (missing.returncode, "nothing was saved as nothing" in missing.stderr) == (2, True)


SAVE = """
import numpy, sublet
with sublet.gpu(vram='1GiB', ttl='1m') as lease, sublet.checkpoints() as store:
    for n in range(5):
        store.save('m', {'w': numpy.full(1 << 20, 7, 'u1'), 'n': numpy.full(3, n + 1)}, expected_version=n, lease=lease)
"""


def test_old_checkpoints_from_the_command_line(home: Home, tmp_path: Path) -> None:
    """Tagged, rolled back, forked, thinned out, swept, scrubbed; each says what it did, and a dry run does nothing."""
    places = [tmp_path / "a", tmp_path / "b"]
    store = {"SUBLET_STORE": ",".join(f"dir:{p}@{p.name}" for p in places)}

    def run(*args: str, code: int = 0) -> Any:
        done = sublet(home, "checkpoint", *args, "--json", **store)
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout)

    def said(*args: str, code: int = 0) -> str:
        done = sublet(home, "checkpoint", *args, **store)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    forked.run([sys.executable, "-c", SAVE], env=home.environment | store, check=True)
    assert run("tag", "m", "1", "first")["tags"] == {"first": 1}
    assert "version 2 is kept as second" in said("tag", "m", "2", "second")
    assert "nothing was changed" in said("tag", "m", "1", "second", "--remove", code=2)
    assert "no tag second" in said("tag", "m", "2", "second", "--remove")
    shown = run("show", "m", "--version", "first")
    assert (shown["version"], shown["tags"], shown["versions"]) == (1, ["first"], [5, 4, 3, 2, 1])
    assert [(r["packs"], r["manifest"]) for r in shown["replicas"]] == [(1, True)] * 2
    assert shown["bytes_new"] == shown["bytes"]
    newest = run("show", "m")
    assert newest["bytes"] > 1 << 20 > 1000 > newest["bytes_new"] > 0
    assert all(0 <= h["age_seconds"] < 1000 for h in newest["history"])
    words = said("show", "m")
    for expected in ("version 5, step 5", newest["digest"], "first", "all 2 packs", "shared", "u1"):
        assert expected in words
    (places[0] / "packs" / f"{shown['packs'][0]}.pack").unlink()
    assert "1 of 2 packs" in said("show", "m")
    # Scrub: found, then mended.
    assert "1 not good" in said("scrub", code=74)
    assert [c["state"] for c in run("scrub", "--repair", "--rate", "1GB")["found"]] == ["missing"]
    assert "0 not good" in said("scrub", "m")
    # Rollback and fork.
    planned = run("rollback", "m", "2", "--dry-run")
    assert (planned["version"], planned["source"]) == (6, 2)
    assert run("show", "m")["version"] == 5
    assert "run again" in said("rollback", "m", "2")
    assert run("rollback", "m", "first")["version"] == 7
    assert (run("show", "m")["step"], run("fork", "m", "n", "--version", "4")["source"]) == (1, 4)
    assert "begins with version 7" in said("fork", "m", "o")
    assert "already" in said("fork", "m", "o", code=73)
    # Sweep.
    assert "12h" in said("sweep", "--older-than", "1h", code=2)
    everything = [p.name for place in places for p in place.glob("*/*")]
    plan = run("sweep", "--keep-last", "2", "--older-than", "0s", "--nobody-is-saving", "--dry-run")
    assert [v["version"] for v in plan["versions"]["m"] if v["keep"]] == [7, 6, 1]
    assert [p.name for place in places for p in place.glob("*/*")] == everything
    assert "nothing to delete" in said("sweep")
    words = said("sweep", "m", "--keep-last", "2", "--older-than", "0s", "--nobody-is-saving")
    assert "no rule keeps it" in words
    assert f"deleted on dir:{places[0]}" in words
    assert run("show", "m")["versions"] == [7, 6, 1]
    assert run("show", "n")["step"] == 4
    assert said("verify", "n")
    assert sublet(home, "journal", "verify").returncode == 0
    # The ledger is lost; the replicas are not.
    for path in Path(home.environment["SUBLET_HOME"]).glob("*.db*"):
        path.rename(path.with_name(path.name + ".lost"))
    sublet(home, "gpus")
    assert "another ledger" in said("sweep", code=78)
    assert "--take-over" in said("rebuild", code=78)
    plan = run("rebuild", "--take-over", "--dry-run")
    assert {j["name"]: j["version"] for j in plan["jobs"]} == {"m": 7, "n": 1, "o": 1}
    assert "nothing was committed" in said("ls")
    words = said("rebuild", "--take-over")
    assert "may have been saved and not committed" in words
    assert run("show", "m")["versions"] == [7, 6, 1]
    assert run("rebuild")["jobs"][0]["action"] == "as it was"
    assert run("sweep", "--older-than", "0s", "--nobody-is-saving")["removed"] == []


def test_receipts_are_listed(home: Home) -> None:
    code = (
        "import os, sublet\n"
        "with sublet.gpu(vram='1GiB', ttl='1m', holder='worker') as lease:\n"
        "    lease.open().alloc(1000)\n"
    )
    assert "no receipts" in sublet(home, "ps", "--receipts").stderr
    forked.run([sys.executable, "-c", code], env=home.environment, check=True)
    wait_until(lambda: json.loads(sublet(home, "ps", "--receipts", "--json").stdout or "[]"))
    (receipt,) = json.loads(sublet(home, "ps", "--receipts", "--json").stdout)
    assert receipt["proven"] is True
    assert receipt["ladder"] in ("gone", "term")
    assert receipt["containment"]
    assert len(receipt["pids"]) >= 2
    shown = sublet(home, "ps", "--receipts").stdout.splitlines()
    assert shown[0].split()[:4] == ["LEASE", "TENANT", "PROVEN", "LADDER"]
    assert shown[1].split()[2] == "yes"
