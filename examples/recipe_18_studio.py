"""Three tenants, one GPU, one studio: who gets it, who waits, who is interrupted, and who pays what.

It starts a studio of its own on this machine (no GPU needed: the device is made of ordinary memory), plays three people who use it at
the same time, kills the service in the middle with `kill -9`, and prints what happened. It takes about half a minute.
    python examples/recipe_18_studio.py
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import sublet

BEGAN = time.monotonic()
#: As in sublet.toml, but short: a play of half a minute cannot wait as long as people should be given.
POLICY = """
[policy]
min_run = "3s"   # a spot lease is left alone for so long
grace = "3s"     # from the warning to the end
"""


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:5.1f} s  {text}", flush=True)


# --- the operator's side: one machine, one service -----------------------------------------------------------


class Service:
    """`sublet serve`, started again on the same port after it was killed."""

    def __init__(self) -> None:
        self.port = 0
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "sublet", "serve", "--port", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[-1]
        self.port = int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def command(*words: str) -> str:
    """What the operator types: `sublet tenant add ann`."""
    done = subprocess.run(
        [sys.executable, "-m", "sublet", *words], capture_output=True, text=True, check=True
    )
    return done.stdout


def token_of(tenant: str) -> str:
    command("tenant", "add", tenant)
    return json.loads(command("tenant", "token", "add", tenant, "--json"))["token"]


# --- the users' side: an address and a token -----------------------------------------------------------------


def count_to(number: int) -> int:
    """Something that takes a while, and says how far it is."""
    import time

    for i in range(1, number + 1):
        print(f"           (ben's function, in the studio: {i} of {number})", flush=True)
        time.sleep(0.5)
    return number


def becomes(session: sublet.Session, *wanted: str) -> None:
    while session.look(wait=1.0).status not in wanted:
        pass


def play(service: Service) -> None:
    command("price", "set", "host", "36.00")  # a cent a second; spot for a quarter of it
    command("price", "set", "host", "9.00", "--tier", "spot")
    ann, ben, cem = (sublet.connect(service.url, token_of(name)) for name in ("ann", "ben", "cem"))
    say(f"a studio with one GPU of 16 GiB serves three tenants: {ann.tenant}, {ben.tenant} and {cem.tenant}")

    # 1. Ann is first.
    ann_session = ann.session(vram="8GiB", ttl="20s", warm="5s", name="ann's notebook").wait_until_active()
    ann_session.run_code("x = 6 * 7")
    say("ann asked for 8 GiB and has them: her code runs in a process of its own in the studio")

    # 2. Ben needs more than is free.
    ben_session = ben.session(vram="12GiB", ttl="1m", name="ben's training")
    becomes(ben_session, "waiting")
    wait = ben_session.look().wait
    assert wait is not None
    eta = f"in about {wait.eta_us / 1e6:.0f} s" if wait.eta_us is not None else "at an unknown time"
    say(f"ben asked for 12 GiB and waits: place {wait.position}, {eta} at the latest ({wait.reason})")

    # 3. Cem takes less, and takes it as spot: cheaper, and the first to go.
    cem_session = cem.session(
        vram="12GiB", ttl="1m", tier="spot", offers=True, checkpoint="cem", name="cem's try"
    )
    becomes(cem_session, "offered", "active")
    offer = cem_session.offer
    if offer is not None:
        say(
            f"cem asked for 12 GiB of spot and was offered {offer.vram_bytes >> 30} GiB now instead; he took them"
        )
        cem_session.accept()
    cem_session.wait_until_active()
    cem_session.run_code("import sublet\nsublet.save({'step': 1});")
    say("cem saved his work (step 1) and computes on")
    computing = threading.Thread(target=keep_computing, args=(cem_session,), daemon=True)
    computing.start()

    # 4. Ann goes for coffee.
    say("ann does nothing any more; her GPU is kept warm for 5 s …")
    becomes(ann_session, "suspended")
    say(f"… and is given back, because nobody used it ({ann_session.facts.why})")

    # 5. Ben is next, and cem's spot lease is in his way.
    becomes(cem_session, "revoking", "suspended")
    say(f"cem's spot lease is taken for ben, with a warning first: {cem_session.facts.why}")
    ben_session.wait_until_active()
    say(f"ben has his {ben_session.vram_bytes >> 30} GiB")
    computing.join(20)

    # 6. The service dies. Sessions are held by another process, and calls are taken up where they were.
    found: list[int] = []
    calling = threading.Thread(target=lambda: found.append(ben_session.run(count_to, 8)))
    calling.start()
    time.sleep(1.5)
    service.kill()
    say("the service was killed (kill -9) in the middle of ben's function")
    time.sleep(1.0)
    service.start()
    say("the service is back; ben's program noticed nothing")
    calling.join()
    say(f"ben's function returned {found[0]}: every line once, nothing lost, nothing run twice")

    # 7. Cem comes back when there is room.
    ben_session.end()
    cem_session.resume().wait_until_active(on_offer=lambda offer: False)  # this time he waits for all 12 GiB
    state = cem_session.saved()
    say(f"ben is done; cem resumed, and finds what he saved: {state}")
    cem_session.end()
    ann_session.end()

    # 8. The bill.
    time.sleep(1.0)
    say("the bill:")
    print("           tenant   GPU seconds   waited   refunded       cost")
    for studio in (ann, ben, cem):
        (row,) = studio.usage(by="tenant")
        print(
            f"           {studio.tenant:<8} {row['gpu_seconds']:>10.1f} {row['wait_seconds']:>8.1f} "
            f"{row['refund_seconds']:>10.1f} {float(row['cost'] or 0):>10.2f}"
        )


def keep_computing(session: sublet.Session) -> None:
    """Until the lease is taken; what was not saved since is refunded."""
    try:
        session.run_code("import time\nwhile True: time.sleep(0.1)")
    except sublet.LeaseLost:
        pass


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="sublet-") as folder:
        os.environ.setdefault("SUBLET_HOME", folder)
        os.environ |= {"SUBLET_DEVICES": "host:1x16GiB", "SUBLET_PRELOAD": "none"}
        os.environ.setdefault("SUBLET_ISOLATION", "none")  # ann, ben and cem trust each other on any machine
        home = Path(os.environ["SUBLET_HOME"])
        home.mkdir(parents=True, exist_ok=True)
        (home / "sublet.toml").write_text(POLICY)
        service = Service()
        try:
            play(service)
        finally:
            service.process.terminate()
            service.process.wait()
            leave(home)


def leave(home: Path) -> None:
    """The warden, the session host and the warm processes would leave when nobody needs them; this home is removed now. Each keeps its
    number in a lock file."""
    for lock in home.rglob("*.lock"):
        number = lock.read_text().split()[:1]
        if number and number[0].isdigit() and os.path.exists(f"/proc/{number[0]}"):
            os.kill(int(number[0]), signal.SIGTERM)


if __name__ == "__main__":
    main()
