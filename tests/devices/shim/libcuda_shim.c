/* A pretended libcuda.so.1: strict about what a real driver would let pass or crash on, and able to run a few kernels on the host.
 *
 * It is not an emulator. A module's PTX is read for its `.entry` signatures only; kernels with well-known names and signatures are
 * run by C functions below, all others are recorded and do nothing. A line "FAULT …" in SHIM_LOG is a call a correct program does
 * not make (wrong order, dead handle, bad argument); "launch …" is what the device read; "leak …" is what a context was destroyed
 * with. Device addresses are not host addresses: using one as the other is noticed. Memory is given out as the last owner left it.
 *
 * A "cubin" is the ELF magic followed by PTX text. One call at a time: several threads may take turns, not race.
 *
 * Settings, beside those of shim_state.h:
 * SHIM_REVERSED  CUDA counts the GPUs from the other end, as it may      SHIM_HIDE       index of a GPU CUDA does not show
 * SHIM_WEDGE     name of a kernel that never ends                        SHIM_CRASH      name of a kernel that hits a bad address
 * SHIM_KERNEL_US device time of a kernel, default 50                     SHIM_INIT_ERROR number cuInit answers
 * SHIM_PTX_MAX   newest PTX version taken, as 100 * major + minor        SHIM_OLD        no functions of CUDA 12.4 and later
 * SHIM_CTX_ERROR number cuCtxCreate answers
 */
#define _GNU_SOURCE
#include "shim_state.h"

#include <ctype.h>
#include <sys/mman.h>
#include <time.h>

enum {
    SUCCESS = 0, INVALID_VALUE = 1, NO_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201, INVALID_PTX = 218, UNSUPPORTED_PTX = 222, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
};

#define MAX_PARAMS 32
#define MAX_ENTRIES 32
#define MAX_ALLOCS 4096
#define MAX_HANDLES 8192
#define MAX_DEPTH 16
#define GRAIN 256 /* what memory is given out in */
#define MAGIC 0x5ca1ab1e

typedef unsigned long long DevicePtr;

typedef struct { char type; int size; int is_pointer; int count; } Param;
typedef struct { char name[128]; int params; Param param[MAX_PARAMS]; } Entry;

/* Handles are never reused, so a dead one is always recognised. */
typedef enum { CONTEXT = 1, MODULE, FUNCTION, EVENT } Kind;
typedef struct Handle {
    unsigned magic;
    Kind kind;
    int alive;
    struct Handle *owner; /* the context, or a function's module */
    int gpu, wedged, broken;
    int64_t busy_until_us; /* context: when its stream is empty; event: when it was reached */
    int recorded;
    int entries;
    Entry *entry;
} Handle;

typedef struct { DevicePtr at; size_t size; uint64_t offset; unsigned char *host; Handle *context; int alive; } Alloc;

static int initialised;
static Handle *handles[MAX_HANDLES];
static int handle_count;
static Alloc allocs[MAX_ALLOCS];
static int alloc_count;
static DevicePtr next_address = 0x0dead0000000ull;
static __thread Handle *stack[MAX_DEPTH];
static __thread int depth;

static int64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static Handle *new_handle(Kind kind, Handle *owner) {
    if (handle_count == MAX_HANDLES) abort();
    Handle *h = calloc(1, sizeof *h);
    *h = (Handle){.magic = MAGIC, .kind = kind, .alive = 1, .owner = owner, .gpu = owner ? owner->gpu : 0};
    return handles[handle_count++] = h;
}

static Handle *find(void *handle, Kind kind, const char *verb) {
    for (int i = 0; i < handle_count; i++)
        if (handles[i] == handle) {
            if (handles[i]->kind != kind) {
                report("FAULT %s: the handle is of another kind", verb);
                return NULL;
            }
            if (!handles[i]->alive) {
                report("FAULT %s: the handle was destroyed", verb);
                return NULL;
            }
            return handles[i];
        }
    report("FAULT %s: no such handle", verb);
    return NULL;
}

#define INITIALISED(verb)                                \
    do {                                                 \
        if (!initialised) {                              \
            report("FAULT %s before cuInit", verb);      \
            return NOT_INITIALIZED;                      \
        }                                                \
    } while (0)

/* The current context, which every verb below this line needs. */
#define CURRENT(verb)                                            \
    INITIALISED(verb);                                           \
    if (!depth || !stack[depth - 1]) {                           \
        report("FAULT %s without a current context", verb);      \
        return INVALID_CONTEXT;                                  \
    }                                                            \
    Handle *ctx = stack[depth - 1];                              \
    if (!ctx->alive) {                                           \
        report("FAULT %s in a destroyed context", verb);         \
        return INVALID_CONTEXT;                                  \
    }                                                            \
    if (ctx->broken) return ILLEGAL_ADDRESS

