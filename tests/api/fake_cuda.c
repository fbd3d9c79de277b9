/* The few functions of the CUDA runtime and driver that a server calls, on files in place of a GPU's memory: the handle
   of a file is its path. The same file is both libraries. */
#include <fcntl.h>
#include <stddef.h>
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
} opened[64];

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

int cudaMemcpy(void *target, const void *source, size_t size, int kind) {
    const char *device = kind == 1 ? target : source;
    for (int i = 0; i < 64; i++)
        if (opened[i].address && device >= opened[i].address && device + size <= opened[i].address + opened[i].size) {
            memcpy(target, source, size);
            return 0;
        }
    return 700;
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
