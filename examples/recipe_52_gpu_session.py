"""One training step on a leased GPU, by hand: load code, move a batch, launch, read back, leave nothing behind.

Runs anywhere: an NVIDIA GPU takes the PTX, any other the OpenCL C; on a machine without a GPU the device is PoCL (OpenCL on the CPU)
if it is installed, else the host driver.
    python examples/recipe_52_gpu_session.py
"""

import sublet

OPENCL = """
__kernel void train_step(ulong step, uint n, __global uchar* batch) {
    uint i = get_global_id(0);
    if (i < n) batch[i] = (uchar)(batch[i] + step);
}
"""
PYTHON = """
def train_step(grid, step, n, batch):
    for i in range(n):
        batch[i] = (batch[i] + step) % 256
"""
PTX = """
.version 7.0
.target sm_50
.address_size 64

.visible .entry train_step(.param .u64 step, .param .u32 n, .param .u64 batch)
{
    .reg .pred %outside;
    .reg .b16  %byte, %by;
    .reg .b32  %i, %n, %block, %threads;
    .reg .b64  %at, %offset, %step;

    mov.u32             %block, %ctaid.x;
    mov.u32             %threads, %ntid.x;
    mov.u32             %i, %tid.x;
    mad.lo.u32          %i, %block, %threads, %i;   // the byte that is this thread's
    ld.param.u32        %n, [n];
    setp.ge.u32         %outside, %i, %n;
    @%outside ret;

    ld.param.u64        %at, [batch];
    cvta.to.global.u64  %at, %at;
    cvt.u64.u32         %offset, %i;
    add.u64             %at, %at, %offset;
    ld.param.u64        %step, [step];
    cvt.u16.u64         %by, %step;
    ld.global.u8        %byte, [%at];
    add.u16             %byte, %byte, %by;
    st.global.u8        [%at], %byte;
    ret;
}
"""


def main() -> None:
    with sublet.gpu(vram="16MiB", ttl="2m", exclusivity="session") as lease:
        device = lease.devices[0]
        source = OPENCL if "opencl" in device else PYTHON if "-host" in device else PTX
        print(f"leased {device} (lease {lease.id}, epoch {lease.epoch})")
        with lease.open() as gpu:
            batch = gpu.alloc(4)
            gpu.write(batch, bytes([1, 2, 3, 4]))
            module = gpu.load(source)
            gpu.launch(
                module, "train_step", grid=(4,), block=(1,), args=[sublet.u64(42), sublet.u32(4), batch]
            )
            spent = gpu.sync()
            result = gpu.read(batch)
            gpu.unload(module)
            gpu.free(batch)
        print(f"step 42 done: {list(result)}, {spent} us on the device")
        assert result == bytes([43, 44, 45, 46])
    print("released: nothing is left on the device")


if __name__ == "__main__":
    main()
