// Every variant of the kernels that this machine runs against the portable one, on random data.
//
// All numbers are equal, floats too: the portable kernels must be compiled for a machine that fuses multiplication and addition. What is
// computed for many rows is also computed for each alone, and has the same bits. Prints the variants compared and "best NAME"; the first
// difference of each kernel is described, and any makes the exit status 1.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "attention.hpp"
#include "kernels.hpp"

using namespace radixrt;

namespace {

using Floats = std::vector<float>;

struct Random {
    uint64_t state = 88172645463325252u;
    uint32_t bits() {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        return uint32_t(state >> 32);
    }
    float uniform(float most) { return (float(bits() >> 8) / float(1 << 23) - 1) * most; }
    Floats floats(size_t n, float most) {
        Floats x(n);
        for (float& y : x) y = uniform(most);
        return x;
    }
};

class Check {
public:
    Check(const Kernels& of, const Kernels& reference) : of_(of), reference_(reference) {}

    // calls f(kernels) for both, which gives a vector of rows of `row` numbers
    template <class Call>
    void same(const std::string& what, size_t row, Call f) {
        const auto got = f(of_), want = f(reference_);
        for (size_t i = 0; i < want.size(); i++) {
            if (got[i] == want[i] || (got[i] != got[i] && want[i] != want[i])) continue;
            std::printf("%s: %s[%zu][%zu] is %.9g, and %.9g with the portable kernels\n", of_.name, what.c_str(), i / row, i % row,
                        double(got[i]), double(want[i]));
            failed = true;
            return;
        }
        count += want.size();
    }

    void exact(const std::string& what, const Floats& got, const Floats& want) {
        if (got.size() == want.size() && !std::memcmp(got.data(), want.data(), sizeof(float) * got.size())) return;
        std::printf("%s: %s has other bits alone than with others\n", of_.name, what.c_str());
        failed = true;
    }

    bool failed = false;
    size_t count = 0;

private:
    const Kernels &of_, &reference_;
};

struct Quantized {
    std::vector<int8_t> codes;
    Floats scale, weight;
    std::vector<int32_t> sum;

