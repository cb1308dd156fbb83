// The logical vector of 16 lanes on AVX-512 with VNNI.
#pragma once
#include <immintrin.h>

#include "types.hpp"

namespace radixrt::avx512 {

using F = __m512;
using I = __m512i;
using B = __m512i;  // 16 lanes x 4 bytes
constexpr int kRows = 8;      // rows of a quantized matmul tile
constexpr int kTogether = 8;  // of these, rows whose dot products run side by side
constexpr int kTiles = 2;      // tiles that are multiplied at once
constexpr int kRowsFloat = 12;  // rows of a float matmul tile of one vector
constexpr int kWide = 6;      // rows of a tile of four vectors

static inline F zero() { return _mm512_setzero_ps(); }
static inline F set1(float x) { return _mm512_set1_ps(x); }
static inline F load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, F a) { _mm512_storeu_ps(p, a); }
static inline F load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
static inline F load_bf16(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
static inline F load_i8(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }
static inline void store_f16(uint16_t* p, F a) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline F add(F a, F b) { return _mm512_add_ps(a, b); }
static inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
static inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
static inline F div(F a, F b) { return _mm512_div_ps(a, b); }
static inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
static inline F max(F a, F b) { return _mm512_max_ps(a, b); }
static inline F min(F a, F b) { return _mm512_min_ps(a, b); }
static inline F abs(F a) { return _mm512_abs_ps(a); }
static inline F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline F scale2(F a, F n) { return _mm512_scalef_ps(a, n); }  // a * 2^n, n whole
static inline float reduce_add(F a) { return _mm512_reduce_add_ps(a); }
static inline float reduce_max(F a) { return _mm512_reduce_max_ps(a); }
// lanes from n on become `other`
static inline F first(F a, int n, F other) {
    return _mm512_mask_blend_ps(__mmask16(n >= 16 ? 0xffff : n <= 0 ? 0 : (1u << n) - 1), other, a);
}
static inline I izero() { return _mm512_setzero_si512(); }
static inline I iset1(int32_t x) { return _mm512_set1_epi32(x); }
static inline F to_float(I a) { return _mm512_cvtepi32_ps(a); }
static inline I to_int(F a) { return _mm512_cvtps_epi32(a); }  // to the nearest
static inline int32_t reduce_iadd(I a) { return _mm512_reduce_add_epi32(a); }
static inline void store_bytes(int8_t* p, I a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(a)); }
static inline B load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
static inline B low(B b) { return _mm512_and_si512(b, _mm512_set1_epi8(15)); }
static inline B high(B b) { return _mm512_and_si512(_mm512_srli_epi16(b, 4), _mm512_set1_epi8(15)); }
// acc += dot of 4 unsigned bytes of each lane (16 at most each: dot4_nibble) with 4 signed ones
static inline I dot4(I acc, B w, const int8_t* x) {
    int32_t four;
    __builtin_memcpy(&four, x, 4);
    return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(four));
}
static inline I dot4_nibble(I acc, B w, const int8_t* x) { return dot4(acc, w, x); }
// acc += dot of the 2 shorts of each lane with 2 others
static inline I dot2(I acc, B w, const int16_t* x) {
    int32_t two;
    __builtin_memcpy(&two, x, 4);
    return _mm512_dpwssd_epi32(acc, w, _mm512_set1_epi32(two));
}
static inline I load_ints(const int32_t* p) { return _mm512_loadu_si512(p); }
static inline void store_ints(int32_t* p, I a) { _mm512_storeu_si512(p, a); }
static inline void store_shorts(int16_t* p, I a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtsepi32_epi16(a)); }
// columns of 16 rows
static inline void transpose(F r[16]) {
    F t[16];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(t[4 * i]), _mm512_castps_pd(t[4 * i + 2])));
        r[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(t[4 * i]), _mm512_castps_pd(t[4 * i + 2])));
        r[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(t[4 * i + 1]), _mm512_castps_pd(t[4 * i + 3])));
        r[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(t[4 * i + 1]), _mm512_castps_pd(t[4 * i + 3])));
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

}  // namespace radixrt::avx512
