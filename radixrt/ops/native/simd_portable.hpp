// The logical vector of 16 lanes as plain C++: for any machine, and for the compiler to vectorize as it can.
#pragma once
#include <cmath>
#include <cstring>

#include "types.hpp"

namespace radixrt::portable {

struct F { float v[16]; };
struct I { int32_t v[16]; };
struct B { uint8_t v[64]; };  // 16 lanes x 4 bytes
constexpr int kRows = 4;       // rows of a quantized matmul tile
constexpr int kTogether = 1;   // of these, rows whose dot products run side by side
constexpr int kTiles = 1;       // tiles that are multiplied at once
constexpr int kRowsFloat = 2;  // rows of a float matmul tile of one vector
constexpr int kWide = 1;       // rows of a tile of four vectors

static inline F set1(float x) {
    F r;
    for (float& y : r.v) y = x;
    return r;
}
static inline F zero() { return set1(0); }
static inline F load(const float* p) {
    F r;
    memcpy(r.v, p, sizeof r.v);
    return r;
}
static inline void store(float* p, F a) { memcpy(p, a.v, sizeof a.v); }

static inline float from_bits(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline uint32_t to_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}
static inline float half_to_float(uint16_t h) {
    // the exponent and mantissa are moved into place; the multiplication renormalizes, denormals too
    const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = uint32_t(h & 0x7fff) << 13;
    const uint32_t finite = to_bits(from_bits(rest) * from_bits(0x77800000u));  // 2^112
    return from_bits(sign | ((h & 0x7c00) == 0x7c00 ? 0x7f800000u | rest : finite));
}
static inline uint16_t float_to_half(float f) {  // to nearest even
    const uint32_t u = to_bits(f), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000u) return uint16_t(sign | 0x7e00 | (a >> 13 & 0x3ff));
    if (a >= 0x477ff000u) return uint16_t(sign | 0x7c00);
    if (a < 0x38800000u) return uint16_t(sign | (to_bits(from_bits(a) + 0.5f) - 0x3f000000u));  // 0.5 has the spacing of half denormals
    return uint16_t(sign | ((a - 0x38000000u + 0xfff + (a >> 13 & 1)) >> 13));
}

static inline F load_f16(const uint16_t* p) {
    F r;
    for (int i = 0; i < 16; i++) r.v[i] = half_to_float(p[i]);
    return r;
}
static inline F load_bf16(const uint16_t* p) {
    F r;
    for (int i = 0; i < 16; i++) r.v[i] = from_bits(uint32_t(p[i]) << 16);
    return r;
}
static inline F load_i8(const int8_t* p) {
    F r;
    for (int i = 0; i < 16; i++) r.v[i] = float(p[i]);
    return r;
}
static inline void store_f16(uint16_t* p, F a) {
    for (int i = 0; i < 16; i++) p[i] = float_to_half(a.v[i]);
}

#define RADIXRT_EACH(name, expression)                         \
    static inline F name(F a, F b) {                           \
        for (int i = 0; i < 16; i++) {                         \
            const float x = a.v[i], y = b.v[i];                \
            a.v[i] = expression;                               \
        }                                                      \
        return a;                                              \
    }
RADIXRT_EACH(add, x + y)
RADIXRT_EACH(sub, x - y)
RADIXRT_EACH(mul, x* y)
RADIXRT_EACH(div, x / y)
RADIXRT_EACH(max, x > y ? x : y)  // the second where one is NaN
RADIXRT_EACH(min, x < y ? x : y)
#undef RADIXRT_EACH

