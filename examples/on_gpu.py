"""Functions on a borrowed GPU: called like any other, run in a leased worker, safe to lose.

Runs anywhere; without a GPU the "GPU" is a slice of this machine's memory.
    python examples/on_gpu.py
"""

import os
import time

import sublet

loaded = None  # in the worker: what the first call loaded stays there for the next


@sublet.on_gpu(vram="1GiB", ttl="1m")
def embed(words: list[str]) -> tuple[list[int], bool]:
    global loaded
    cold = loaded is None
    if cold:
        print(f"loading the model in process {os.getpid()} of the worker")
        loaded = dict(enumerate("abcdefghijklmnopqrstuvwxyz"))
    return [sum(map(ord, word)) % 97 for word in words], cold


@sublet.on_gpu(vram="1GiB", ttl=lambda seconds: 10 + seconds, batch=16)
def square(number: int) -> int:
    return number * number


@sublet.on_gpu(vram="1GiB", ttl="1m")
def crash() -> None:
    os._exit(3)


def main() -> None:
    print("first call:", embed(["leased", "never", "owned"]))
    begun = time.perf_counter()
    print("second call, warm:", embed(["leased"]), f"in {(time.perf_counter() - begun) * 1000:.1f} ms")
    print("many small calls, 16 a trip:", sum(square.map(range(100))))
    try:
        crash()
    except sublet.WorkerLost as lost:
        print("lost:", lost.message)
    print("called again, a new worker:", embed(["again"]))
    assert loaded is None  # this process's own variable was never touched


if __name__ == "__main__":
    main()
