/* What the two shims share: the pretended GPUs, and a folder that says which process holds what on which of them.
 *
 * What a process holds on a device is the file `<device>-<pid>-<start time>` in SHIM_STATE: how many bytes, then a line `offset size`
 * for each buffer. As with a real driver it is gone when the process is, zombie or not: such files are removed by whoever looks next.
 * The memory itself is the file `memory-<device>`, mapped by all. Nothing ever clears it: what one process wrote is there for the
 * next one that is given those bytes.
 *
 * SHIM_STATE    folder (needed)                        SHIM_DEVICES  number of GPUs, default 2
 * SHIM_MEMORY   bytes per GPU, default 1 GiB           SHIM_LEAK     memory of dead processes stays held
 * SHIM_LOG      file the shims report to
 */
#ifndef SHIM_STATE_H
#define SHIM_STATE_H

#include <dirent.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#define MAX_HELD 256
#define MAX_GPUS 16

typedef struct {
    int pid;
    int alive;
    uint64_t bytes;
} Held;

static inline uint64_t setting(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

static inline int gpu_count(void) { return (int)setting("SHIM_DEVICES", 2); }
static inline uint64_t gpu_bytes(void) { return setting("SHIM_MEMORY", 1ull << 30); }

/* Every byte differs from its neighbours, so that a UUID put together in the wrong order is another UUID. With SHIM_UUIDS
   they are GPUs of another machine: a GPU is granted by one ledger of a machine, and tests run side by side. */
static inline void gpu_uuid(int gpu, unsigned char out[16]) {
    uint64_t other = setting("SHIM_UUIDS", 0);
    for (int i = 0; i < 16; i++) out[i] = (unsigned char)(0x10 * (gpu + 1) + i * 17) ^ (unsigned char)(other >> (8 * (i % 8)));
}

static inline void report(const char *format, ...) {
    const char *path = getenv("SHIM_LOG");
    if (!path) return;
    char line[1024];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(line, sizeof line - 1, format, args);
    va_end(args);
    if (n > (int)sizeof line - 2) n = sizeof line - 2;
    line[n++] = '\n';
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (fd < 0) return;
    if (write(fd, line, n) != n) abort();
    close(fd);
}

/* 0 when there is no such process, or only its zombie. */
static inline unsigned long long start_time(int pid) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0) return 0;
    text[n] = 0;
    char *p = strrchr(text, ')');
    char state = 0;
    unsigned long long started = 0;
    if (!p || sscanf(p + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &state, &started) != 2)
        return 0;
    return state == 'Z' || state == 'X' ? 0 : started;
}

static inline int lock_state(void) {
    const char *folder = getenv("SHIM_STATE");
    char path[4096];
    if (!folder) {
        fprintf(stderr, "shim: SHIM_STATE is not set\n");
        abort();
    }
    snprintf(path, sizeof path, "%s/lock", folder);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || flock(fd, LOCK_EX)) abort();
    return fd;
}

/* The next process that holds memory on a GPU: its file, read up to the sum, or NULL after the last. The caller has the lock. */
static inline FILE *next_holder(DIR *dir, int gpu, Held *out) {
    const char *folder = getenv("SHIM_STATE");
    struct dirent *entry;
    while (dir && (entry = readdir(dir))) {
        int on, pid;
        unsigned long long started, bytes = 0;
        char path[4096];
        if (sscanf(entry->d_name, "%d-%d-%llu", &on, &pid, &started) != 3 || on != gpu) continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        int alive = start_time(pid) == started;
        if (!alive && !getenv("SHIM_LEAK")) {
            unlink(path);
            continue;
        }
        FILE *file = fopen(path, "re");
        if (!file) continue;
        if (fscanf(file, "%llu", &bytes) == 1 && bytes) {
            *out = (Held){pid, alive, bytes};
            return file;
        }
        fclose(file);
    }
    if (dir) closedir(dir);
    return NULL;
}

/* Who holds how much on a GPU. The caller has the lock. */
static inline int who_holds(int gpu, Held *out) {
    DIR *dir = opendir(getenv("SHIM_STATE"));
    int count = 0;
    for (FILE *file; (file = next_holder(dir, gpu, &out[count])); fclose(file))
        if (++count == MAX_HELD) abort();
    return count;
}

#endif
