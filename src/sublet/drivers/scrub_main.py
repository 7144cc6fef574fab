"""`python -m sublet.drivers.scrub_main DRIVER DEVICE ORDINAL BYTES`: overwrite free memory of a device, in a process of its own.

A warden must not open devices itself: a context it holds would be in use on every device it watches. Prints how many bytes.
"""

from __future__ import annotations

import sys

from sublet.core.errors import SubletError
from sublet.drivers.opening import installed_drivers


def main(arguments: list[str]) -> int:
    name, device_id, ordinal, size = arguments
    try:
        print(installed_drivers()[name].scrub(device_id, int(ordinal), int(size)))
    except SubletError as e:
        print(e.message, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
