// Which kernels this machine runs.
#include <cstring>
#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "kernels.hpp"
#include "limits.hpp"

namespace radixrt {

namespace portable { extern const Kernels kernels; extern const Limits limits; }
#if defined(__x86_64__)
namespace avx512 { extern const Kernels kernels; extern const Limits limits; }
namespace avxvnni { extern const Kernels kernels; extern const Limits limits; }
namespace avx2 { extern const Kernels kernels; extern const Limits limits; }
#elif defined(__aarch64__)
namespace neon { extern const Kernels kernels; extern const Limits limits; }
#endif

namespace {

struct Choice {
    const Kernels* kernels;
    const Limits* limits;
    bool here;
};

// best first; ends with the portable ones
const Choice* choices() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool two = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool wide = two && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
    static const Choice all[] = {{&avx512::kernels, &avx512::limits, wide},
                                 {&avxvnni::kernels, &avxvnni::limits, two && __builtin_cpu_supports("avxvnni")},
                                 {&avx2::kernels, &avx2::limits, two},
                                 {&portable::kernels, &portable::limits, true}};
#elif defined(__aarch64__)
#if defined(__APPLE__) || defined(__ARM_FEATURE_DOTPROD)
    const bool dot = true;  // every one of them has it, or the compiler was told so
#elif defined(__linux__)
    const bool dot = getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
    const bool dot = false;
#endif
    static const Choice all[] = {{&neon::kernels, &neon::limits, dot}, {&portable::kernels, &portable::limits, true}};
#else
    static const Choice all[] = {{&portable::kernels, &portable::limits, true}};
#endif
    return all;
}

const Choice* best() {
    const Choice* c = choices();
    while (!c->here) c++;
    return c;
}

}  // namespace

const Kernels* best_kernels() { return best()->kernels; }
const Limits* best_limits() { return best()->limits; }

const Kernels* kernels_by_name(const char* name) {
    for (const Choice* c = choices();; c++) {
        if (!std::strcmp(c->kernels->name, name)) return c->here ? c->kernels : nullptr;
        if (c->kernels == &portable::kernels) return nullptr;
    }
}

}  // namespace radixrt
