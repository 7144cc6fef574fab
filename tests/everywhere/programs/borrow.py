"""`on_gpu`, `lease.run` and a GpuSession, as a script uses them."""

import hashlib
import json

import sublet

HOST = """
def add_one(grid, count, data):
    words = data.cast("I")
    for i in range(count):
        words[i] += 1
"""
OPENCL = "__kernel void add_one(uint count, __global uint* data) { for (uint i = 0; i < count; i++) data[i] += 1; }"


@sublet.on_gpu(vram="64MiB", ttl="1m")
def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()


print(json.dumps({"mapped": list(digest.map(["one", "two", "three"]))}))
with sublet.gpu(vram="64MiB", ttl="1m", holder="worker") as lease:
    print(json.dumps({"summed": lease.run(sum, range(1000))}))
    with lease.open() as gpu:
        data = gpu.alloc(4096)
        gpu.write(data, bytes(4096))
        module = gpu.load(OPENCL if "opencl" in lease.devices[0] else HOST)
        for _ in range(3):
            gpu.launch(module, "add_one", args=[sublet.u32(1024), data])
        gpu.sync()
        print(json.dumps({"added": hashlib.sha256(gpu.read(data)).hexdigest()}))
