// The kernels on AVX2 with AVX-VNNI.
#include <cmath>
#include <cstring>

#include "kernels.hpp"
#include "limits.hpp"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avxvnni,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avxvnni,avx2,fma,f16c")
#endif
#define RADIXRT_AVX2 avxvnni
#define RADIXRT_VNNI
#include "simd_avx2.hpp"

namespace radixrt::avxvnni {

#include "rows_impl.hpp"
#include "matmul_impl.hpp"
#include "attention_impl.hpp"
#include "attention_i16_impl.hpp"
#include "draw_impl.hpp"
#include "limits_impl.hpp"

extern const Kernels kernels = {"avxvnni", quantize, matmul, rms_norm, rope, silu_mul, store_kv, store_tile, store_query, attend, merge, finish, largest, weigh};
extern const Limits limits = {"avxvnni", limit_dots, limit_pairs, limit_fmas, limit_read};

}  // namespace radixrt::avxvnni
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
