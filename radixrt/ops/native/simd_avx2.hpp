// The logical vector of 16 lanes on AVX2 + FMA + F16C: two registers. With RADIXRT_VNNI also AVX-VNNI's dot products.
#pragma once
#include <immintrin.h>

#include "types.hpp"

#ifndef RADIXRT_AVX2
#define RADIXRT_AVX2 avx2
#endif

namespace radixrt::RADIXRT_AVX2 {

struct F { __m256 a, b; };
struct I { __m256i a, b; };
using B = I;  // 16 lanes x 4 bytes
constexpr int kRows = 4;        // rows of a quantized matmul tile
constexpr int kTogether = 4;    // of these, rows whose dot products run side by side
constexpr int kTiles = 1;        // tiles that are multiplied at once
constexpr int kRowsFloat = 5;   // rows of a float matmul tile of one vector
constexpr int kWide = 1;        // rows of a tile of four vectors

static inline F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, F v) { _mm256_storeu_ps(p, v.a), _mm256_storeu_ps(p + 8, v.b); }
static inline F load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
static inline F load_bf16(const uint16_t* p) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8))), 16))};
}
static inline F load_i8(const int8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))};
}
static inline void store_f16(uint16_t* p, F v) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline F abs(F x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
static inline F round(F x) {
    return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
            _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
static inline __m256 pow2(__m256 n) {  // 2^n, n whole; 0 below the normal numbers
    n = _mm256_min_ps(_mm256_max_ps(n, _mm256_set1_ps(-127)), _mm256_set1_ps(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
static inline F scale2(F x, F n) { return {_mm256_mul_ps(x.a, pow2(n.a)), _mm256_mul_ps(x.b, pow2(n.b))}; }
static inline float reduce_add(F x) {
    __m256 s = _mm256_add_ps(x.a, x.b);
    __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_shuffle_ps(t, t, 1)));
}
static inline float reduce_max(F x) {
    __m256 s = _mm256_max_ps(x.a, x.b);
    __m128 t = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_max_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_max_ss(t, _mm_shuffle_ps(t, t, 1)));
}
static inline F first(F x, int n, F other) {  // lanes from n on become `other`
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i low = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane);
    const __m256i high = _mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), lane);
    return {_mm256_blendv_ps(other.a, x.a, _mm256_castsi256_ps(low)), _mm256_blendv_ps(other.b, x.b, _mm256_castsi256_ps(high))};
}
static inline I izero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
static inline I iset1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
static inline I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }  // to the nearest
static inline int32_t reduce_iadd(I x) {
    __m256i s = _mm256_add_epi32(x.a, x.b);
    __m128i t = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
    t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(t, _mm_shuffle_epi32(t, 0xb1)));
}
static inline void store_bytes(int8_t* p, I x) {
    __m256i s = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1)));
}
static inline B load_bytes(const uint8_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
static inline B low(B x) {
    const __m256i m = _mm256_set1_epi8(15);
    return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
static inline B high(B x) {
    const __m256i m = _mm256_set1_epi8(15);
    return {_mm256_and_si256(_mm256_srli_epi16(x.a, 4), m), _mm256_and_si256(_mm256_srli_epi16(x.b, 4), m)};
}
#ifdef RADIXRT_VNNI
// acc += dot of the 4 unsigned bytes of each lane with 4 signed ones
static inline I dot4(I acc, B w, const int8_t* x) {
    int32_t four;
    __builtin_memcpy(&four, x, 4);
    const __m256i v = _mm256_set1_epi32(four);
    return {_mm256_dpbusd_avx_epi32(acc.a, w.a, v), _mm256_dpbusd_avx_epi32(acc.b, w.b, v)};
}
static inline I dot4_nibble(I acc, B w, const int8_t* x) { return dot4(acc, w, x); }
#else
static inline I dot4_nibble(I acc, B w, const int8_t* x) {  // bytes of w up to 127: the 16-bit sums in between cannot overflow
    int32_t four;
    __builtin_memcpy(&four, x, 4);
    const __m256i v = _mm256_set1_epi32(four), one = _mm256_set1_epi16(1);
    return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(_mm256_maddubs_epi16(w.a, v), one)),
            _mm256_add_epi32(acc.b, _mm256_madd_epi16(_mm256_maddubs_epi16(w.b, v), one))};
}
#define RADIXRT_SIGNED
// acc += dot of the 4 bytes less 128 of each lane with 4 signed ones above -128. The signs of the first are moved to the second; then the 16-bit
// sums in between cannot overflow: 2 x 128 x 127 is below 2^15.
static inline I dot4(I acc, B w, const int8_t* x) {
    int32_t four;
    __builtin_memcpy(&four, x, 4);
    const __m256i v = _mm256_set1_epi32(four), one = _mm256_set1_epi16(1), top = _mm256_set1_epi8(-128);
    const __m256i a = _mm256_xor_si256(w.a, top), b = _mm256_xor_si256(w.b, top);
    return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(a), _mm256_sign_epi8(v, a)), one)),
            _mm256_add_epi32(acc.b, _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(b), _mm256_sign_epi8(v, b)), one))};
}
#define RADIXRT_NIBBLES
struct Nibbles {  // 8 such dot products at most, summed in 16 bits: 8 x 2 x 15 x 127 is below 2^15
    I from, sum;
    void start(I x) { from = x, sum = izero(); }
    void step(B w, const int8_t* x) {
        int32_t four;
        __builtin_memcpy(&four, x, 4);
        const __m256i v = _mm256_set1_epi32(four);
        sum = {_mm256_add_epi16(sum.a, _mm256_maddubs_epi16(w.a, v)), _mm256_add_epi16(sum.b, _mm256_maddubs_epi16(w.b, v))};
    }
    I end() const {
        const __m256i one = _mm256_set1_epi16(1);
        return {_mm256_add_epi32(from.a, _mm256_madd_epi16(sum.a, one)), _mm256_add_epi32(from.b, _mm256_madd_epi16(sum.b, one))};
    }
};
#endif
// acc += dot of the 2 shorts of each lane with 2 others
static inline I dot2(I acc, B w, const int16_t* x) {
    int32_t two;
    __builtin_memcpy(&two, x, 4);
    const __m256i v = _mm256_set1_epi32(two);
#ifdef RADIXRT_VNNI
    return {_mm256_dpwssd_avx_epi32(acc.a, w.a, v), _mm256_dpwssd_avx_epi32(acc.b, w.b, v)};
#else
    return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(w.a, v)), _mm256_add_epi32(acc.b, _mm256_madd_epi16(w.b, v))};
#endif
}
static inline I load_ints(const int32_t* p) { return load_bytes(reinterpret_cast<const uint8_t*>(p)); }
static inline void store_ints(int32_t* p, I x) {
    _mm256_storeu_si256((__m256i*)p, x.a);
    _mm256_storeu_si256((__m256i*)(p + 8), x.b);
}
static inline void store_shorts(int16_t* p, I x) {
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8));
}
static inline void transpose8(__m256 r[8]) {
    __m256 t[8];
    for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
        r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
        r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
        t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    }
    for (int i = 0; i < 8; i++) r[i] = t[i];
}
// columns of 16 rows
static inline void transpose(F r[16]) {
    __m256 q[4][8];
    for (int i = 0; i < 8; i++) q[0][i] = r[i].a, q[1][i] = r[i].b, q[2][i] = r[i + 8].a, q[3][i] = r[i + 8].b;
    for (auto& part : q) transpose8(part);
    for (int i = 0; i < 8; i++) r[i] = {q[0][i], q[2][i]}, r[i + 8] = {q[1][i], q[3][i]};
}

}  // namespace radixrt::RADIXRT_AVX2
