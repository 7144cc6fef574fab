"""`python -m tests.side_by_side [pytest options]`: the whole suite as two pytest runs at once.

Most tests here wait for real time to pass (a ttl, a deadline, a storm), so two of them share two cores well. The second run's output is
shown when the first is over; the exit code is the worse of both.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parent
#: Those that wait most; the other run takes whatever else there is.
WAITING = ("hosting", "runtime", "storms")


def main() -> int:
    others = sorted(
        p
        for p in TESTS.iterdir()
        if (p.is_dir() and (p / "__init__.py").exists()) or p.name.startswith("test_")
    )
    halves = [[p for p in others if p.name not in WAITING], [TESTS / name for name in WAITING]]
    command = [sys.executable, "-m", "pytest", *sys.argv[1:]]
    with tempfile.TemporaryFile() as output:
        second = subprocess.Popen([*command, *map(str, halves[1])], stdout=output, stderr=subprocess.STDOUT)
        try:
            first = subprocess.run([*command, *map(str, halves[0])], check=False)
            code = second.wait()
        finally:
            second.kill()
        output.seek(0)
        print(f"--- beside it: {', '.join(WAITING)}", flush=True)
        sys.stdout.buffer.write(output.read())
        sys.stdout.flush()
    return max(first.returncode, code)


if __name__ == "__main__":
    sys.exit(main())
