// The kernels on 64-bit ARM with the dot product instructions (ARMv8.2).
#include <cmath>
#include <cstring>

#include "kernels.hpp"
#include "limits.hpp"

#if defined(__aarch64__)
#if defined(__ARM_FEATURE_DOTPROD)  // the compiler was told of a machine that has them, and perhaps more
#elif defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#define RADIXRT_POP
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#include "simd_neon.hpp"

namespace radixrt::neon {

#include "rows_impl.hpp"
#include "matmul_impl.hpp"
#include "attention_impl.hpp"
#include "attention_i16_impl.hpp"
#include "draw_impl.hpp"
#include "limits_impl.hpp"

extern const Kernels kernels = {"neon", quantize, matmul, rms_norm, rope, silu_mul, store_kv, store_tile, store_query, attend, merge, finish, largest, weigh};
extern const Limits limits = {"neon", limit_dots, limit_pairs, limit_fmas, limit_read};

}  // namespace radixrt::neon
#ifdef RADIXRT_POP
#pragma clang attribute pop
#endif
#endif