    Quantized(const Kernels& kernels, const Floats& x, int k, int group)
        : codes(x.size()), scale(x.size() / size_t(group)), weight(scale.size()), sum(scale.size()) {
        for (size_t at = 0; at < x.size(); at += size_t(k)) {
            const size_t g = at / size_t(group);
            kernels.quantize(&x[at], k, group, &codes[at], &scale[g], &weight[g], &sum[g]);
        }
    }
};

struct Format {
    const char* name;
    Kind kind;
    int group, offset;
    bool mins, wide;
    uint32_t codes;  // the bits they have; above 127 they may be where the offset is 64 or more
};

// codes of those bits; half and float32 of a size that a scale has
std::vector<uint8_t> weights(const Matrix& w, uint32_t bits, Random& random) {
    std::vector<uint8_t> data(matrix_bytes(w));
    const auto put = [&](size_t at, bool wide) {
        const float f = random.uniform(0.125f);
        const uint16_t half = uint16_t(random.bits() & 0xbfff);  // below 2, denormals too
        if (wide) std::memcpy(&data[at], &f, 4);
        else std::memcpy(&data[at], &half, 2);
    };
    if (w.kind == Kind::kF32 || w.kind == Kind::kF16 || w.kind == Kind::kBF16) {
        const size_t size = w.kind == Kind::kF32 ? 4 : 2;
        for (size_t at = 0; at < data.size(); at += size) put(at, size == 4);
        return data;
    }
    const size_t codes = size_t(w.group) * kLanes / (w.kind == Kind::kQ4 ? 2 : 1), size = w.wide ? 4 : 2;
    for (size_t group = 0; group < data.size(); group += group_bytes(w)) {
        for (size_t i = 0; i < codes; i++) data[group + i] = uint8_t(random.bits() & bits);
        for (size_t at = group + codes; at < group + group_bytes(w); at += size) put(at, w.wide);
    }
    return data;
}

void matmuls(Check& check, const Kernels& of) {
    const Format formats[] = {
        {"q4", Kind::kQ4, 32, 8, false, false, 255},
        {"q4 with mins", Kind::kQ4, 32, 0, true, false, 255},
        {"q4 wide", Kind::kQ4, 32, 0, true, true, 255},
        {"q8", Kind::kQ8, 32, 128, false, false, 255},
        {"q8 of 5 bits", Kind::kQ8, 32, 16, false, false, 127},
        {"q8 with mins", Kind::kQ8, 32, 0, true, false, 127},
        {"q8 wide", Kind::kQ8, 32, 0, true, true, 127},
        {"q8 groups of 16", Kind::kQ8, 16, 32, false, true, 127},
        {"f32", Kind::kF32, 1, 0, false, false, 0},
        {"f16", Kind::kF16, 1, 0, false, false, 0},
        {"bf16", Kind::kBF16, 1, 0, false, false, 0},
    };
    constexpr int rows = 13, n = 88, tiles = 6;  // an output tile of which half is there; 4 + 2 tiles, and more rows than any tile has
    Random random;
    for (const Format& format : formats) {
        Matrix w;
        w.kind = format.kind, w.group = format.group, w.offset = format.offset, w.mins = format.mins, w.wide = format.wide;
        w.n = n, w.k = format.group == 1 ? 67 : 160;
        const std::vector<uint8_t> data = weights(w, format.codes, random);
        const Floats bias = random.floats(tiles * kLanes, 1), before = random.floats(rows * n, 1);
        Floats x = random.floats(size_t(rows * w.k), 3);
        for (int i = 0; i < w.k; i++) x[size_t(i)] = i % 2 ? 3.f : -3.f;  // codes of 127 and -127
        w.data = data.data();
        const int group = format.group == 1 ? w.k : format.group;
        for (const bool add : {false, true}) {
            w.bias = add ? nullptr : bias.data();
            const auto some = [&](const Kernels& kernels, int first, int count) {
                const auto at = x.begin() + first * w.k;
                const Floats taken(at, at + count * w.k);
                Rows r;
                r.x = taken.data(), r.rows = count, r.k = w.k;
                const Quantized q(kernels, format.group == 1 ? Floats() : taken, w.k, group);
                r.codes = q.codes.data(), r.scale = q.scale.data(), r.weight = q.weight.data(), r.sum = q.sum.data();
                Floats out(before.begin() + first * n, before.begin() + (first + count) * n);
                kernels.matmul(w, 0, 1, r, out.data(), n, add, nullptr);
                kernels.matmul(w, 1, tiles, r, out.data(), n, add, nullptr);
                return out;
            };
            const std::string what = std::string("matmul ") + format.name + (add ? " added" : "");
            check.same(what, n, [&](const Kernels& kernels) { return some(kernels, 0, rows); });
            Floats alone;
            for (int row = 0; row < rows; row++) {
                const Floats out = some(of, row, 1);
                alone.insert(alone.end(), out.begin(), out.end());
            }
            check.exact(what, alone, some(of, 0, rows));
        }
    }
}

// All bits; without `finite` only what scales have, as numbers, since the codes beside NaN are of no account.
std::vector<double> words_of(const Floats& tile, bool finite) {
    std::vector<double> words;
    for (const float& x : tile) {
        int32_t bits;
        std::memcpy(&bits, &x, 4);
        words.push_back(finite ? bits : x != x ? double(x) : 0);
    }
    return words;
}

void rows(Check& check) {
    Random random;
    for (const int group : {16, 32}) {
        constexpr int k = 32 * 8;
        Floats x = random.floats(k, 5);
        for (int i = 0; i < 32; i++) x[size_t(i)] = 0, x[size_t(32 + i)] *= 1e-32f, x[size_t(64 + i)] *= 1e30f;
        x[100] = NAN, x[140] = INFINITY, x[170] = -INFINITY;
        for (int i = 0; i < 32; i++) x[size_t(192 + i)] = float(i % 16) - 7.5f;  // halves are rounded to even
        x[192 + 15] = x[192 + 31] = 127;
        const auto of = [&](const Kernels& kernels) { return Quantized(kernels, x, k, group); };
        check.same("quantize: codes", size_t(group), [&](const Kernels& kernels) { return of(kernels).codes; });
        check.same("quantize: sum", 1, [&](const Kernels& kernels) { return of(kernels).sum; });
        check.same("quantize: scale", 1, [&](const Kernels& kernels) { return of(kernels).scale; });
        check.same("quantize: weight", 1, [&](const Kernels& kernels) { return of(kernels).weight; });
    }
    for (const int n : {576, 100, 7}) {
        const Floats x = random.floats(size_t(n), 20), y = random.floats(size_t(n), 2);
        check.same("rms_norm", size_t(n), [&](const Kernels& kernels) {
            Floats out(size_t(n), 9);
            kernels.rms_norm(x.data(), y.data(), 1e-5f, n, out.data());
            return out;
        });
        Floats gate = random.floats(size_t(n), 100);
        gate[0] = 0, gate[1] = 90, gate[2] = -90, gate[3] = INFINITY, gate[4] = 1e-20f;
        check.same("silu_mul", 1, [&](const Kernels& kernels) {
            Floats out(size_t(n), 9);
            kernels.silu_mul(gate.data(), y.data(), n, out.data());
            for (float& o : out) o = std::fabs(o) < 1e-37f ? 0 : o;  // there it is a matter of denormals
            return out;
        });
        check.same("rope", size_t(2 * n), [&](const Kernels& kernels) {
            Floats head = x;
            head.insert(head.end(), y.begin(), y.end());
            kernels.rope(head.data(), y.data(), x.data(), n);
            return head;
        });
        for (const KV kind : {KV::kF32, KV::kF16, KV::kBF16, KV::kI8}) {
            Floats from = x;
            from[0] = 65519, from[1] = 65520, from[2] = 3e-6f, from[3] = -2e-8f, from[4] = 1 + 1.f / 2048;
            if (kind != KV::kI8) from[5] = NAN, from[6] = -INFINITY;
            check.same("store_kv", size_t(2 * n) + 2, [&](const Kernels& kernels) {
                std::vector<uint16_t> to(size_t(2 * n) + 2, 9);
                kernels.store_kv(from.data(), n, kind, to.data());
                return to;
            });
        }
        for (const bool key : {true, false})
            for (const float first : {65519.f, NAN, -INFINITY, 1e30f}) {
                Floats from = x;
                from[0] = first;
                const bool finite = std::isfinite(first);
                check.same("store_tile", tile_bytes(n) / 4, [&](const Kernels& kernels) {
                    Floats to(tile_bytes(n) / 4, 9);
                    for (const size_t slot : {0, 7, 15}) kernels.store_tile(from.data(), n, key, to.data(), slot);
                    return words_of(to, finite);
                });
            }
        check.same("store_query", query_floats(KV::kI16, n), [&](const Kernels& kernels) {
            Floats to(query_floats(KV::kI16, n), 9);
            kernels.store_query(x.data(), n, to.data());
            return words_of(to, true);
        });
    }
}

void attention(Check& check, const Kernels& of) {
    Random random;
    constexpr int slots = 304, count = 7;
    const Kernels& reference = *kernels_by_name("portable");
    for (const int dim : {64, 40})
        for (const KV kind : {KV::kF32, KV::kF16, KV::kBF16, KV::kI8, KV::kI16}) {
            const bool tiled = kind == KV::kI16;
            const int stride_heads = tiled ? 1 : 2;
            const size_t part = Attention::part_floats(dim);
            std::vector<char> keys(size_t(slots * stride_heads) * kv_bytes(kind, dim)), values(keys.size());
            for (std::vector<char>* to : {&keys, &values})
                for (size_t row = 0; row < size_t(slots * stride_heads); row++) {
                    const Floats x = random.floats(size_t(dim), 2);
                    if (tiled) reference.store_tile(x.data(), dim, to == &keys, to->data(), row);
                    else reference.store_kv(x.data(), dim, kind, &(*to)[row * kv_bytes(kind, dim)]);
                }
            std::vector<int32_t> slot(256);
            for (auto& s : slot) s = int32_t(random.bits() % slots);
            for (size_t i = 40; i < 120; i++) slot[i] = int32_t(i + 3);  // runs, which tiles are read in
            for (size_t i = 128; i < 256; i++) slot[i] = int32_t(i + 48);
            const size_t floats = query_floats(kind, dim);
            Floats q = random.floats(size_t(count * dim), 2);
            if (tiled) {
                Floats codes(size_t(count) * floats);
                for (size_t i = 0; i < count; i++) reference.store_query(&q[i * size_t(dim)], dim, &codes[i * floats]);
                q = codes;
            }
            const KVHead head{keys.data(), values.data(), size_t(stride_heads) * kv_elements(kind, dim), dim, kind};
            const int32_t from[count] = {0, 0, 5, 130, 70, 31, 0}, to[count] = {256, 128, 150, 243, 71, 200, 1};
            // query i of `only`, or all
            const auto attend = [&](const Kernels& kernels, int begin, int end, int only) {
                Floats parts(count * part, -7), scratch(Attention::kernel_floats(dim));
                const float* queries[count];
                float* into[count];
                for (int i = 0; i < count; i++) queries[i] = &q[size_t(i) * floats], into[i] = &parts[size_t(i) * part];
                const int first = only < 0 ? 0 : only;
                const int some = only < 0 ? count : 1, middle = (begin + end) / 2;
                const Piece pieces[] = {{begin, middle, &slot[size_t(begin)], 0, some}, {middle, end, &slot[size_t(middle)], 0, some}};
                int32_t low[count], high[count];
                for (int i = 0; i < count; i++) low[i] = std::max(from[i], begin), high[i] = std::min(to[i], end);
                kernels.attend(head, pieces, 2, queries + first, low + first, high + first, some, 0.125f, into + first, scratch.data());
                return only < 0 ? parts : Floats(into[only], into[only] + part);
            };
            const auto done = [&](const Kernels& kernels) {
                Floats a = attend(kernels, 3, 128, -1), b = attend(kernels, 128, 250, -1), out(size_t(count * dim));
                for (size_t i = 0; i < count; i++) {
                    kernels.merge(&a[i * part], &b[i * part], dim);
                    kernels.finish(&a[i * part], dim, &out[i * size_t(dim)]);
                }
                return out;
            };
            check.same("attend", part, [&](const Kernels& kernels) { return attend(kernels, 3, 128, -1); });
            check.same("attend, merge, finish", size_t(dim), done);
            Floats alone;
            for (int i = 0; i < count; i++) {
                const Floats one = attend(of, 3, 128, i);
                alone.insert(alone.end(), one.begin(), one.end());
            }
            check.exact("attend", alone, attend(of, 3, 128, -1));
        }
}

}  // namespace

int main() {
    const Kernels& reference = *kernels_by_name("portable");
    bool failed = false;
    for (const char* name : {"avx512", "avxvnni", "avx2", "neon", "portable"}) {
        const Kernels* of = kernels_by_name(name);
        if (!of) continue;
        Check check(*of, reference);
        matmuls(check, *of);
        rows(check);
        attention(check, *of);
        failed |= check.failed;
        std::printf("%s: %zu numbers compared\n", name, check.count);
    }
    std::printf("best %s\n", best_kernels()->name);
    return failed;
}
