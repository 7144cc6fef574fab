"""`python -m sublet.studio.attendant`: started by the service, not by people."""

from __future__ import annotations

import sys

from sublet.studio.attendant.process import main

sys.exit(main())
