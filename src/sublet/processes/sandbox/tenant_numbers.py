"""A number for each tenant of this host, from which the uid of its workers is made.

Rules of this file:
- A number is given once and never to another tenant, who could read files left behind. It is kept in a file
  beside the ledger.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

from sublet.machine.durable import sync_path


class TenantNumbers:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def of(self, tenant: str) -> int:
        with self._lock:
            known = self._read()
            number = known.get(tenant)
            if number is None:
                number = known[tenant] = max(known.values(), default=0) + 1
                self._write(known)
            return number

    def _read(self) -> dict[str, int]:
        try:
            return {str(name): int(number) for name, number in json.loads(self._path.read_text()).items()}
        except FileNotFoundError:
            return {}

    def _write(self, known: dict[str, int]) -> None:
        """Durable before it is used: a number lost in a power cut would be given to somebody else."""
        fresh = self._path.with_suffix(".new")
        fd = os.open(fresh, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, json.dumps(known, sort_keys=True).encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(fresh, self._path)
        sync_path(self._path.parent)
