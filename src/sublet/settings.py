"""Settings: defaults < sublet.toml < environment < argument, once, for everything.

Rules of this file:
- Each value remembers where it came from, and `sublet doctor` prints it.
- Nothing below this layer reads the environment; adapters receive plain values.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from sublet.core.errors import BadInput, Misconfigured
from sublet.core.leasing.policy import Policy
from sublet.core.studio.isolation import parse_mode
from sublet.core.studio.worker_limits import CPU_WEIGHT, MEMORY_PERCENT, PROCESSES_MOST
from sublet.core.values import check_name


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    value: str
    origin: str  # 'default', the file, the variable, or 'argument'


@dataclass(frozen=True, slots=True)
class Spec:
    name: str
    variable: str
    help: str
    secret: bool = False
    studio: bool = False  # a command that a run starts has no use for it


SPECS = (
    Spec("home", "SUBLET_HOME", "where everything of this user lives"),
    Spec("ledger", "SUBLET_LEDGER", "sqlite:PATH or postgresql://user@host/database"),
    Spec(
        "store",
        "SUBLET_STORE",
        "where checkpoints go: dir:PATH, s3://…, gs://…, az://…, each with optional @domain",
    ),
    Spec("devices", "SUBLET_DEVICES", "auto, or a list such as host:2x16GiB"),
    Spec(
        "placement",
        "SUBLET_PLACEMENT",
        "where leased workers and commands run: local, or ray://HEAD:6379, or ray:auto",
    ),
    Spec("url", "SUBLET_URL", "a studio to use instead of this machine"),
    Spec("token", "SUBLET_TOKEN", "the studio's token", secret=True),
    Spec("tenant", "SUBLET_TENANT", "who the work is for"),
    Spec("disable", "SUBLET_DISABLE", "1 makes every decorator a plain call"),
    Spec(
        "preload",
        "SUBLET_PRELOAD",
        "modules every worker has imported already, comma-separated; 'none' for none",
    ),
    Spec(
        "notices",
        "SUBLET_NOTICES",
        "who may warn that the GPU will go: auto (whatever is found here), none, or a list such as gce,slurm",
    ),
    Spec("time_limit", "SUBLET_TIME_LIMIT", "how long a process may run, such as 2h; it drains before that"),
    Spec(
        "verify",
        "SUBLET_VERIFY",
        "which resumes repeat what was done since the save before the last, and compare: auto (the first of "
        "each version of the program, then one in ten), always, first or never",
    ),
    Spec(
        "isolation",
        "SUBLET_ISOLATION",
        "what a studio does where it cannot keep tenants apart: required (one tenant only), or none, by "
        "name, for people who trust each other",
        studio=True,
    ),
    Spec(
        "worker_memory",
        "SUBLET_WORKER_MEMORY",
        "the most memory of one studio session's worker: a size such as 16GiB, or a share of the machine's "
        "such as 50%",
        studio=True,
    ),
    Spec(
        "worker_processes",
        "SUBLET_WORKER_PROCESSES",
        "the most processes and threads of one studio session's worker",
        studio=True,
    ),
    Spec(
        "worker_cpu_weight",
        "SUBLET_WORKER_CPU_WEIGHT",
        "its share of a busy machine's CPU, beside 100 of each other one",
        studio=True,
    ),
    Spec("price", "SUBLET_PRICE", "what a GPU-hour costs, such as 2.50: shown under cells and in reports"),
    Spec("host", "SUBLET_HOST", "the name of this machine in the ledger"),
    Spec(
        "domain",
        "SUBLET_DOMAIN",
        "what this machine fails with, such as us-east1: replicas of that @domain are read first; empty: "
        "measured",
    ),
    Spec(
        "disk_reserve",
        "SUBLET_DISK_RESERVE",
        "what tenants of a studio leave free on the ledger's disk, such as 10GiB; auto: 1GiB, or a twentieth "
        "of a small disk",
        studio=True,
    ),
    Spec(
        "scratch_limit",
        "SUBLET_SCRATCH_LIMIT",
        "how much the files of one studio session may take on its host, such as 50GiB; 'none' for no limit",
        studio=True,
    ),
    Spec(
        "tenant_network",
        "SUBLET_TENANT_NETWORK",
        "what tenants' workers may reach: guarded (the internet, not this host's services or the cloud's "
        "metadata), none or open",
        studio=True,
    ),
)


@dataclass(frozen=True, slots=True)
class Settings:
    values: dict[str, Setting] = field(default_factory=dict)
    policy: Policy | None = None  # what sublet.toml says; None leaves the ledger's as it is

    def __getitem__(self, name: str) -> str:
        return self.values[name].value

    def origin(self, name: str) -> str:
        return self.values[name].origin

    @property
    def home(self) -> Path:
        return Path(self["home"])

    @property
    def disabled(self) -> bool:
        return switched_on(self["disable"])


def variable(name: str) -> str:
    """One variable of ours as the environment has it now, '' where it is not set: for what may change while a
    process runs."""
    return os.environ.get(f"SUBLET_{name}", "")


def switched_on(text: str) -> bool:
    return text.strip().lower() not in ("", "0", "false", "no", "off")


def _tidied(text: str, fallback: str) -> str:
    """A name the ledger accepts, from whatever the system calls itself."""
    tidy = re.sub(r"[^A-Za-z0-9._@-]", "-", text)[:63].lstrip(".-_@")
    return tidy or fallback


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # the last where there are no numbers for users
        return f"uid{os.getuid()}" if hasattr(os, "getuid") else "default"


def _defaults(home: str) -> dict[str, str]:
    return {
        "home": home,
        "ledger": f"sqlite:{home}/ledger.db",
        "store": f"dir:{home}/store",
        "devices": "auto",
        "placement": "local",
        "url": "",
        "token": "",
        "tenant": _tidied(_user(), "default"),
        "disable": "",
        "verify": "",
        "preload": "numpy,torch,torch._dynamo,torch.optim",
        "notices": "auto",
        "time_limit": "",
        "isolation": "required",
        "worker_memory": f"{MEMORY_PERCENT}%",
        "worker_processes": str(PROCESSES_MOST),
        "worker_cpu_weight": str(CPU_WEIGHT),
        "price": "",
        "host": _tidied(socket.gethostname(), "localhost"),
        "domain": "",
        "disk_reserve": "auto",
        "scratch_limit": "20GiB",
        "tenant_network": "guarded",
    }


def load_settings(**arguments: str | None) -> Settings:
    given = {name: value for name, value in arguments.items() if value is not None}
    unknown = set(given) - {spec.name for spec in SPECS}
    if unknown:
        raise BadInput(f"unknown setting: {', '.join(sorted(unknown))}")
    home = given.get("home") or os.environ.get("SUBLET_HOME") or "~/.sublet"
    home = os.path.abspath(os.path.expanduser(home))
    path, table = _read_file(home)
    values: dict[str, Setting] = {}
    for name, default in _defaults(home).items():
        variable = next(spec.variable for spec in SPECS if spec.name == name)
        setting = Setting(name, default, "default")
        if name in table and name != "home":
            setting = Setting(name, str(table[name]), str(path))
        if os.environ.get(variable):
            setting = Setting(name, os.environ[variable], variable)
        if name in given:
            setting = Setting(name, given[name], "argument")
        if name == "home":
            setting = Setting(name, home, setting.origin)
        values[name] = setting
    check_name(values["tenant"].value, what="tenant")
    check_name(values["host"].value, what="host")
    parse_mode(values["isolation"].value)
    policy = table.get("policy")
    if policy is not None and not isinstance(policy, dict):
        raise Misconfigured(f"[policy] in {path} must be a table")
    return Settings(values, Policy.from_table(policy) if policy else None)


def _read_file(home: str) -> tuple[Path, dict[str, object]]:
    """The first sublet.toml found: the current folder's, then the home's."""
    for path in (Path("sublet.toml"), Path(home) / "sublet.toml"):
        if not path.is_file():
            continue
        try:
            table = tomllib.loads(path.read_text())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
            raise Misconfigured(f"{path.resolve()} is not valid TOML: {e}") from e
        names = {spec.name for spec in SPECS} | {"policy"}
        for key in table:
            if key not in names:
                raise Misconfigured(
                    f"{path.resolve()} has an unknown setting {key!r}",
                    remedy=f"use one of {', '.join(sorted(names))}",
                )
        return path.resolve(), table
    return Path(home) / "sublet.toml", {}
