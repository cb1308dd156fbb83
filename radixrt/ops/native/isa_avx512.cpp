// The kernels on AVX-512 with VNNI.
#include <cmath>
#include <cstring>

#include "kernels.hpp"
#include "limits.hpp"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")
#endif
#include "simd_avx512.hpp"

namespace radixrt::avx512 {

#include "rows_impl.hpp"
#include "matmul_impl.hpp"
#include "attention_impl.hpp"
#include "attention_i16_impl.hpp"
#include "draw_impl.hpp"
#include "limits_impl.hpp"

extern const Kernels kernels = {"avx512", quantize, matmul, rms_norm, rope, silu_mul, store_kv, store_tile, store_query, attend, merge, finish, largest, weigh};
extern const Limits limits = {"avx512", limit_dots, limit_pairs, limit_fmas, limit_read};

}  // namespace radixrt::avx512
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
