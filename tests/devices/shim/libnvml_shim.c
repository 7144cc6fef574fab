/* A pretended libnvidia-ml.so.1, as far as sublet asks it. See shim_state.h for the settings, and:
 * SHIM_NVML_ERROR   number nvmlInit answers            SHIM_NO_ACCOUNTING  memory per process is "not available"
 * SHIM_MIG          index of a GPU divided by MIG      SHIM_LOST           index of a GPU that fell off the bus
 * SHIM_NO_MEMORY_V2 the driver is too old to tell what it reserves
 */
#include "shim_state.h"

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, FUNCTION_NOT_FOUND = 13, GPU_IS_LOST = 15 };

#define RESERVED (16ull << 20)

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } MemoryV2;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } Process;

static int started;
static int gpus[MAX_GPUS];

#define ALIVE()                                       \
    do {                                              \
        if (!started) {                               \
            report("FAULT NVML is not initialised");  \
            return UNINITIALIZED;                     \
        }                                             \
    } while (0)

static int index_of(void *handle) { return (int)((int *)handle - gpus); }
static int is_lost(int gpu) { return getenv("SHIM_LOST") && (int)setting("SHIM_LOST", 0) == gpu; }

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    int code = (int)setting("SHIM_NVML_ERROR", 0);
    if (code) return code;
    started++;
    report("nvmlInit");
    return SUCCESS;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    ALIVE();
    started--;
    return SUCCESS;
}

const char *nvmlErrorString(int code) {
    switch (code) {
    case SUCCESS: return "Success";
    case NOT_SUPPORTED: return "Not Supported";
    case NOT_FOUND: return "Not Found";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case GPU_IS_LOST: return "GPU is lost";
    default: return "Unknown Error";
    }
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    ALIVE();
    *count = (unsigned)gpu_count();
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    ALIVE();
    if ((int)index >= gpu_count()) return INVALID_ARGUMENT;
    if (is_lost((int)index)) return GPU_IS_LOST;
    *handle = &gpus[index];
    return SUCCESS;
}

static void uuid_text(int gpu, char *out, size_t size) {
    unsigned char u[16];
    gpu_uuid(gpu, u);
    snprintf(out, size, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1], u[2], u[3], u[4], u[5],
             u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    ALIVE();
    for (int i = 0; i < gpu_count(); i++) {
        char text[64];
        uuid_text(i, text, sizeof text);
        if (strcmp(text, uuid) == 0) {
            if (is_lost(i)) return GPU_IS_LOST;
            *handle = &gpus[i];
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}

int nvmlDeviceGetIndex(void *handle, unsigned *index) {
    ALIVE();
    *index = (unsigned)index_of(handle);
    return SUCCESS;
}

int nvmlDeviceGetUUID(void *handle, char *out, unsigned size) {
    ALIVE();
    uuid_text(index_of(handle), out, size);
    return SUCCESS;
}

int nvmlDeviceGetName(void *handle, char *out, unsigned size) {
    ALIVE();
    snprintf(out, size, "Shim GPU %d", index_of(handle));
    return SUCCESS;
}

int nvmlDeviceGetMigMode(void *handle, unsigned *now, unsigned *pending) {
    ALIVE();
    if (!getenv("SHIM_MIG")) return NOT_SUPPORTED;
    *now = *pending = (int)setting("SHIM_MIG", 0) == index_of(handle);
    return SUCCESS;
}

static uint64_t used_on(int gpu) {
    Held held[MAX_HELD];
    uint64_t used = 0;
    int lock = lock_state();
    for (int i = 0, n = who_holds(gpu, held); i < n; i++) used += held[i].bytes;
    close(lock);
    return used;
}

int nvmlDeviceGetMemoryInfo(void *handle, Memory *out) {
    ALIVE();
    uint64_t used = used_on(index_of(handle));
    *out = (Memory){gpu_bytes() + RESERVED, gpu_bytes() - used, used + RESERVED};
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(void *handle, MemoryV2 *out) {
    ALIVE();
    if (getenv("SHIM_NO_MEMORY_V2")) return FUNCTION_NOT_FOUND;
    uint64_t used = used_on(index_of(handle));
    *out = (MemoryV2){out->version, gpu_bytes() + RESERVED, RESERVED, gpu_bytes() - used, used};
    return SUCCESS;
}

/* Power is not measured by every GPU: this one has no sensor for it. */
int nvmlDeviceGetUtilizationRates(void *handle, Utilization *out) {
    ALIVE();
    if (is_lost(index_of(handle))) return GPU_IS_LOST;
    *out = (Utilization){37 + (unsigned)index_of(handle), 11};
    return SUCCESS;
}

int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *out) {
    ALIVE();
    if (sensor != 0) return INVALID_ARGUMENT;
    *out = 61 + (unsigned)index_of(handle);
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned *out) {
    ALIVE();
    (void)handle;
    (void)out;
    return NOT_SUPPORTED;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, Process *out) {
    ALIVE();
    Held held[MAX_HELD];
    int lock = lock_state();
    unsigned n = 0, room = *count;
    for (int i = 0, all = who_holds(index_of(handle), held); i < all; i++)
        if (held[i].alive) held[n++] = held[i]; /* what the dead left is in the device's own figure only */
    close(lock);
    *count = n;
    if (n > room || (n && !out)) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < n; i++) {
        unsigned long long bytes = getenv("SHIM_NO_ACCOUNTING") ? ~0ull : held[i].bytes;
        out[i] = (Process){(unsigned)held[i].pid, bytes, ~0u, ~0u};
    }
    return SUCCESS;
}
