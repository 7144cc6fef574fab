// The kernels libcuda_shim.c knows by name. kernels.ptx was made from this by NVRTC; test_cuda.py holds the two together.
// On a real GPU they do what the shim's C functions do, for any grid and block.

#define EACH(i, n) unsigned int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x

extern "C" __global__ void train_step(unsigned long long step, unsigned int n, unsigned char *buf) {
    for (EACH(i, n)) buf[i] += (unsigned char)step;
}

extern "C" __global__ void saxpy(unsigned int n, float a, const float *x, float *y) {
    for (EACH(i, n)) y[i] += a * x[i];
}

extern "C" __global__ void fill64(double v, unsigned int n, double *out) {
    for (EACH(i, n)) out[i] = v;
}

extern "C" __global__ void ramp(int by, long long base, unsigned int n, long long *out) {
    for (EACH(i, n)) out[i] = base + (long long)by * i;
}

struct __attribute__((packed)) Mixed {
    unsigned int a;
    unsigned long long b;
    int c, gap;
    float d;
    double e;
};

extern "C" __global__ void mixed(unsigned int a, unsigned long long b, int c, float d, double e, Mixed *out) {
    *out = Mixed{a, b, c, 0, d, e};
}

extern "C" __global__ void count(unsigned int *out) { atomicAdd(out, 1u); }

extern "C" __global__ void nothing() {}

struct Pair {
    double first;
    int second;
};

extern "C" __global__ void takes_pair(Pair pair, double *out) { out[0] = pair.first + pair.second; }
