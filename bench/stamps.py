"""When a starting run passes which point, told once, after its first step. Imports nothing at first: a cold start is measured with it."""

import json
import os
import time


class Stamps:
    """Monotonic seconds by name. What `sublet.train` does inside is seen by wrapping its parts."""

    def __init__(self, path, begun=None):  # type: ignore[no-untyped-def]
        self.path = path
        self.at = {"begun": time.monotonic() if begun is None else begun}
        self.lease = ""

    def mark(self, name):  # type: ignore[no-untyped-def]
        self.at[name] = time.monotonic()

    def watch_train(self):  # type: ignore[no-untyped-def]
        import sublet.training.train as training
        from sublet.leases.request import GpuRequest
        from sublet.training.loop import Run

        self._wrap(training, "open_notice_bus", "notices")
        self._wrap(GpuRequest, "hold", "lease")
        self._wrap(Run, "_own", "owned")
        self._wrap(Run, "resume", "restored")

    def _wrap(self, owner, name, stamp):  # type: ignore[no-untyped-def]
        real = getattr(owner, name)

        def wrapped(*args, **options):  # type: ignore[no-untyped-def]
            answer = real(*args, **options)
            self.mark(stamp)
            if stamp == "lease":
                self.lease = answer.id
            return answer

        setattr(owner, name, wrapped)

    def tell(self):  # type: ignore[no-untyped-def]
        with open(f"{self.path}.part", "w") as file:
            json.dump({"at": self.at, "lease": self.lease}, file)
        os.rename(f"{self.path}.part", self.path)
