/* The few functions of the CUDA runtime and driver that a server and its hosts call, on files in place of a GPU's memory:
   the handle of a file is its path. The same file is both libraries. Of two GPUs the second has a context, in which all
   calls end with what `meet` was told. A copy to a GPU is there when it is waited for. A copy waits as long as there is a file of its memory's name and ".hold"; while it
   does there is one of that name and ".held". */
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct {
    char path[64];
} handle;

static struct {
    char *address;
    size_t size;
    char path[64];
} opened[64];

static void wait_for(const char *path) {
    char hold[80], held[80];
    snprintf(hold, sizeof hold, "%s.hold", path);
    snprintf(held, sizeof held, "%s.held", path);
    if (access(hold, F_OK)) return;
    close(open(held, O_CREAT | O_WRONLY, 0600));
    while (!access(hold, F_OK)) usleep(1000);
    unlink(held);
}

int cudaSetDevice(int device) {
    return device == 0 ? 0 : 101;
}

int cudaIpcOpenMemHandle(void **address, handle memory, unsigned flags) {
    struct stat status;
    int fd = open(memory.path, O_RDWR);
    if (flags != 1 || fd < 0 || fstat(fd, &status)) return 400;
    for (int i = 0; i < 64; i++)
        if (!opened[i].address) {
            opened[i].size = status.st_size;
            opened[i].address = mmap(NULL, status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
            *address = opened[i].address;
            memcpy(opened[i].path, memory.path, sizeof memory.path);
            close(fd);
            return 0;
        }
    return 2;
}

int cudaIpcCloseMemHandle(void *address) {
    for (int i = 0; i < 64; i++)
        if (opened[i].address == address) {
            munmap(address, opened[i].size);
            opened[i].address = NULL;
            return 0;
        }
    return 1;
}

static struct {
    void *target, *bytes;
    size_t size;
} staged[64];
static int stages;

int cudaStreamSynchronize(void *stream) {
    if (stream) return 400;
    for (int i = 0; i < stages; i++) {
        memcpy(staged[i].target, staged[i].bytes, staged[i].size);
        free(staged[i].bytes);
    }
    stages = 0;
    return 0;
}

int cudaMemcpy(void *target, const void *source, size_t size, int kind) {
    if (kind == 1 && stages == 64) return 2;
    if (kind == 2) cudaStreamSynchronize(NULL);
    const char *device = kind == 1 ? target : source;
    for (int i = 0; i < 64; i++)
        if (opened[i].address && device >= opened[i].address && device + size <= opened[i].address + opened[i].size) {
            wait_for(opened[i].path);
            if (kind == 1) {
                staged[stages].target = target;
                staged[stages].bytes = memcpy(malloc(size), source, size);
                staged[stages++].size = size;
            } else
                memcpy(target, source, size);
            return 0;
        }
    return 700;
}

int cudaRuntimeGetVersion(int *version) {
    *version = 12080;
    return 0;
}

int cudaDriverGetVersion(int *version) {
    *version = 12040;
    return 0;
}

const char *cudaGetErrorString(int code) {
    return code == 700 ? "an illegal memory access was encountered" : "an error";
}

int cuMemGetAddressRange_v2(unsigned long long *base, size_t *size, unsigned long long address) {
    for (int i = 0; i < 64; i++)
        if (opened[i].address == (char *)address) {
            *size = opened[i].size;
            return 0;
        }
    return 1;
}

static int met, current;

void meet(int code) {
    met = code;
}

/* FAKE_CUDA_GPUS has two hexadecimal digits for each GPU, of which its UUID is made; FAKE_CUDA_PART those of the part of
   the first GPU that is all this process has. Without either the server has no GPU, and models two. */
static const char *gpus(void) {
    return getenv("FAKE_CUDA_GPUS");
}

int cuInit(unsigned flags) {
    return flags ? 1 : !gpus() ? 3 : *gpus() ? 0 : 100;
}

static int repeat(unsigned char *uuid, const char *digits) {
    unsigned byte;
    sscanf(digits, "%2x", &byte);
    memset(uuid, byte, 16);
    return 0;
}

int cuDeviceGetUuid(unsigned char *uuid, int device) {
    return repeat(uuid, gpus() + 2 * device);
}

int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    const char *part = getenv("FAKE_CUDA_PART");
    return part ? repeat(uuid, part) : cuDeviceGetUuid(uuid, device);
}

int cuDeviceGetCount(int *count) {
    *count = gpus() ? (int)strlen(gpus()) / 2 : 2;
    return 0;
}

int cuDeviceGet(int *device, int number) {
    *device = number;
    return 0;
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = device == 1;
    return 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = &met;
    return device == 1 ? 0 : 2;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    return device == 1 ? 0 : 201;
}

int cuCtxPushCurrent_v2(void *context) {
    current = context == &met;
    return current ? 0 : 201;
}

int cuCtxPopCurrent_v2(void **context) {
    *context = &met;
    current = 0;
    return 0;
}

int cuMemGetInfo_v2(size_t *free, size_t *total) {
    *free = *total = 0;
    return current ? met : 201;
}

int cuGetErrorName(int code, const char **name) {
    *name = code == 719 ? "CUDA_ERROR_LAUNCH_FAILED" : "CUDA_ERROR_OUT_OF_MEMORY";
    return 0;
}

int cuGetErrorString(int code, const char **text) {
    *text = code == 719 ? "unspecified launch failure" : "out of memory";
    return 0;
}
