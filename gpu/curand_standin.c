/* A stub of libcurand.so.10 for machines without it, such as those with only PyTorch's packages. candle creates a
 * generator for every device. This generator fails to draw; ulysses draws random numbers on the CPU. */

enum { SUCCESS = 0, INTERNAL_ERROR = 999 };

static int no_generator;

int curandCreateGenerator(void **generator, int kind) {
    (void)kind;
    *generator = &no_generator;
    return SUCCESS;
}

int curandDestroyGenerator(void *generator) { return (void)generator, SUCCESS; }
int curandSetStream(void *generator, void *stream) { return (void)generator, (void)stream, SUCCESS; }

int curandSetPseudoRandomGeneratorSeed(void *generator, unsigned long long seed) {
    return (void)generator, (void)seed, SUCCESS;
}

int curandSetGeneratorOffset(void *generator, unsigned long long offset) {
    return (void)generator, (void)offset, SUCCESS;
}

/* The System V ABI allows a callee to ignore its arguments. */
#define REFUSES(name) \
    int name(void) { return INTERNAL_ERROR; }

REFUSES(curandGenerate)
REFUSES(curandGenerateLongLong)
REFUSES(curandGenerateUniform)
REFUSES(curandGenerateUniformDouble)
REFUSES(curandGenerateNormal)
REFUSES(curandGenerateNormalDouble)
REFUSES(curandGenerateLogNormal)
REFUSES(curandGenerateLogNormalDouble)
REFUSES(curandGeneratePoisson)
