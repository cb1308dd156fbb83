// The kernels on any machine: what the others are compared with. No model is computed with them, so they are compiled quickly.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O1")
#endif
#include <cmath>
#include <cstring>

#include "kernels.hpp"
#include "limits.hpp"

#include "simd_portable.hpp"

namespace radixrt::portable {

#include "rows_impl.hpp"
#include "matmul_impl.hpp"
#include "attention_impl.hpp"
#include "attention_i16_impl.hpp"
#include "draw_impl.hpp"
#include "limits_impl.hpp"

extern const Kernels kernels = {"portable", quantize, matmul, rms_norm, rope, silu_mul, store_kv, store_tile, store_query, attend, merge, finish, largest, weigh};
extern const Limits limits = {"portable", limit_dots, limit_pairs, limit_fmas, limit_read};

}  // namespace radixrt::portable
