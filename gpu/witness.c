/* Preloaded by check.sh to detect whether a program used a GPU: a test that ignores the requested device would also
 * pass on the CPU. Creating a CUDA context creates the file ULYSSES_GPU_WITNESS. At exit, this file has the number of
 * kernels launched through the driver API. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

static atomic_long launches;
static atomic_bool used;

static void testify(void) {
    const char *path = getenv("ULYSSES_GPU_WITNESS");
    FILE *file = path ? fopen(path, "w") : NULL;
    if (file) {
        fprintf(file, "%ld\n", atomic_load(&launches));
        fclose(file);
    }
}

int cuDevicePrimaryCtxRetain(void *context, int device) {
    int (*next)(void *, int) = (int (*)(void *, int))dlsym(RTLD_NEXT, "cuDevicePrimaryCtxRetain");
    int result = next(context, device);
    if (result == 0 && !atomic_exchange(&used, 1)) testify();
    return result;
}

int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **parameters, void **extra) {
    typedef int Launch(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
    static _Atomic(Launch *) next;
    if (!next) next = (Launch *)dlsym(RTLD_NEXT, "cuLaunchKernel");
    atomic_fetch_add(&launches, 1);
    return next(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra);
}

__attribute__((destructor)) static void at_end(void) {
    if (atomic_load(&used)) testify();
}
