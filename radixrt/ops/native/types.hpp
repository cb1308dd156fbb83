// Plain data that crosses the borders between the variants: nothing here depends on an instruction set.
//
// Everything but products of codes is computed in float32. Every output element of every kernel is made by the same sequence of floating-point
// operations whatever else is computed beside it: a row's result does not depend on the batch it is in.
#pragma once
#include <cstddef>
#include <cstdint>

namespace radixrt {

constexpr int kLanes = 16;   // outputs of a weight tile; lanes of the logical vector on every machine
constexpr int kBlock = 32;   // elements of a quantization block
constexpr int kChunk = 64;   // positions of KV that attention loads at once
constexpr int kSpan = 128;   // positions whose attention is computed from scratch and merged, in order; starts at its multiples

constexpr int kMostQueries = 96;  // of one call of an attention kernel
constexpr int kMostDim = 4096;    // of a head whose KV is stored in tiles

enum class Kind : int { kQ4 = 0, kQ8 = 1, kF32 = 2, kF16 = 3, kBF16 = 4 };  // how weights are stored

// How keys and values are stored.
//   kF32 .. kI8   slot after slot. kI8: the codes of a head, -127 .. 127, and behind them the float32 that each of them is multiplied with
//   kI16          in tiles of 16 slots, as they are multiplied: the codes of a head, its elements padded to a multiple of 16 with zeros, and
//                 behind them the 16 float32 that each slot's codes are multiplied with
//                 keys     [elements / 2][16 slots][2]
//                 values   [16 slots / 2][elements][2 slots]
enum class KV : int { kF32 = 0, kF16 = 1, kBF16 = 2, kI8 = 3, kI16 = 4 };
inline int whole_lanes(int dim) { return (dim + kLanes - 1) / kLanes * kLanes; }
inline size_t kv_element(KV kind) { return kind == KV::kF32 ? 4 : kind == KV::kI8 ? 1 : 2; }
inline size_t kv_elements(KV kind, int dim) {  // of a head in a slot
    return kind == KV::kI16 ? size_t(whole_lanes(dim)) + 2 : size_t(dim) + (kind == KV::kI8 ? 4 : 0);
}
inline size_t kv_bytes(KV kind, int dim) { return kv_element(kind) * kv_elements(kind, dim); }
inline size_t tile_bytes(int dim) { return kLanes * kv_bytes(KV::kI16, dim); }
// of a query, which beside keys of kI16 is the int16 codes of its elements, padded as theirs, and a float32
inline size_t query_floats(KV kind, int dim) { return kind == KV::kI16 ? size_t(whole_lanes(dim)) / 2 + 1 : size_t(dim); }

// A weight matrix [n, k], in tiles of 16 outputs (n padded with zeros):
//   kQ4, kQ8   a tile is k / group groups after one another. A group is its codes and then its scales:
//              codes   for each 4 elements of k: 16 lanes x 4 unsigned bytes (kQ8); kQ4: 64 bytes hold the elements 4i .. 4i+3
//                      in the low and 4i + group/2 .. in the high four bits
//              scales  d[16], then m[16] where `mins` is set; float16, or float32 where `wide` is set
//              value = d * code + m, and m = -offset * d where `mins` is not set
//   kF*        a tile is k x 16 elements
struct Matrix {
    const uint8_t* data = nullptr;
    const float* bias = nullptr;  // [n padded] or none
    int n = 0, k = 0;
    Kind kind = Kind::kF32;
    int group = kBlock;           // 32 or 16
    int offset = 0;
    bool mins = false, wide = false;
    int tiles() const { return (n + kLanes - 1) / kLanes; }
};

inline size_t group_bytes(const Matrix& w) {
    return size_t(w.group) * kLanes / (w.kind == Kind::kQ4 ? 2 : 1) + size_t(kLanes) * (w.wide ? 4 : 2) * (w.mins ? 2 : 1);
}

inline size_t matrix_bytes(const Matrix& w) {
    const size_t tiles = size_t(w.tiles());
    if (w.kind == Kind::kQ4 || w.kind == Kind::kQ8) return tiles * size_t(w.k / w.group) * group_bytes(w);
    return tiles * kLanes * size_t(w.k) * (w.kind == Kind::kF32 ? 4 : 2);
}

// Rows of activations: float32, and for quantized matrices signed bytes with a scale a group of 16 or 32.
//   value ~ scale * code;  sum = sum of the group's codes;  weight = scale * sum
struct Rows {
    const float* x = nullptr;         // [rows, k] (float matrices)
    const int8_t* codes = nullptr;    // [rows, k]
    const float* scale = nullptr;     // [rows, k / group]
    const float* weight = nullptr;    // [rows, k / group]
    const int32_t* sum = nullptr;     // [rows, k / group]
    int rows = 0, k = 0;
};

// Keys and values that are attended to after the next matrices: brought into the second cache while those are multiplied, which leaves the memory
// idle half of the time. Blocks of 16 slots are in the order in which they are attended to, and each is numbered once for every stream: the keys
// or the values of a head.
struct Near {
    const uint32_t* blocks = nullptr;
    size_t first_stream = 0, streams = 0;
    const uint8_t *k = nullptr, *v = nullptr;
    size_t head_bytes = 0, block_bytes = 0;
    size_t next = 0, end = 0;          // of the numbered ones
    const uint8_t *at = nullptr, *behind = nullptr;

    size_t lines() const { return (end - next) * ((block_bytes + 63) / 64); }
    void step(int lines) {
        for (; lines > 0; lines--, at += 64) {
            if (at >= behind) {
                if (next >= end) return;
                const size_t stream = first_stream + next % streams;
                at = (stream % 2 ? v : k) + stream / 2 * head_bytes + blocks[next / streams] * block_bytes;
                behind = at + block_bytes;
                next++;
            }
            __builtin_prefetch(at, 0, 2);
        }
    }
};

}  // namespace radixrt
