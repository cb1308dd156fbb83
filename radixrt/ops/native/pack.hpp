// Weights from GGUF blocks, or from rows of floats, into the tiles of `Matrix`. Done once, when a model is loaded.
//
// A packed value code * d + m is the block's own: d and m are those stored, or their exact products with the scales of a
// K block rounded once to float32.
#pragma once
#include <cstring>

#include "types.hpp"

namespace radixrt {

enum class Type : int {  // as GGUF numbers them
    kF32 = 0, kF16 = 1, kQ4_0 = 2, kQ4_1 = 3, kQ5_0 = 6, kQ5_1 = 7, kQ8_0 = 8, kQ4_K = 12, kQ5_K = 13, kQ6_K = 14, kBF16 = 30
};

struct Block {      // how rows of a type are stored, and what of them is packed
    int elements;   // of a block
    int bytes;
    Kind kind;
    int group, offset;
    bool mins, wide;
};

// false where the type is not known
inline bool block_of(Type type, Block& b) {
    switch (type) {
        case Type::kF32: b = {1, 4, Kind::kF32, kBlock, 0, false, false}; return true;
        case Type::kF16: b = {1, 2, Kind::kF16, kBlock, 0, false, false}; return true;
        case Type::kBF16: b = {1, 2, Kind::kBF16, kBlock, 0, false, false}; return true;
        case Type::kQ4_0: b = {32, 18, Kind::kQ4, 32, 8, false, false}; return true;
        case Type::kQ4_1: b = {32, 20, Kind::kQ4, 32, 0, true, false}; return true;
        case Type::kQ5_0: b = {32, 22, Kind::kQ8, 32, 16, false, false}; return true;
        case Type::kQ5_1: b = {32, 24, Kind::kQ8, 32, 0, true, false}; return true;
        case Type::kQ8_0: b = {32, 34, Kind::kQ8, 32, 128, false, false}; return true;
        case Type::kQ4_K: b = {256, 144, Kind::kQ4, 32, 0, true, true}; return true;
        case Type::kQ5_K: b = {256, 176, Kind::kQ8, 32, 0, true, true}; return true;
        case Type::kQ6_K: b = {256, 210, Kind::kQ8, 16, 32, false, true}; return true;
    }
    return false;
}

inline Matrix matrix_of(const Block& b, int n, int k) {
    Matrix w;
    w.n = n, w.k = k;
    w.kind = b.kind, w.group = b.group, w.offset = b.offset, w.mins = b.mins, w.wide = b.wide;
    return w;
}

inline size_t row_bytes(const Block& b, int k) { return size_t(k / b.elements) * b.bytes; }

namespace packing {

inline uint32_t word(const uint8_t* p) {
    uint32_t w;
    std::memcpy(&w, p, 4);
    return w;
}
inline float half(const uint8_t* p) {
    uint32_t h = p[0] | uint32_t(p[1]) << 8, u;
    const uint32_t sign = (h & 0x8000) << 16;
    h &= 0x7fff;
    if (h < 0x400) {
        const float f = float(h) * 0x1p-24f;
        return sign ? -f : f;
    }
    u = sign | (h >= 0x7c00 ? 0x7f800000 | h << 13 : (h << 13) + 0x38000000);
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}
inline uint32_t low(uint32_t w) { return w & 0x0f0f0f0f; }
inline uint32_t high(uint32_t w) { return w >> 4 & 0x0f0f0f0f; }
inline uint32_t spread(uint32_t four) { return (four & 15) * 0x00204081 & 0x01010101; }  // 4 bits to 4 bytes
inline void scale_and_min(const uint8_t* s, int i, int& scale, int& min) {               // of the 12 bytes of a K block
    scale = i < 4 ? s[i] & 63 : (s[i + 4] & 15) | (s[i - 4] >> 6) << 4;
    min = i < 4 ? s[i + 4] & 63 : s[i + 4] >> 4 | (s[i] >> 6) << 4;
}

struct Group {  // one group of one row: its codes as `Matrix` has them, 4 to a word
    uint32_t codes[8];
    uint16_t d16, m16;  // where they are not wide
    float d, m;
};

// group i of a block
inline void read_group(Type type, const uint8_t* p, int i, Group& g) {
    const uint8_t* q = nullptr;
    switch (type) {
        case Type::kQ4_0: q = p + 2; break;
        case Type::kQ4_1: q = p + 4; break;
        case Type::kQ5_0: q = p + 6; break;
        case Type::kQ5_1: q = p + 8; break;
        case Type::kQ8_0: q = p + 2; break;
        default: break;
    }
    if (q) {
        std::memcpy(&g.d16, p, 2);
        std::memcpy(&g.m16, p + 2, 2);  // whatever it is, where there are no mins
    }
    int scale, min;
    switch (type) {
        case Type::kQ4_0:
        case Type::kQ4_1:
            for (int j = 0; j < 4; j++) g.codes[j] = word(q + 4 * j);
            break;
        case Type::kQ5_0:
        case Type::kQ5_1: {
            const uint32_t fifth = word(q - 4);
            for (int j = 0; j < 4; j++) {
                g.codes[j] = low(word(q + 4 * j)) | spread(fifth >> 4 * j) << 4;
                g.codes[j + 4] = high(word(q + 4 * j)) | spread(fifth >> (4 * j + 16)) << 4;
            }
            break;
        }
        case Type::kQ8_0:
            for (int j = 0; j < 8; j++) g.codes[j] = word(q + 4 * j) ^ 0x80808080;
            break;
        case Type::kQ4_K:
        case Type::kQ5_K:
            scale_and_min(p + 4, i, scale, min);
            g.d = half(p) * float(scale);
            g.m = -(half(p + 2) * float(min));
            q = p + (type == Type::kQ4_K ? 16 : 48) + i / 2 * 32;
            for (int j = 0; j < 8; j++) {
                const uint32_t both = word(q + 4 * j);
                g.codes[j] = i % 2 ? high(both) : low(both);
                if (type == Type::kQ5_K) g.codes[j] |= (word(p + 16 + 4 * j) >> i & 0x01010101) << 4;
            }
            if (type == Type::kQ4_K)
                for (int j = 0; j < 4; j++) g.codes[j] |= g.codes[j + 4] << 4;
            break;
        case Type::kQ6_K: {
            const int part = i / 8, quarter = i % 8 / 2, at = i % 2 * 16;  // elements 32 quarter + at of this half of the block
            const uint8_t* ql = p + 64 * part + quarter % 2 * 32 + at;
            const uint8_t* qh = p + 128 + 32 * part + at;
            for (int j = 0; j < 4; j++) {
                const uint32_t both = word(ql + 4 * j);
                g.codes[j] = (quarter < 2 ? low(both) : high(both)) | (word(qh + 4 * j) >> 2 * quarter & 0x03030303) << 4;
            }
            g.d = half(p + 208) * float(int8_t(p[192 + i]));
            break;
        }
        default: break;
    }
}

template <class T>
inline void put(uint8_t* to, int lane, T value) {
    std::memcpy(to + lane * sizeof(T), &value, sizeof(T));
}

// TYPE is a constant: of read_group only its own case is left in the loop
template <Type TYPE>
void quantized_tile(const Block& b, const uint8_t* const* rows, int count, int k, uint8_t* to) {
    const int words = b.kind == Kind::kQ4 ? b.group / 8 : b.group / 4, groups = b.elements / b.group;
    const size_t step = group_bytes(matrix_of(b, kLanes, b.elements));
    const int scale_bytes = kLanes * (b.wide ? 4 : 2);
    for (int block = 0; block < k / b.elements; block++)
        for (int i = 0; i < groups; i++, to += step)
            for (int lane = 0; lane < count; lane++) {
                Group g{};
                read_group(TYPE, rows[lane] + size_t(block) * b.bytes, i, g);
                for (int j = 0; j < words; j++) put(to + 64 * j, lane, g.codes[j]);
                uint8_t* s = to + 64 * words;
                if (b.wide) {
                    put(s, lane, g.d);
                    if (b.mins) put(s + scale_bytes, lane, g.m);
                } else {
                    put(s, lane, g.d16);
                    if (b.mins) put(s + scale_bytes, lane, g.m16);
                }
            }
}

template <class T>
void float_tile(const uint8_t* const* rows, int count, int k, uint8_t* to) {
    for (int lane = 0; lane < count; lane++)
        for (int i = 0; i < k; i++) std::memcpy(to + (size_t(i) * kLanes + lane) * sizeof(T), rows[lane] + i * sizeof(T), sizeof(T));
}

}  // namespace packing

// Output j of a matrix [n, k] is the row of blocks at rows[j]. Writes all matrix_bytes of it, zeros behind the last output.
inline void pack(Type type, const uint8_t* const* rows, int n, int k, uint8_t* to) {
    using namespace packing;
    Block b;
    if (!block_of(type, b)) return;
    const size_t size = matrix_bytes(matrix_of(b, kLanes, k));
    for (int j = 0; j < n; j += kLanes, to += size) {
        const int count = n - j < kLanes ? n - j : kLanes;
        if (count < kLanes) std::memset(to, 0, size);
        switch (type) {
            case Type::kF32: float_tile<uint32_t>(rows + j, count, k, to); break;
            case Type::kF16:
            case Type::kBF16: float_tile<uint16_t>(rows + j, count, k, to); break;
            case Type::kQ4_0: quantized_tile<Type::kQ4_0>(b, rows + j, count, k, to); break;
            case Type::kQ4_1: quantized_tile<Type::kQ4_1>(b, rows + j, count, k, to); break;
            case Type::kQ5_0: quantized_tile<Type::kQ5_0>(b, rows + j, count, k, to); break;
            case Type::kQ5_1: quantized_tile<Type::kQ5_1>(b, rows + j, count, k, to); break;
            case Type::kQ8_0: quantized_tile<Type::kQ8_0>(b, rows + j, count, k, to); break;
            case Type::kQ4_K: quantized_tile<Type::kQ4_K>(b, rows + j, count, k, to); break;
            case Type::kQ5_K: quantized_tile<Type::kQ5_K>(b, rows + j, count, k, to); break;
            case Type::kQ6_K: quantized_tile<Type::kQ6_K>(b, rows + j, count, k, to); break;
        }
    }
}

}  // namespace radixrt
