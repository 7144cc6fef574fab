"""Batch inference on Spot VMs: a folder of images, a queue of their names, workers that die in the middle; each result is stored once.

Run without arguments it plays everything: it makes the images, puts their names into a queue, starts two workers, kills one with no warning at all, sends
the other SIGTERM in the middle of a batch as Kubernetes does when the node goes, and starts two new ones as rescheduled pods would be.
    python examples/gke_batch_inference.py
In a cluster each pod runs one worker, `sublet work images gke_batch_inference.py:Classifier --vram 8GB --batch 16`, with the images in a bucket or on a
shared disk, and a PostgreSQL ledger that outlives the node: SUBLET_LEDGER=postgresql://... More pods are more speed; nothing else changes.
"""

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

IMAGES, SIDE, BATCH = 64, 16, 8


# --- what a worker does: this class lives in the leased process, as long as the lease does ---------------------


class Classifier:
    def setup(self) -> None:
        self.model = make_model()  # once per lease; a real one loads its weights to the GPU here

    def process(self, paths: list[str]) -> list[dict]:
        time.sleep(0.1 * len(paths))  # a model that takes a moment, so that there is a middle to be hit in
        return classify(self.model, paths)


def make_model():
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, stride=2), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(10)
    ).eval()


def classify(model, paths: list[str]) -> list[dict]:
    import torch

    with torch.inference_mode():
        sure = model(torch.stack([read_image(path) for path in paths])).softmax(1)
    # What is returned goes into the ledger: texts and numbers, not tensors.
    return [{"label": int(row.argmax()), "sure": float(row.max())} for row in sure]


def read_image(path: str):
    import torch

    data = Path(path).read_bytes()
    kind, size, _, pixels = data.split(b"\n", 3)
    if kind != b"P6":
        raise ValueError(f"{Path(path).name} is not an image")
    width, height = map(int, size.split())
    flat = torch.frombuffer(bytearray(pixels), dtype=torch.uint8)
    return flat.reshape(height, width, 3).permute(2, 0, 1) / 255


# --- what plays the cluster -----------------------------------------------------------------------------------


def make_images(folder: Path) -> list[str]:
    import torch

    torch.manual_seed(1)
    for number in range(IMAGES):
        pixels = torch.randint(0, 256, (SIDE, SIDE, 3), dtype=torch.uint8)
        header = f"P6\n{SIDE} {SIDE}\n255\n".encode()
        (folder / f"{number:03}.ppm").write_bytes(header + bytes(pixels.flatten().tolist()))
    (folder / "broken.ppm").write_bytes(b"this\nis\nno\nimage")
    return sorted(str(path) for path in folder.glob("*.ppm"))


def worker(*options: str) -> subprocess.Popen:
    """One pod. The visibility is long on purpose: nothing below waits for it."""
    words = ["work", "images", f"{__file__}:Classifier", "--vram", "64MiB", "--batch", str(BATCH)]
    return subprocess.Popen([sys.executable, "-m", "sublet", *words, "--visibility", "10m", *options])


def play(folder: Path) -> None:
    import sublet

    paths = make_images(folder)
    queue = sublet.queue("images", tries=2, backoff="100ms")
    queue.publish(paths, key=str)
    again = queue.publish(paths, key=str)
    print(
        f"--- {len(paths)} names are in the queue; published again, {again.duplicates} of them are duplicates"
    )

    first, second = worker("--grace", "1s"), worker("--grace", "1s")
    while queue.stats().done < 2 * BATCH or queue.stats().workers < 2:
        time.sleep(0.02)
    first.kill()
    first.wait()
    print("--- the first node died without a word: kill -9, in the middle of a batch", flush=True)
    second.send_signal(signal.SIGTERM)
    code = second.wait()
    now = queue.stats()
    print(
        f"--- the second node was reclaimed: SIGTERM, and it left with exit code {code}: told to go, nothing lost"
    )
    print(
        f"--- {now.done} done, {now.ready} to be had at once, {now.leased} still with the dead worker",
        flush=True,
    )

    pods = [worker("--until-empty") for _ in range(2)]
    assert [pod.wait() for pod in pods] == [0, 0]

    results = {result.body: result.value for result in queue.results()}
    stats = queue.stats()
    assert len(results) == stats.done == stats.completed == IMAGES, stats
    images = [path for path in paths if not path.endswith("broken.ppm")]
    for path, direct in zip(images, classify(make_model(), images), strict=True):
        assert results[path]["label"] == direct["label"]
        assert abs(results[path]["sure"] - direct["sure"]) < 1e-5
    print(
        f"--- {IMAGES} images, each result stored once, over four workers; a direct computation says the same"
    )
    (dead,) = queue.dead()
    print(f"--- 1 item is dead after {dead.failures} tries: {dead.error.strip().splitlines()[-1]}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        play(Path(folder))
