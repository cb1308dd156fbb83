// The kernels of one instruction set, as a table: chosen once, when an engine starts.
//
// A kernel runs on the calling thread and allocates nothing.
#pragma once
#include "types.hpp"

namespace radixrt {

struct KVHead {  // keys and values of one head of one layer
    const void* k;
    const void* v;
    size_t stride;  // elements between two slots (kI16: of a slot, a tile has 16 times as many)
    int dim;
    KV kind;
    const void* ahead_k = nullptr;  // the keys, of this head or the next one, that will be attended to next, in these slots: they are fetched meanwhile
    const int32_t* ahead = nullptr;
    int ahead_count = 0;
};

struct Piece {  // positions of a span, and which queries attend to them
    int begin, end;
    const int32_t* slots;  // of the position `begin`
    int first, last;       // queries
};

struct Kernels {
    const char* name;
    // -- matmul.cpp
    // one row: codes, scale, weight, sum as `Rows` has them; k is a multiple of group
    void (*quantize)(const float* x, int k, int group, int8_t* codes, float* scale, float* weight, int32_t* sum);
    // out[r * stride + n] (= or += with `add`) x[r] . w[n] + bias[n], for the outputs n < w.n of tiles begin .. end
    // near: what to fetch while quantized weights are multiplied, or null
    void (*matmul)(const Matrix& w, int begin, int end, const Rows& x, float* out, size_t stride, bool add, Near* near);
    // -- rows.hpp
    void (*rms_norm)(const float* x, const float* weight, float eps, int k, float* out);
    void (*rope)(float* head, const float* cos, const float* sin, int half);  // in place, halves of the head are the pairs' parts
    void (*silu_mul)(const float* gate, const float* up, int n, float* out);
    void (*store_kv)(const float* from, int n, KV kind, void* to);  // a kind that is stored slot after slot
    void (*store_tile)(const float* from, int dim, bool key, void* tiles, size_t slot);  // kI16: a key or a value of a slot of the tiles
    void (*store_query)(const float* from, int dim, void* to);                           // beside kI16, as query_floats has it
    // -- attention kernels
    // Attention of `count` queries over positions of one span, from scratch.
    //   pieces    a query's have its positions, in order and no two of them the same one
    //   q         `count` pointers to queries of head.dim elements, or as store_query makes them
    //   from, to  for each query the positions it sees: from <= position < to, and in its pieces
    //   part      for each query a pointer to 2 + dim rounded up to 16 floats: largest score, sum of weights, weighted sum of values
    //   scratch   Attention::kernel_floats(dim) floats, best aligned to 64 bytes
    void (*attend)(const KVHead& head, const Piece* pieces, int piece_count, const float* const* q, const int32_t* from, const int32_t* to,
                   int count, float scale, float* const* part, float* scratch);
    // into := into merged with part; a part that saw nothing (sum 0) changes nothing
    void (*merge)(float* into, const float* part, int dim);
    void (*finish)(const float* part, int dim, float* out);  // out[dim] := values / sum
    // -- logits, n a multiple of 16
    float (*largest)(const float* logits, int n);  // NaN where one is no number or infinite
    float (*weigh)(const float* logits, int n, float most, float scale);  // the sum of 2^((logit - most) * scale)
};

const Kernels* best_kernels();                    // of this machine; the portable ones at worst
const Kernels* kernels_by_name(const char* name);  // "avx512", "avxvnni", "avx2", "neon", "portable"; null: unknown or not for this machine

}  // namespace radixrt
