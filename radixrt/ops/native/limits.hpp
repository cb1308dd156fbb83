// Loops that do nothing but what a machine is limited by, for measuring it.
#pragma once
#include <cstddef>
#include <cstdint>

namespace radixrt {

struct Limits {
    const char* name;
    // each returns the operations done: multiplications and additions
    int64_t (*dots)(int64_t rounds, const uint8_t* weights, const int8_t* x);  // 64 bytes each
    int64_t (*pairs)(int64_t rounds, const uint8_t* keys, const int16_t* x);   // 64 bytes, 32 shorts
    int64_t (*fmas)(int64_t rounds, const float* x);                           // 64 floats
    void (*read)(const uint8_t* from, size_t bytes, int32_t* sink);            // bytes: a multiple of 4096
};

const Limits* best_limits();  // of the kernels that best_kernels() chooses

}  // namespace radixrt
