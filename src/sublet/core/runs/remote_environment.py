"""What a command on another machine sees of the machine it was started from.

Rules of this file:
- The caller's variables go along, because whoever sets one means it. Those that are true of one machine only
  stay at home, and lists of folders are the caller's first, then the node's.
- Of our own settings, those that name a machine are the node's: its home, its name, its devices, and how it
  reaches the ledger.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Each says something of a machine or of a login there.
OF_ONE_MACHINE = frozenset(
    [
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "MAIL",
        "PWD",
        "OLDPWD",
        "HOSTNAME",
        "TMPDIR",
        "TMP",
        "TEMP",
        "TERM",
        "DISPLAY",
        "XDG_RUNTIME_DIR",
        "XDG_SESSION_ID",
        "DBUS_SESSION_BUS_ADDRESS",
        "SSH_AUTH_SOCK",
        "SSH_CLIENT",
        "SSH_CONNECTION",
        "SSH_TTY",
    ]
)
FOLDER_LISTS = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")


def folders(first: str, then: str) -> str:
    """Both lists as one, each folder once."""
    return ":".join(dict.fromkeys(part for part in (*first.split(":"), *then.split(":")) if part))


def placed_environment(
    caller: Mapping[str, str], named: Mapping[str, str], node: Mapping[str, str], ours: Mapping[str, str]
) -> dict[str, str]:
    """`named` were given for this command and count as they stand; `node` is what the node's own processes
    see, `ours` what is so for this command there, and comes last."""
    found = dict(node)
    for name, value in caller.items():
        if name in FOLDER_LISTS:
            found[name] = folders(value, node.get(name, ""))
        elif name not in OF_ONE_MACHINE:
            found[name] = value
    return {**found, **named, **ours}
