"""Each a program or a command of a user's, unchanged: on a laptop by SQLite, a folder and this machine; on a cluster by PostgreSQL, S3 and Ray."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sublet.machine.run_folder import RunFolder, runs_folder
from sublet.testing.ray_cluster import Cluster
from tests.everywhere.place import Place, facts
from tests.studio.served import free_port, token_for

pytestmark = pytest.mark.timeout(600)
STEPS = 20


@cache
def chained(steps: int) -> str:
    digest = b""
    for step in range(1, steps + 1):
        digest = hashlib.sha256(digest + step.to_bytes(4, "big")).digest()
    return digest.hex()


def test_a_job_in_a_run(place: Place) -> None:
    """S1, S3: the command finds the lease it runs under and commits by itself; the run's output is the command's and nothing else."""
    out = place.sublet(*place.trained("job", STEPS))
    assert out == json.dumps({"digest": chained(STEPS)}).encode() + b"\n"


def test_a_job_that_is_cancelled_goes_on_where_it_was(place: Place) -> None:
    """The notice reaches the command wherever it is; what it commits then is there for the next run, wherever that is."""
    process = place.start_sublet(*place.trained("stopped", 400, 0.05))
    assert process.stderr is not None
    for line in process.stderr:  # the command says when it has begun
        if line.startswith(b"{"):
            break
    said = json.loads(place.sublet("cancel", "stopped", "--json"))
    assert not said["ended"]
    place.ended(process, 85)
    run = RunFolder(runs_folder(Path(place.environment["SUBLET_HOME"])) / said["run"])
    left = run.exit()
    assert left["outcome"] == "preempted"
    committed = left["committed_step"]
    assert 0 <= committed < 400
    again = place.start_sublet(*place.trained("stopped", committed + 4))
    assert facts(place.ended(again)) == {"digest": chained(committed + 4)}


def test_a_run_that_goes_on_by_itself_is_listed_and_followed(place: Place) -> None:
    words = place.trained("alone", STEPS, 0.1)
    [run_id] = place.sublet("run", "-d", *words[1:]).decode().split()
    listed = json.loads(place.sublet("ps", "--runs", "--json"))
    assert [(run["id"], run["name"]) for run in listed if run["id"] == run_id] == [(run_id, "alone")]
    followed = place.sublet("logs", "-f", "alone").splitlines()
    assert json.dumps({"digest": chained(STEPS)}).encode() in followed
    assert place.sublet("attach", run_id)


def test_a_script_that_holds_its_gpu_itself(place: Place, request: pytest.FixtureRequest) -> None:
    """Without `sublet run` it needs a GPU where it is. On a machine without one it says what to do."""
    words = ("train.py", "by-itself", str(STEPS), "0")
    if "SUBLET_PLACEMENT" in place.environment:
        process = place.start(*words)
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 1
        assert b"sublet run -- python train.py" in errors
        cluster: Cluster = request.getfixturevalue("three_nodes")
        place = place.elsewhere(SUBLET_HOST="a", SUBLET_HOME=str(cluster.node("a").home))
    assert place.run(*words) == {"digest": chained(STEPS)}


def noise(rounds: int) -> tuple[bytes, bytes, bytes]:
    """Standard output, standard error, and both as one."""
    made, out, err, both = random.Random(7), b"", b"", b""
    for _ in range(rounds):
        one = made.randbytes(made.randrange(1, 5000))
        two = made.randbytes(made.randrange(1, 500))
        out, err, both = out + one, err + two, both + one + two
    return out, err, both


def test_what_a_command_writes_arrives_byte_by_byte(place: Place, tmp_path: Path) -> None:
    """Each stream in its order; where both are one file, in the order of the writes."""
    out, err, both = noise(400)
    words = ("run", "--vram", "64MiB", "--json", "--", place.python, "noise.py", "400")
    process = place.start_sublet(*words)
    said, errors = process.communicate(timeout=240)
    assert process.returncode == 7
    assert said == out
    assert errors.startswith(err)
    with (tmp_path / "both").open("wb") as file:
        assert place.start_sublet(*words, stdout=file, stderr=subprocess.STDOUT).wait(240) == 7
    assert (tmp_path / "both").read_bytes().startswith(both)


def test_a_reader_that_leaves_ends_the_command(place: Place) -> None:
    process = place.start_sublet("run", "--vram", "64MiB", "--", "yes")
    assert process.stdout is not None
    assert process.stdout.read(4) == b"y\ny\n"
    process.stdout.close()
    process.stdout = None
    assert process.wait(240) == 141  # by SIGPIPE, as in any shell


def test_a_queue_and_its_worker(place: Place) -> None:
    """S6: every item once, whoever worked on it."""
    code = "import sublet; sublet.queue('numbers').publish([{'number': n} for n in range(30)], key=lambda i: str(i['number']))"
    place.run("-c", code)
    place.sublet("work", "numbers", "items.py:digest", "--vram", "64MiB", "--ttl", "20s", "--until-empty")
    code = "import json, sublet; print(json.dumps({'found': sorted(r.value for r in sublet.queue('numbers').results())}))"
    expected = sorted(hashlib.sha256(str(n).encode()).hexdigest() for n in range(30))
    assert place.run("-c", code)["found"] == expected


def test_borrowed_by_a_script(place: Place) -> None:
    said = place.run("borrow.py")
    assert said["mapped"] == [hashlib.sha256(t.encode()).hexdigest() for t in ("one", "two", "three")]
    assert said["summed"] == 499500
    assert said["added"] == hashlib.sha256((3).to_bytes(4, "little") * 1024).hexdigest()


def test_cells_of_a_notebook(place: Place) -> None:
    pytest.importorskip("IPython")
    out = place.ended(place.start("cells.py")).splitlines()
    weights = [i / 7 * 3 for i in range(100)]
    assert json.loads(out[-1]) == {
        "total": sum(weights),
        "digest": hashlib.sha256(repr(weights).encode()).hexdigest(),
    }


@pytest.fixture(scope="session")
def undisturbed(embedded: Place) -> str:
    """What the network is when nothing happens to it."""
    return str(embedded.run("network.py", "undisturbed", str(STEPS))["digest"])


def test_the_demos_training_through_losses(place: Place, undisturbed: str) -> None:
    """S2, S3: twice its lease is taken; a real kernel on a real device, and the weights are the same to the last bit."""
    process = place.start("network.py", "network", str(STEPS), "7", "13")
    assert process.stdout is not None
    leases: list[str] = []
    losses, said = 0, dict[str, Any]()
    for line in process.stdout:
        said = json.loads(line)
        if "lease" in said:
            leases.append(said["lease"])
        losses += "lost" in said
        if said.get("step") in (7, 13) and len(leases) == (1 if said["step"] == 7 else 2):
            place.sublet("revoke", leases[-1], "--grace", "0s")
    place.ended(process)
    assert (len(leases), losses) == (3, 2)
    assert said["digest"] == undisturbed


def test_a_session_of_the_studio(place: Place) -> None:
    """K3: what a session computes and saves; it outlives the service."""
    pytest.importorskip("fastapi")
    with place.ledger() as ledger:
        token = token_for(ledger, "ann")
    port = free_port()
    serve = ("serve", "--port", str(port))
    url = f"http://127.0.0.1:{port}"
    service = place.start_sublet(*serve, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    first = place.run("session.py", "open", url, token)
    service.kill()
    service.wait()
    service = place.start_sublet(*serve, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    second = place.run("session.py", "go-on", url, token, first["session"])
    service.terminate()
    service.wait(60)
    assert first["total"] == 499500
    assert second == {"again": 499501, "saved": {"total": 499500}, "lease": first["lease"]}