static inline F fma(F a, F b, F c) {  // rounds once only where the machine can
    for (int i = 0; i < 16; i++) {
#ifdef FP_FAST_FMAF
        c.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
#else
        c.v[i] = a.v[i] * b.v[i] + c.v[i];
#endif
    }
    return c;
}
static inline F abs(F a) {
    for (float& x : a.v) x = __builtin_fabsf(x);
    return a;
}
static inline F round(F a) {  // |a| < 2^22, as every caller has it
    for (float& x : a.v) x = (x + 12582912.0f) - 12582912.0f;
    return a;
}
static inline F scale2(F a, F n) {  // a * 2^n, n whole; 0 below the normal numbers
    for (int i = 0; i < 16; i++) {
        const float e = n.v[i] < -127 ? -127 : n.v[i] > 127 ? 127 : n.v[i] == n.v[i] ? n.v[i] : 0;
        a.v[i] *= from_bits(uint32_t(int32_t(e) + 127) << 23);
    }
    return a;
}
static inline float reduce_add(F a) {
    for (int n = 8; n; n /= 2)
        for (int i = 0; i < n; i++) a.v[i] += a.v[i + n];
    return a.v[0];
}
static inline float reduce_max(F a) {
    for (int n = 8; n; n /= 2)
        for (int i = 0; i < n; i++) a.v[i] = a.v[i] > a.v[i + n] ? a.v[i] : a.v[i + n];
    return a.v[0];
}
static inline F first(F a, int n, F other) {  // lanes from n on become `other`
    for (int i = 0; i < 16; i++) a.v[i] = i < n ? a.v[i] : other.v[i];
    return a;
}
static inline I iset1(int32_t x) {
    I r;
    for (int32_t& y : r.v) y = x;
    return r;
}
static inline I izero() { return iset1(0); }
static inline F to_float(I a) {
    F r;
    for (int i = 0; i < 16; i++) r.v[i] = float(a.v[i]);
    return r;
}
static inline I to_int(F a) {  // to the nearest; |a| < 2^22
    I r;
    a = round(a);
    for (int i = 0; i < 16; i++) r.v[i] = a.v[i] > -4194304.0f && a.v[i] < 4194304.0f ? int32_t(a.v[i]) : 0;
    return r;
}
static inline int32_t reduce_iadd(I a) {
    int32_t s = 0;
    for (int32_t x : a.v) s += x;
    return s;
}
static inline void store_bytes(int8_t* p, I a) {
    for (int i = 0; i < 16; i++) p[i] = int8_t(a.v[i] > 127 ? 127 : a.v[i] < -128 ? -128 : a.v[i]);
}
static inline B load_bytes(const uint8_t* p) {
    B r;
    memcpy(r.v, p, sizeof r.v);
    return r;
}
static inline B low(B b) {
    for (uint8_t& x : b.v) x &= 15;
    return b;
}
static inline B high(B b) {
    for (uint8_t& x : b.v) x >>= 4;
    return b;
}
// acc += dot of the 4 unsigned bytes of each lane with 4 signed ones
static inline I dot4(I acc, B w, const int8_t* x) {
    for (int i = 0; i < 16; i++)
        acc.v[i] += w.v[4 * i] * x[0] + w.v[4 * i + 1] * x[1] + w.v[4 * i + 2] * x[2] + w.v[4 * i + 3] * x[3];
    return acc;
}
static inline I dot4_nibble(I acc, B w, const int8_t* x) { return dot4(acc, w, x); }
// acc += dot of the 2 shorts of each lane with 2 others
static inline I dot2(I acc, B w, const int16_t* x) {
    int16_t two[32];
    memcpy(two, w.v, sizeof two);
    for (int i = 0; i < 16; i++) acc.v[i] += two[2 * i] * x[0] + two[2 * i + 1] * x[1];
    return acc;
}
static inline I load_ints(const int32_t* p) {
    I r;
    memcpy(r.v, p, sizeof r.v);
    return r;
}
static inline void store_ints(int32_t* p, I a) { memcpy(p, a.v, sizeof a.v); }
static inline void store_shorts(int16_t* p, I a) {
    for (int i = 0; i < 16; i++) p[i] = int16_t(a.v[i] > 32767 ? 32767 : a.v[i] < -32768 ? -32768 : a.v[i]);
}
// columns of 16 rows
static inline void transpose(F r[16]) {
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < i; j++) {
            const float t = r[i].v[j];
            r[i].v[j] = r[j].v[i];
            r[j].v[i] = t;
        }
}

}  // namespace radixrt::portable
