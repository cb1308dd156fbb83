// The logical vector of 16 lanes on 64-bit ARM with the dot product instructions: four registers.
//
// All is rounded as the portable functions do it where those fuse, so results have the same bits.
#pragma once
#include <arm_neon.h>

#include "types.hpp"

namespace radixrt::neon {

struct F { float32x4_t a, b, c, d; };
// `bias`: what is still to be added to every lane, twice. dot4 gathers it here, once for all 16 lanes.
struct I { int32x4_t a, b, c, d, bias; };
struct B { uint8x16_t a, b, c, d; };  // 16 lanes x 4 bytes
constexpr int kRows = 4;              // rows of a quantized matmul tile
constexpr int kTogether = 4;          // of these, rows whose dot products run side by side
constexpr int kTiles = 1;              // tiles that are multiplied at once
constexpr int kRowsFloat = 6;         // rows of a float matmul tile of one vector
constexpr int kWide = 1;              // rows of a tile of four vectors

#define RADIXRT_EACH1(f, x) {f(x.a), f(x.b), f(x.c), f(x.d)}
#define RADIXRT_EACH2(f, x, y) {f(x.a, y.a), f(x.b, y.b), f(x.c, y.c), f(x.d, y.d)}

static inline F set1(float x) {
    const float32x4_t v = vdupq_n_f32(x);
    return {v, v, v, v};
}
static inline F zero() { return set1(0); }
static inline F load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
static inline void store(float* p, F x) { vst1q_f32(p, x.a), vst1q_f32(p + 4, x.b), vst1q_f32(p + 8, x.c), vst1q_f32(p + 12, x.d); }
static inline float32x4_t half4(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
static inline F load_f16(const uint16_t* p) { return {half4(p), half4(p + 4), half4(p + 8), half4(p + 12)}; }
static inline float32x4_t bf16x4(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
static inline F load_bf16(const uint16_t* p) { return {bf16x4(p), bf16x4(p + 4), bf16x4(p + 8), bf16x4(p + 12)}; }
static inline F load_i8(const int8_t* p) {
    const int16x8_t low = vmovl_s8(vld1_s8(p)), high = vmovl_s8(vld1_s8(p + 8));
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))};
}
static inline void store_half4(uint16_t* p, float32x4_t x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
static inline void store_f16(uint16_t* p, F x) {
    store_half4(p, x.a), store_half4(p + 4, x.b), store_half4(p + 8, x.c), store_half4(p + 12, x.d);
}
static inline F add(F x, F y) { return RADIXRT_EACH2(vaddq_f32, x, y); }
static inline F sub(F x, F y) { return RADIXRT_EACH2(vsubq_f32, x, y); }
static inline F mul(F x, F y) { return RADIXRT_EACH2(vmulq_f32, x, y); }
static inline F div(F x, F y) { return RADIXRT_EACH2(vdivq_f32, x, y); }
static inline F fma(F x, F y, F z) {
    return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c), vfmaq_f32(z.d, x.d, y.d)};
}
// the second where one is NaN, which is neither vmaxq_f32 nor vmaxnmq_f32
static inline float32x4_t max4(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
static inline float32x4_t min4(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
static inline F max(F x, F y) { return RADIXRT_EACH2(max4, x, y); }
static inline F min(F x, F y) { return RADIXRT_EACH2(min4, x, y); }
static inline F abs(F x) { return RADIXRT_EACH1(vabsq_f32, x); }
static inline F round(F x) { return RADIXRT_EACH1(vrndnq_f32, x); }
static inline float32x4_t pow2(float32x4_t n) {  // 2^n, n whole; 0 below the normal numbers
    n = min4(max4(n, vdupq_n_f32(-127)), vdupq_n_f32(127));
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23));
}
static inline float32x4_t scale4(float32x4_t x, float32x4_t n) { return vmulq_f32(x, pow2(n)); }
static inline F scale2(F x, F n) { return RADIXRT_EACH2(scale4, x, n); }
static inline float reduce_add(F x) {
    const float32x4_t s = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
    return vpadds_f32(vadd_f32(vget_low_f32(s), vget_high_f32(s)));
}
static inline float reduce_max(F x) {
    const float32x4_t s = max4(max4(x.a, x.c), max4(x.b, x.d));
    const float32x4_t t = max4(s, vextq_f32(s, s, 2));
    return vgetq_lane_f32(max4(t, vextq_f32(t, t, 1)), 0);
}
static inline F first(F x, int n, F other) {  // lanes from n on become `other`
    const int32_t count[4] = {0, 1, 2, 3};
    const int32x4_t lane = vld1q_s32(count);
    return {vbslq_f32(vcltq_s32(lane, vdupq_n_s32(n)), x.a, other.a), vbslq_f32(vcltq_s32(lane, vdupq_n_s32(n - 4)), x.b, other.b),
            vbslq_f32(vcltq_s32(lane, vdupq_n_s32(n - 8)), x.c, other.c), vbslq_f32(vcltq_s32(lane, vdupq_n_s32(n - 12)), x.d, other.d)};
}
static inline I iset1(int32_t x) {
    const int32x4_t v = vdupq_n_s32(x);
    return {v, v, v, v, vdupq_n_s32(0)};
}
static inline I izero() { return iset1(0); }
static inline I settled(I x) {
    const int32x4_t bias = vaddq_s32(x.bias, x.bias);
    return {vaddq_s32(x.a, bias), vaddq_s32(x.b, bias), vaddq_s32(x.c, bias), vaddq_s32(x.d, bias), vdupq_n_s32(0)};
}
static inline F to_float(I x) {
    x = settled(x);
    return RADIXRT_EACH1(vcvtq_f32_s32, x);
}
static inline I to_int(F x) {  // to the nearest
    return {vcvtnq_s32_f32(x.a), vcvtnq_s32_f32(x.b), vcvtnq_s32_f32(x.c), vcvtnq_s32_f32(x.d), vdupq_n_s32(0)};
}
static inline int32_t reduce_iadd(I x) {
    x = settled(x);
    return vaddvq_s32(vaddq_s32(vaddq_s32(x.a, x.b), vaddq_s32(x.c, x.d)));
}
static inline void store_bytes(int8_t* p, I x) {
    x = settled(x);
    const int16x8_t low = vcombine_s16(vqmovn_s32(x.a), vqmovn_s32(x.b)), high = vcombine_s16(vqmovn_s32(x.c), vqmovn_s32(x.d));
    vst1q_s8(p, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
}
static inline B load_bytes(const uint8_t* p) { return {vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}; }
static inline uint8x16_t low16(uint8x16_t x) { return vandq_u8(x, vdupq_n_u8(15)); }
static inline uint8x16_t high16(uint8x16_t x) { return vshrq_n_u8(x, 4); }
static inline B low(B x) { return RADIXRT_EACH1(low16, x); }
static inline B high(B x) { return RADIXRT_EACH1(high16, x); }

static inline int8x16_t four(const int8_t* x) {  // the 4 bytes at x, in every lane
    int32_t v;
    __builtin_memcpy(&v, x, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(v));
}
static inline int32x4_t dot(int32x4_t acc, uint8x16_t w, int8x16_t x) { return vdotq_s32(acc, vreinterpretq_s8_u8(w), x); }
static inline I dot4_nibble(I acc, B w, const int8_t* x) {  // bytes of w up to 127
    const int8x16_t v = four(x);
    return {dot(acc.a, w.a, v), dot(acc.b, w.b, v), dot(acc.c, w.c, v), dot(acc.d, w.d, v), acc.bias};
}
// acc += dot of the 4 unsigned bytes of each lane with 4 signed ones
static inline I dot4(I acc, B w, const int8_t* x) {
    const int8x16_t v = four(x);
#ifdef __ARM_FEATURE_MATMUL_INT8
    return {vusdotq_s32(acc.a, w.a, v), vusdotq_s32(acc.b, w.b, v), vusdotq_s32(acc.c, w.c, v), vusdotq_s32(acc.d, w.d, v), acc.bias};
#else  // w is (w ^ 128 as a signed byte) + 128, and the bias is added twice
    const uint8x16_t top = vdupq_n_u8(128);
    return {dot(acc.a, veorq_u8(w.a, top), v), dot(acc.b, veorq_u8(w.b, top), v), dot(acc.c, veorq_u8(w.c, top), v),
            dot(acc.d, veorq_u8(w.d, top), v), dot(acc.bias, vdupq_n_u8(64), v)};
#endif
}

static inline int32x4_t dot2(int32x4_t acc, uint8x16_t w, int16x4_t x) {
    const int16x8_t v = vreinterpretq_s16_u8(w);
    return vaddq_s32(acc, vpaddq_s32(vmull_s16(vget_low_s16(v), x), vmull_s16(vget_high_s16(v), x)));
}
// acc += dot of the 2 shorts of each lane with 2 others
static inline I dot2(I acc, B w, const int16_t* x) {
    int32_t two;
    __builtin_memcpy(&two, x, 4);
    const int16x4_t v = vreinterpret_s16_s32(vdup_n_s32(two));
    return {dot2(acc.a, w.a, v), dot2(acc.b, w.b, v), dot2(acc.c, w.c, v), dot2(acc.d, w.d, v), acc.bias};
}
static inline I load_ints(const int32_t* p) { return {vld1q_s32(p), vld1q_s32(p + 4), vld1q_s32(p + 8), vld1q_s32(p + 12), vdupq_n_s32(0)}; }
static inline void store_ints(int32_t* p, I x) {
    x = settled(x);
    vst1q_s32(p, x.a), vst1q_s32(p + 4, x.b), vst1q_s32(p + 8, x.c), vst1q_s32(p + 12, x.d);
}
static inline void store_shorts(int16_t* p, I x) {
    x = settled(x);
    vst1q_s16(p, vcombine_s16(vqmovn_s32(x.a), vqmovn_s32(x.b)));
    vst1q_s16(p + 8, vcombine_s16(vqmovn_s32(x.c), vqmovn_s32(x.d)));
}

static inline float32x4_t pairs(float32x4_t x, float32x4_t y, bool second) {  // of two lanes
    const float64x2_t p = vreinterpretq_f64_f32(x), q = vreinterpretq_f64_f32(y);
    return vreinterpretq_f32_f64(second ? vtrn2q_f64(p, q) : vtrn1q_f64(p, q));
}
static inline void transpose4(float32x4_t& r0, float32x4_t& r1, float32x4_t& r2, float32x4_t& r3) {
    const float32x4_t even01 = vtrn1q_f32(r0, r1), odd01 = vtrn2q_f32(r0, r1), even23 = vtrn1q_f32(r2, r3), odd23 = vtrn2q_f32(r2, r3);
    r0 = pairs(even01, even23, false), r1 = pairs(odd01, odd23, false), r2 = pairs(even01, even23, true), r3 = pairs(odd01, odd23, true);
}
// columns of 16 rows: 4x4 blocks, each transposed, put where the block across the diagonal was
static inline void transpose(F r[16]) {
    F t[16];
    for (int i = 0; i < 16; i += 4) {
        transpose4(r[i].a, r[i + 1].a, r[i + 2].a, r[i + 3].a);
        transpose4(r[i].b, r[i + 1].b, r[i + 2].b, r[i + 3].b);
        transpose4(r[i].c, r[i + 1].c, r[i + 2].c, r[i + 3].c);
        transpose4(r[i].d, r[i + 1].d, r[i + 2].d, r[i + 3].d);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = {r[i].a, r[i + 4].a, r[i + 8].a, r[i + 12].a};
        t[i + 4] = {r[i].b, r[i + 4].b, r[i + 8].b, r[i + 12].b};
        t[i + 8] = {r[i].c, r[i + 4].c, r[i + 8].c, r[i + 12].c};
        t[i + 12] = {r[i].d, r[i + 4].d, r[i + 8].d, r[i + 12].d};
    }
    for (int i = 0; i < 16; i++) r[i] = t[i];
}

#undef RADIXRT_EACH1
#undef RADIXRT_EACH2

}  // namespace radixrt::neon
