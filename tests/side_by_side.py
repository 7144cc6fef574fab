"""`python -m tests.side_by_side [pytest options]`: the whole suite as three pytest runs at once.

Most tests here wait for real time to pass (a ttl, a deadline, a storm) or for a disk, so three of them share two cores well. The output of
the second and third is shown when the first is over; the exit code is the worst of all.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

TESTS = Path(__file__).parent
#: The first run takes whatever is in none of these.
BESIDE = (("hosting", "runtime", "storms"), ("store", "cli", "docs"))


def main() -> int:
    elsewhere = {name for group in BESIDE for name in group}
    first = sorted(
        p
        for p in TESTS.iterdir()
        if p.name not in elsewhere
        and ((p.is_dir() and (p / "__init__.py").exists()) or p.name.startswith("test_"))
    )
    command = [sys.executable, "-m", "pytest", *sys.argv[1:]]
    beside: list[tuple[tuple[str, ...], subprocess.Popen[bytes], IO[bytes]]] = []
    try:
        for group in BESIDE:
            output = tempfile.TemporaryFile()  # noqa: SIM115  # read when the run is over
            run = [*command, *(str(TESTS / name) for name in group)]
            beside.append((group, subprocess.Popen(run, stdout=output, stderr=subprocess.STDOUT), output))
        codes = [subprocess.run([*command, *map(str, first)], check=False).returncode]
        for group, process, output in beside:
            codes.append(process.wait())
            output.seek(0)
            print(f"--- beside it: {', '.join(group)}", flush=True)
            sys.stdout.buffer.write(output.read())
            sys.stdout.flush()
    finally:
        for _, process, output in beside:
            process.kill()
            output.close()
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
