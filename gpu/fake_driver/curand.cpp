// libcurand.so.10: generators that exist and draw nothing. candle creates one per device.

#include "stream.h"

FAKE_EXPORT int curandCreateGenerator(void **generator, int) {
    if (fake::current_device() < 0) fake::report("curandCreateGenerator without a current context");
    *generator = new char;
    return 0;
}

FAKE_EXPORT int curandDestroyGenerator(void *generator) {
    delete static_cast<char *>(generator);
    return 0;
}

FAKE_EXPORT int curandSetStream(void *, CUstream stream) { return fake::device_of(stream) < 0 ? 104 : 0; }
FAKE_EXPORT int curandSetPseudoRandomGeneratorSeed(void *, unsigned long long) { return 0; }
