"""`python -m sublet.studio.holder`: started by the service, not by people."""

from __future__ import annotations

import sys

from sublet.studio.holder.process import main

sys.exit(main())