#define OWNED(handle, verb)                                              \
    do {                                                                 \
        if ((handle)->owner != ctx) {                                    \
            report("FAULT %s: the handle is of another context", verb);  \
            return INVALID_HANDLE;                                       \
        }                                                                \
    } while (0)

/* What a real driver does when it is asked to wait for a kernel that never ends. */
static void drain(Handle *ctx) {
    while (ctx->wedged) pause();
    int64_t left = ctx->busy_until_us - now_us();
    if (left > 0) usleep((useconds_t)left);
}

/* Is this memory of ours readable? Asking the kernel is better than crashing. */
static int readable(const void *at, size_t size) {
    static int ends[2] = {-1, -1};
    char sink[256];
    if (ends[0] < 0 && pipe2(ends, O_CLOEXEC)) abort();
    if (size > sizeof sink || write(ends[1], at, size) != (ssize_t)size) return 0;
    return read(ends[0], sink, size) == (ssize_t)size;
}

/* errors */

static const struct { int code; const char *name, *text; } words[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {NO_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {INVALID_PTX, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {UNSUPPORTED_PTX, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the provided PTX was compiled with an unsupported toolchain."},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
};

static int words_for(int code, const char **out, int text) {
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (words[i].code == code) {
            *out = text ? words[i].text : words[i].name;
            return SUCCESS;
        }
    *out = NULL;
    return INVALID_VALUE;
}
static int s_cuGetErrorName(int code, const char **out) { return words_for(code, out, 0); }
static int s_cuGetErrorString(int code, const char **out) { return words_for(code, out, 1); }

/* devices */

static int s_cuInit(unsigned flags) {
    int code = (int)setting("SHIM_INIT_ERROR", 0);
    if (code) return code;
    if (flags) return INVALID_VALUE;
    initialised = 1;
    report("cuInit");
    return SUCCESS;
}

static int s_cuDriverGetVersion(int *out) {
    *out = 13000;
    return SUCCESS;
}

/* CUDA's number to the GPU. */
static int gpu_of(int device) {
    for (int i = 0, seen = 0; i < gpu_count(); i++) {
        int gpu = getenv("SHIM_REVERSED") ? gpu_count() - 1 - i : i;
        if (getenv("SHIM_HIDE") && (int)setting("SHIM_HIDE", 0) == gpu) continue;
        if (seen++ == device) return gpu;
    }
    return -1;
}

static int s_cuDeviceGetCount(int *out) {
    INITIALISED("cuDeviceGetCount");
    *out = gpu_count() - (getenv("SHIM_HIDE") ? 1 : 0);
    return SUCCESS;
}

static int s_cuDeviceGet(int *out, int ordinal) {
    INITIALISED("cuDeviceGet");
    if (gpu_of(ordinal) < 0) return INVALID_DEVICE;
    *out = ordinal;
    return SUCCESS;
}

static int s_cuDeviceGetUuid(unsigned char *out, int device) {
    INITIALISED("cuDeviceGetUuid");
    gpu_uuid(gpu_of(device), out);
    return SUCCESS;
}

static int s_cuDeviceGetAttribute(int *out, int attribute, int device) {
    INITIALISED("cuDeviceGetAttribute");
    (void)device;
    if (attribute == 75) *out = 9; /* compute capability, major and minor */
    else if (attribute == 76) *out = 0;
    else return INVALID_VALUE;
    return SUCCESS;
}

/* contexts */

static int s_cuCtxCreate(Handle **out, void *params, unsigned flags, int device) {
    INITIALISED("cuCtxCreate");
    int code = (int)setting("SHIM_CTX_ERROR", 0);
    if (code) return code;
    if (params || flags > 0xff || gpu_of(device) < 0 || depth == MAX_DEPTH) {
        report("FAULT cuCtxCreate: params %p, flags %u, device %d", params, flags, device);
        return INVALID_VALUE;
    }
    Handle *ctx = new_handle(CONTEXT, NULL);
    ctx->gpu = gpu_of(device);
    *out = stack[depth++] = ctx;
    report("context on GPU %d", ctx->gpu);
    return SUCCESS;
}

static int s_cuCtxPushCurrent(void *handle) {
    INITIALISED("cuCtxPushCurrent");
    Handle *ctx = find(handle, CONTEXT, "cuCtxPushCurrent");
    if (!ctx || depth == MAX_DEPTH) return INVALID_CONTEXT;
    stack[depth++] = ctx;
    return SUCCESS;
}

static int s_cuCtxPopCurrent(Handle **out) {
    INITIALISED("cuCtxPopCurrent");
    if (!depth) {
        report("FAULT cuCtxPopCurrent with nothing to pop");
        return INVALID_CONTEXT;
    }
    Handle *ctx = stack[--depth];
    if (out) *out = ctx;
    return SUCCESS;
}

static int s_cuCtxSetCurrent(void *handle) {
    INITIALISED("cuCtxSetCurrent");
    if (depth) depth--;
    return handle ? s_cuCtxPushCurrent(handle) : SUCCESS;
}

static int s_cuCtxGetCurrent(Handle **out) {
    INITIALISED("cuCtxGetCurrent");
    *out = depth ? stack[depth - 1] : NULL;
    return SUCCESS;
}

static void save_held(int gpu);

static int s_cuCtxDestroy(void *handle) {
    INITIALISED("cuCtxDestroy");
    Handle *ctx = find(handle, CONTEXT, "cuCtxDestroy");
    if (!ctx) return INVALID_CONTEXT;
    drain(ctx);
    int buffers = 0, modules = 0, events = 0;
    for (int i = 0; i < alloc_count; i++)
        if (allocs[i].alive && allocs[i].context == ctx) {
            buffers++;
            allocs[i].alive = 0;
        }
    for (int i = 0; i < handle_count; i++)
        if (handles[i]->alive && handles[i]->owner == ctx) {
            modules += handles[i]->kind == MODULE;
            events += handles[i]->kind == EVENT;
            handles[i]->alive = 0;
        }
    if (buffers || modules || events) report("leak %d buffers %d modules %d events", buffers, modules, events);
    if (depth && stack[depth - 1] == ctx) depth--;
    ctx->alive = 0;
    save_held(ctx->gpu);
    report("context destroyed");
    return SUCCESS;
}

/* memory */

static uint64_t own_bytes(int gpu) {
    uint64_t bytes = 0;
    for (int i = 0; i < alloc_count; i++)
        if (allocs[i].alive && allocs[i].context->gpu == gpu) bytes += allocs[i].size;
    return bytes;
}

static void write_held(int gpu, uint64_t bytes) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%d-%d-%llu", getenv("SHIM_STATE"), gpu, (int)getpid(), start_time(getpid()));
    FILE *file = fopen(path, "we");
    if (!file) abort();
    fprintf(file, "%llu\n", (unsigned long long)bytes);
    for (int i = 0; i < alloc_count; i++)
        if (allocs[i].alive && allocs[i].context->gpu == gpu)
            fprintf(file, "%llu %llu\n", (unsigned long long)allocs[i].offset, (unsigned long long)allocs[i].size);
    fclose(file);
}

static void save_held(int gpu) {
    int lock = lock_state();
    write_held(gpu, own_bytes(gpu));
    close(lock);
}

typedef struct { uint64_t from, to; } Extent;

static int by_offset(const void *a, const void *b) {
    uint64_t x = ((const Extent *)a)->from, y = ((const Extent *)b)->from;
    return (x > y) - (x < y);
}

/* The lowest free bytes of a GPU that are enough, whoever had them before; -1 when there are none. The caller has the lock. */
static int64_t find_gap(int gpu, uint64_t size) {
    static Extent taken[MAX_ALLOCS];
    int count = 0;
    Held held;
    DIR *dir = opendir(getenv("SHIM_STATE"));
    for (FILE *file; (file = next_holder(dir, gpu, &held)); fclose(file)) {
        unsigned long long offset, bytes;
        while (fscanf(file, "%llu %llu", &offset, &bytes) == 2) {
            if (count == MAX_ALLOCS) abort();
            taken[count++] = (Extent){offset, (offset + bytes + GRAIN - 1) / GRAIN * GRAIN};
        }
    }
    qsort(taken, (size_t)count, sizeof *taken, by_offset);
    uint64_t at = 0;
    for (int i = 0; i < count && taken[i].from < at + size; i++)
        if (taken[i].to > at) at = taken[i].to;
    return at + size > gpu_bytes() || at + size < at ? -1 : (int64_t)at;
}

/* A GPU's memory, in this process. Its file is as long as what was ever given out; older use than that is told by 0xa5. */
static unsigned char *memory_of(int gpu, uint64_t needed) {
    static int file[MAX_GPUS];
    static unsigned char *at[MAX_GPUS];
    if (!at[gpu]) {
        char path[4096];
        snprintf(path, sizeof path, "%s/memory-%d", getenv("SHIM_STATE"), gpu);
        file[gpu] = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        at[gpu] = mmap(NULL, gpu_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, file[gpu], 0);
        if (file[gpu] < 0 || at[gpu] == MAP_FAILED) abort();
    }
    uint64_t size = (uint64_t)lseek(file[gpu], 0, SEEK_END);
    if (needed > size) {
        if (ftruncate(file[gpu], (off_t)needed)) abort();
        memset(at[gpu] + size, 0xa5, needed - size);
    }
    return at[gpu];
}

static int s_cuMemAlloc(DevicePtr *out, size_t size) {
    CURRENT("cuMemAlloc");
    if (!size) return INVALID_VALUE;
    int lock = lock_state();
    int64_t offset = find_gap(ctx->gpu, size);
    if (offset < 0 || alloc_count == MAX_ALLOCS) {
        close(lock);
        return NO_MEMORY;
    }
    unsigned char *host = memory_of(ctx->gpu, (uint64_t)offset + size) + offset;
    allocs[alloc_count++] = (Alloc){next_address, size, (uint64_t)offset, host, ctx, 1};
    *out = next_address;
    next_address += (size + 0x1ffff) & ~0xffffull; /* nothing adjoins anything */
    write_held(ctx->gpu, own_bytes(ctx->gpu));
    close(lock);
    return SUCCESS;
}

static int s_cuMemFree(DevicePtr at) {
    CURRENT("cuMemFree");
    drain(ctx);
    for (int i = 0; i < alloc_count; i++)
        if (allocs[i].at == at) {
            if (!allocs[i].alive || allocs[i].context != ctx) {
                report("FAULT cuMemFree: %s", allocs[i].alive ? "memory of another context" : "freed before");
                return INVALID_VALUE;
            }
            allocs[i].alive = 0;
            save_held(ctx->gpu);
            return SUCCESS;
        }
    report("FAULT cuMemFree: %llx was never allocated", at);
    return INVALID_VALUE;
}

/* The host memory behind `size` device bytes, or NULL. */
static unsigned char *room(Handle *ctx, DevicePtr at, size_t size, const char *verb) {
    for (int i = 0; i < alloc_count; i++)
        if (at >= allocs[i].at && at < allocs[i].at + allocs[i].size) {
            if (!allocs[i].alive) report("FAULT %s: the memory was freed", verb);
            else if (allocs[i].context != ctx) report("FAULT %s: memory of another context", verb);
            else if (at + size > allocs[i].at + allocs[i].size) report("FAULT %s: %zu bytes are out of range", verb, size);
            else return allocs[i].host + (at - allocs[i].at);
            return NULL;
        }
    report("FAULT %s: %llx is not device memory", verb, at);
    return NULL;
}

static int s_cuMemsetD8(DevicePtr at, unsigned char value, size_t size) {
    CURRENT("cuMemsetD8");
    unsigned char *host = room(ctx, at, size, "cuMemsetD8");
    if (!host) return INVALID_VALUE;
    memset(host, value, size);
    return SUCCESS;
}

static int s_cuMemcpyHtoD(DevicePtr to, const void *from, size_t size) {
    CURRENT("cuMemcpyHtoD");
    drain(ctx);
    unsigned char *host = room(ctx, to, size, "cuMemcpyHtoD");
    if (!host) return INVALID_VALUE;
    memcpy(host, from, size);
    return SUCCESS;
}

static int s_cuMemcpyDtoH(void *to, DevicePtr from, size_t size) {
    CURRENT("cuMemcpyDtoH");
    drain(ctx);
    unsigned char *host = room(ctx, from, size, "cuMemcpyDtoH");
    if (!host) return INVALID_VALUE;
    memcpy(to, host, size);
    return SUCCESS;
}

/* modules: PTX is read word by word; words are split at spaces and at ( ) [ ] , ; { } */

typedef struct { const char *at; char word[160]; } Reader;

static int next_word(Reader *r) {
    for (;;) {
        while (isspace((unsigned char)*r->at)) r->at++;
        if (r->at[0] == '/' && r->at[1] == '/') {
            while (*r->at && *r->at != '\n') r->at++;
        } else if (r->at[0] == '/' && r->at[1] == '*') {
            const char *end = strstr(r->at, "*/");
            r->at = end ? end + 2 : r->at + strlen(r->at);
        } else break;
    }
    if (!*r->at) return 0;
    size_t n = strcspn(r->at, " \t\r\n()[],;{}");
    if (!n) n = 1;
    if (n >= sizeof r->word) n = sizeof r->word - 1;
    memcpy(r->word, r->at, n);
    r->word[n] = 0;
    r->at += n;
    return 1;
}

static int read_params(Reader *r, Entry *entry) {
    Param *p = NULL;
    while (next_word(r) && strcmp(r->word, ")")) {
        int bits;
        char type;
        if (!strcmp(r->word, ".param")) {
            if (entry->params == MAX_PARAMS) return 0;
            p = &entry->param[entry->params++];
            *p = (Param){.count = 1};
        } else if (!p) return 0;
        else if (!strcmp(r->word, ".align")) next_word(r);
        else if (!strcmp(r->word, ".ptr")) p->is_pointer = 1;
        else if (!strcmp(r->word, "[")) {
            next_word(r);
            p->count = atoi(r->word);
        } else if (sscanf(r->word, ".%c%d", &type, &bits) == 2 && strchr("usbf", type)) {
            p->type = type;
            p->size = bits / 8;
        }
    }
    for (int i = 0; i < entry->params; i++) {
        if (!entry->param[i].size) return 0;
        entry->param[i].size *= entry->param[i].count;
    }
    return 1;
}

static int read_ptx(const char *text, Handle *module, char *why, size_t size) {
    Reader r = {.at = text};
    int major = 0, minor = 0, braces = 0;
    if (!next_word(&r) || strcmp(r.word, ".version") || !next_word(&r) || sscanf(r.word, "%d.%d", &major, &minor) != 2) {
        snprintf(why, size, "ptxas application ptx input, line 1; fatal   : Missing .version directive at start of file");
        return INVALID_PTX;
    }
    if ((uint64_t)(100 * major + minor) > setting("SHIM_PTX_MAX", 9999)) {
        snprintf(why, size, "ptxas application ptx input, line 1; fatal   : Unsupported .version %d.%d", major, minor);
        return UNSUPPORTED_PTX;
    }
    module->entry = calloc(MAX_ENTRIES, sizeof(Entry));
    while (next_word(&r)) {
        braces += !strcmp(r.word, "{");
        braces -= !strcmp(r.word, "}");
        if (strcmp(r.word, ".entry")) continue;
        Entry *entry = &module->entry[module->entries++];
        if (module->entries == MAX_ENTRIES || !next_word(&r)) return INVALID_PTX;
        snprintf(entry->name, sizeof entry->name, "%.127s", r.word);
        Reader ahead = r;
        if (next_word(&ahead) && !strcmp(ahead.word, "(")) {
            r = ahead;
            if (!read_params(&r, entry)) {
                snprintf(why, size, "ptxas application ptx input: parameters of %s not understood", entry->name);
                return INVALID_PTX;
            }
        }
    }
    if (braces) {
        snprintf(why, size, "ptxas application ptx input: fatal   : Parsing error near '': syntax error");
        return INVALID_PTX;
    }
    return SUCCESS;
}

static int s_cuModuleLoadDataEx(Handle **out, const char *image, unsigned n, const int *options, void **values) {
    CURRENT("cuModuleLoadDataEx");
    char why[512] = "";
    char *log = NULL;
    size_t log_size = 0;
    for (unsigned i = 0; i < n; i++) {
        if (options[i] == 5) log = values[i];
        if (options[i] == 6) log_size = (size_t)(uintptr_t)values[i];
    }
    int is_cubin = !memcmp(image, "\x7f" "ELF", 4);
    if (is_cubin && !strstr(image + 4, ".version")) {
        report("a cubin of a real compiler");
        return INVALID_IMAGE;
    }
    Handle *module = new_handle(MODULE, ctx);
    int code = read_ptx(is_cubin ? strstr(image + 4, ".version") : image, module, why, sizeof why);
    if (code) {
        module->alive = 0;
        if (log && log_size) snprintf(log, log_size, "%s", why);
        return code;
    }
    *out = module;
    return SUCCESS;
}

static int s_cuModuleLoadData(Handle **out, const char *image) { return s_cuModuleLoadDataEx(out, image, 0, NULL, NULL); }

static int s_cuModuleUnload(void *handle) {
    CURRENT("cuModuleUnload");
    drain(ctx);
    Handle *module = find(handle, MODULE, "cuModuleUnload");
    if (!module) return INVALID_HANDLE;
    OWNED(module, "cuModuleUnload");
    for (int i = 0; i < handle_count; i++)
        if (handles[i]->owner == module) handles[i]->alive = 0;
    module->alive = 0;
    return SUCCESS;
}

static Handle *function_of(Handle *module, Entry *entry) {
    Handle *function = new_handle(FUNCTION, module);
    function->entry = entry;
    return function;
}

static int s_cuModuleGetFunction(Handle **out, void *handle, const char *name) {
    CURRENT("cuModuleGetFunction");
    Handle *module = find(handle, MODULE, "cuModuleGetFunction");
    if (!module) return INVALID_HANDLE;
    OWNED(module, "cuModuleGetFunction");
    for (int i = 0; i < module->entries; i++)
        if (!strcmp(module->entry[i].name, name)) {
            *out = function_of(module, &module->entry[i]);
            return SUCCESS;
        }
    return NOT_FOUND;
}

static int s_cuModuleGetFunctionCount(unsigned *out, void *handle) {
    CURRENT("cuModuleGetFunctionCount");
    Handle *module = find(handle, MODULE, "cuModuleGetFunctionCount");
    if (!module) return INVALID_HANDLE;
    *out = (unsigned)module->entries;
    return SUCCESS;
}

static int s_cuModuleEnumerateFunctions(Handle **out, unsigned n, void *handle) {
    CURRENT("cuModuleEnumerateFunctions");
    Handle *module = find(handle, MODULE, "cuModuleEnumerateFunctions");
    if (!module) return INVALID_HANDLE;
    for (unsigned i = 0; i < n && (int)i < module->entries; i++) out[i] = function_of(module, &module->entry[i]);
    return SUCCESS;
}

static int s_cuFuncGetName(const char **out, void *handle) {
    CURRENT("cuFuncGetName");
    Handle *function = find(handle, FUNCTION, "cuFuncGetName");
    if (!function) return INVALID_HANDLE;
    *out = function->entry->name;
    return SUCCESS;
}

static int s_cuFuncGetParamInfo(void *handle, size_t place, size_t *offset, size_t *size) {
    CURRENT("cuFuncGetParamInfo");
    Handle *function = find(handle, FUNCTION, "cuFuncGetParamInfo");
    if (!function) return INVALID_HANDLE;
    if ((int)place >= function->entry->params) return INVALID_VALUE;
    size_t at = 0;
    for (size_t i = 0;; i++) {
        Param *p = &function->entry->param[i];
        size_t width = (size_t)(p->size / p->count);
        at = (at + width - 1) / width * width;
        if (i == place) {
            *offset = at;
            if (size) *size = (size_t)p->size;
            return SUCCESS;
        }
        at += (size_t)p->size;
    }
}

/* kernels */

typedef union { uint64_t u64; int64_t s64; uint32_t u32; int32_t s32; float f32; double f64; unsigned char raw[256]; } Value;

static int run_train_step(Handle *ctx, Value *v) {
    unsigned char *bytes = room(ctx, v[2].u64, v[1].u32, "train_step");
    if (!bytes) return ILLEGAL_ADDRESS;
    for (uint32_t i = 0; i < v[1].u32; i++) bytes[i] = (unsigned char)(bytes[i] + v[0].u64);
    return SUCCESS;
}

static int run_saxpy(Handle *ctx, Value *v) {
    float *x = (float *)room(ctx, v[2].u64, 4ull * v[0].u32, "saxpy"), *y = (float *)room(ctx, v[3].u64, 4ull * v[0].u32, "saxpy");
    if (!x || !y) return ILLEGAL_ADDRESS;
    for (uint32_t i = 0; i < v[0].u32; i++) y[i] += v[1].f32 * x[i];
    return SUCCESS;
}

static int run_fill64(Handle *ctx, Value *v) {
    double *out = (double *)room(ctx, v[2].u64, 8ull * v[1].u32, "fill64");
    if (!out) return ILLEGAL_ADDRESS;
    for (uint32_t i = 0; i < v[1].u32; i++) out[i] = v[0].f64;
    return SUCCESS;
}

static int run_ramp(Handle *ctx, Value *v) {
    int64_t *out = (int64_t *)room(ctx, v[3].u64, 8ull * v[2].u32, "ramp");
    if (!out) return ILLEGAL_ADDRESS;
    for (uint32_t i = 0; i < v[2].u32; i++) out[i] = v[1].s64 + (int64_t)v[0].s32 * i;
    return SUCCESS;
}

static int run_mixed(Handle *ctx, Value *v) {
    unsigned char *out = room(ctx, v[5].u64, 32, "mixed");
    if (!out) return ILLEGAL_ADDRESS;
    memcpy(out, v[0].raw, 4);
    memcpy(out + 4, v[1].raw, 8);
    memcpy(out + 12, v[2].raw, 4);
    memset(out + 16, 0, 4);
    memcpy(out + 20, v[3].raw, 4);
    memcpy(out + 24, v[4].raw, 8);
    return SUCCESS;
}

static uint32_t threads; /* of the launch that is running */

static int run_count(Handle *ctx, Value *v) {
    uint32_t *out = (uint32_t *)room(ctx, v[0].u64, 4, "count");
    if (!out) return ILLEGAL_ADDRESS;
    *out += threads;
    return SUCCESS;
}

/* Those of sublet's own self-test (drivers/selftest.py): each value in eight bytes of its own. */
static int run_kinds(Handle *ctx, Value *v) {
    unsigned char *out = room(ctx, v[5].u64, 40, "kinds");
    if (!out) return ILLEGAL_ADDRESS;
    memset(out, 0, 40);
    memcpy(out, v[0].raw, 4);
    memcpy(out + 8, v[1].raw, 8);
    memcpy(out + 16, v[2].raw, 4);
    memcpy(out + 24, v[3].raw, 8);
    memcpy(out + 32, v[4].raw, 4);
    return SUCCESS;
}

static int run_real64(Handle *ctx, Value *v) {
    unsigned char *out = room(ctx, v[1].u64, 8, "real64");
    if (!out) return ILLEGAL_ADDRESS;
    memcpy(out, v[0].raw, 8);
    return SUCCESS;
}

static int run_spin(Handle *ctx, Value *v) {
    unsigned char *out = room(ctx, v[1].u64, 8, "spin");
    if (!out) return ILLEGAL_ADDRESS;
    out[0] |= 1;
    ctx->busy_until_us += (int64_t)(v[0].u64 / 1000); /* a turn is a nanosecond */
    return SUCCESS;
}

/* `layout`: width and class of each parameter, p for a buffer. */
static const struct { const char *name, *layout; int (*run)(Handle *, Value *); } known[] = {
    {"train_step", "8u4u8p", run_train_step},
    {"saxpy", "4u4f8p8p", run_saxpy},
    {"fill64", "8f4u8p", run_fill64},
    {"ramp", "4u8u4u8p", run_ramp},
    {"mixed", "4u8u4u4f8f8p", run_mixed},
    {"count", "8p", run_count},
    {"kinds", "4u8u4u8u4f8p", run_kinds},
    {"real64", "8f8p", run_real64},
    {"spin", "8u8p", run_spin},
};

static int s_cuLaunchKernel(void *handle, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                            void *stream, void **params, void **extra) {
    CURRENT("cuLaunchKernel");
    Handle *function = find(handle, FUNCTION, "cuLaunchKernel");
    if (!function) return INVALID_HANDLE;
    OWNED(function->owner, "cuLaunchKernel");
    Entry *entry = function->entry;
    if (stream || extra || shared) {
        report("FAULT cuLaunchKernel: stream %p, extra %p, shared %u", stream, extra, shared);
        return INVALID_VALUE;
    }
    if (!gx || !gy || !gz || !bx || !by || !bz || gy > 65535 || gz > 65535 || (uint64_t)bx * by * bz > 1024 || bz > 64) return INVALID_VALUE;

    const char *layout = NULL;
    int (*run)(Handle *, Value *) = NULL;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(known[i].name, entry->name)) {
            layout = known[i].layout;
            run = known[i].run;
        }
    if (layout && (int)strlen(layout) != 2 * entry->params) layout = NULL;
    Value values[MAX_PARAMS];
    memset(values, 0, sizeof values);
    char line[900];
    int at = snprintf(line, sizeof line, "launch %s %u,%u,%u %u,%u,%u", entry->name, gx, gy, gz, bx, by, bz);
    if (entry->params && (!params || !readable(params, sizeof(void *) * (size_t)entry->params))) {
        report("FAULT cuLaunchKernel: kernelParams is not an array of %d pointers", entry->params);
        return INVALID_VALUE;
    }
    for (int i = 0; i < entry->params; i++) {
        Param *p = &entry->param[i];
        if (!readable(params[i], (size_t)p->size)) {
            report("FAULT cuLaunchKernel: parameter %d of %s does not point to %d bytes", i, entry->name, p->size);
            return INVALID_VALUE;
        }
        for (int j = 0; j < i; j++)
            if ((char *)params[i] < (char *)params[j] + entry->param[j].size && (char *)params[j] < (char *)params[i] + p->size) {
                report("FAULT cuLaunchKernel: parameters %d and %d of %s overlap", j, i, entry->name);
                return INVALID_VALUE;
            }
        memcpy(values[i].raw, params[i], (size_t)p->size);
        int is_pointer = p->is_pointer;
        if (layout) {
            if (p->size != layout[2 * i] - '0' || (p->type == 'f') != (layout[2 * i + 1] == 'f')) run = NULL;
            is_pointer |= layout[2 * i + 1] == 'p';
        }
        if (is_pointer && !room(ctx, values[i].u64, 1, entry->name)) return INVALID_VALUE;
        at += snprintf(line + at, sizeof line - (size_t)at, " %td:", (char *)params[i] - (char *)params[0]);
        for (int b = 0; b < p->size && at < 860; b++) at += snprintf(line + at, sizeof line - (size_t)at, "%02x", values[i].raw[b]);
    }
    report("%s", line);
    int64_t now = now_us();
    if (ctx->busy_until_us < now) ctx->busy_until_us = now;
    ctx->busy_until_us += (int64_t)setting("SHIM_KERNEL_US", 50);
    if (getenv("SHIM_WEDGE") && !strcmp(getenv("SHIM_WEDGE"), entry->name)) ctx->wedged = 1;
    if (getenv("SHIM_CRASH") && !strcmp(getenv("SHIM_CRASH"), entry->name)) ctx->broken = 1;
    threads = gx * gy * gz * bx * by * bz;
    if (layout && run && run(ctx, values)) ctx->broken = 1;
    return SUCCESS;
}

/* time */

static int s_cuStreamQuery(void *stream) {
    CURRENT("cuStreamQuery");
    if (stream) return INVALID_HANDLE;
    return ctx->wedged || ctx->busy_until_us > now_us() ? NOT_READY : SUCCESS;
}

static int s_cuEventCreate(Handle **out, unsigned flags) {
    CURRENT("cuEventCreate");
    if (flags) report("FAULT cuEventCreate: flags %u", flags);
    *out = new_handle(EVENT, ctx);
    return SUCCESS;
}

static int s_cuEventRecord(void *handle, void *stream) {
    CURRENT("cuEventRecord");
    Handle *event = find(handle, EVENT, "cuEventRecord");
    if (!event || stream) return INVALID_HANDLE;
    OWNED(event, "cuEventRecord");
    int64_t now = now_us();
    event->recorded = 1;
    event->wedged = ctx->wedged;
    event->busy_until_us = ctx->busy_until_us > now ? ctx->busy_until_us : now;
    return SUCCESS;
}

static int s_cuEventQuery(void *handle) {
    CURRENT("cuEventQuery");
    Handle *event = find(handle, EVENT, "cuEventQuery");
    if (!event) return INVALID_HANDLE;
    OWNED(event, "cuEventQuery");
    return event->recorded && (event->wedged || event->busy_until_us > now_us()) ? NOT_READY : SUCCESS;
}

static int s_cuEventElapsedTime(float *out, void *from, void *to) {
    CURRENT("cuEventElapsedTime");
    Handle *a = find(from, EVENT, "cuEventElapsedTime"), *b = find(to, EVENT, "cuEventElapsedTime");
    if (!a || !b) return INVALID_HANDLE;
    if (!a->recorded || !b->recorded) {
        report("FAULT cuEventElapsedTime of an event that was not recorded");
        return INVALID_HANDLE;
    }
    if (b->wedged || b->busy_until_us > now_us()) return NOT_READY;
    *out = (float)(b->busy_until_us - a->busy_until_us) / 1000.0f;
    return SUCCESS;
}

static int s_cuEventDestroy(void *handle) {
    INITIALISED("cuEventDestroy");
    Handle *event = find(handle, EVENT, "cuEventDestroy");
    if (!event) return INVALID_HANDLE;
    event->alive = 0;
    return SUCCESS;
}

/* the way in: everything is looked up by name. `since` is the oldest interface of that name we speak. */

#define VERB(name, since, newer) {#name, (void *)s_##name, since, newer}
static const struct { const char *name; void *function; int since; int newer; } verbs[] = {
    VERB(cuGetErrorName, 0, 0), VERB(cuGetErrorString, 0, 0), VERB(cuInit, 0, 0), VERB(cuDriverGetVersion, 0, 0),
    VERB(cuDeviceGetCount, 0, 0), VERB(cuDeviceGet, 0, 0), VERB(cuDeviceGetUuid, 0, 0), VERB(cuDeviceGetAttribute, 0, 0),
    VERB(cuCtxCreate, 12050, 0), VERB(cuCtxDestroy, 4000, 0), VERB(cuCtxPushCurrent, 4000, 0), VERB(cuCtxPopCurrent, 4000, 0),
    VERB(cuCtxSetCurrent, 0, 0), VERB(cuCtxGetCurrent, 0, 0), VERB(cuMemAlloc, 3020, 0), VERB(cuMemFree, 3020, 0),
    VERB(cuMemsetD8, 3020, 0), VERB(cuMemcpyHtoD, 3020, 0), VERB(cuMemcpyDtoH, 3020, 0), VERB(cuModuleLoadData, 0, 0),
    VERB(cuModuleLoadDataEx, 0, 0), VERB(cuModuleUnload, 0, 0), VERB(cuModuleGetFunction, 0, 0), VERB(cuModuleGetFunctionCount, 0, 1),
    VERB(cuModuleEnumerateFunctions, 0, 1), VERB(cuFuncGetName, 0, 1), VERB(cuFuncGetParamInfo, 0, 1), VERB(cuLaunchKernel, 0, 0),
    VERB(cuStreamQuery, 0, 0), VERB(cuEventCreate, 0, 0), VERB(cuEventRecord, 0, 0), VERB(cuEventQuery, 0, 0),
    VERB(cuEventElapsedTime, 0, 0), VERB(cuEventDestroy, 4000, 0),
};

__attribute__((visibility("default"))) int cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status) {
    (void)flags;
    *out = NULL;
    if (status) *status = 1;
    if (!strcmp(name, "cuGetProcAddress")) *out = (void *)cuGetProcAddress_v2;
    for (size_t i = 0; i < sizeof verbs / sizeof *verbs; i++)
        if (!strcmp(verbs[i].name, name) && version >= verbs[i].since && !(verbs[i].newer && getenv("SHIM_OLD"))) *out = verbs[i].function;
    if (getenv("SHIM_SYMBOLS")) report("symbol %s %d %s", name, version, *out ? "given" : "not given");
    if (!*out) return NOT_FOUND;
    if (status) *status = 0;
    return SUCCESS;
}
