"""`python -m sublet.devices.scrub_main DRIVER DEVICE ORDINAL BYTES` overwrites free memory and prints how
many bytes.

It is a process of its own because a warden must not open devices: its contexts would use memory on every
device.
"""

from __future__ import annotations

import sys

from sublet.core.errors import SubletError
from sublet.devices.opening import installed_drivers


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
