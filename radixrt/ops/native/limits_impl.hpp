// See limits.hpp. Included inside the namespace of an instruction set.

static int64_t limit_dots(int64_t rounds, const uint8_t* weights, const int8_t* x) {
    constexpr int chains = 2 * kRows < 12 ? 6 : 12;
    const B w = low(load_bytes(weights));
    I acc[chains];
#pragma GCC unroll 16
    for (int j = 0; j < chains; j++) acc[j] = izero();
    for (int64_t i = 0; i < rounds; i++) {
#pragma GCC unroll 16
        for (int j = 0; j < chains; j++) acc[j] = dot4_nibble(acc[j], w, x + 4 * j);
        __asm__ volatile("" ::: "memory");  // x may have changed
    }
    int32_t sum = 0;
#pragma GCC unroll 16
    for (int j = 0; j < chains; j++) sum += reduce_iadd(acc[j]);
    __asm__ volatile("" ::"r"(sum));
    return rounds * chains * kLanes * 8;
}

static int64_t limit_pairs(int64_t rounds, const uint8_t* keys, const int16_t* x) {
    constexpr int chains = 2 * kRows < 12 ? 6 : 12;
    const B w = load_bytes(keys);
    I acc[chains];
#pragma GCC unroll 16
    for (int j = 0; j < chains; j++) acc[j] = izero();
    for (int64_t i = 0; i < rounds; i++) {
#pragma GCC unroll 16
        for (int j = 0; j < chains; j++) acc[j] = dot2(acc[j], w, x + 2 * j);
        __asm__ volatile("" ::: "memory");
    }
    int32_t sum = 0;
#pragma GCC unroll 16
    for (int j = 0; j < chains; j++) sum += reduce_iadd(acc[j]);
    __asm__ volatile("" ::"r"(sum));
    return rounds * chains * kLanes * 4;
}

static int64_t limit_fmas(int64_t rounds, const float* x) {
    constexpr int chains = 2 * kRows < 12 ? 6 : 12;
    const F w = load(x);
    F acc[chains];
#pragma GCC unroll 16
    for (int j = 0; j < chains; j++) acc[j] = zero();
    for (int64_t i = 0; i < rounds; i++) {
#pragma GCC unroll 16
        for (int j = 0; j < chains; j++) acc[j] = fma(set1(x[j]), w, acc[j]);
        __asm__ volatile("" ::: "memory");
    }
    float sum = 0;
#pragma GCC unroll 16
    for (int j = 0; j < chains; j++) sum += reduce_add(acc[j]);
    __asm__ volatile("" ::"m"(sum));
    return rounds * chains * kLanes * 2;
}

static void limit_read(const uint8_t* from, size_t bytes, int32_t* sink) {
    const int8_t one[4] = {1, 1, 1, 1};
    I acc[4] = {izero(), izero(), izero(), izero()};
    for (size_t i = 0; i < bytes; i += 256) {
        __builtin_prefetch(from + i + 4096);
        __builtin_prefetch(from + i + 4096 + 64);
        __builtin_prefetch(from + i + 4096 + 128);
        __builtin_prefetch(from + i + 4096 + 192);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) acc[j] = dot4_nibble(acc[j], load_bytes(from + i + 64 * j), one);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) *sink += reduce_iadd(acc[j]);
}
