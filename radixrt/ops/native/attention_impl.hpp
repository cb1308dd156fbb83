// Attention of some queries over a span of positions. Included inside the namespace of an instruction set, after rows_impl.hpp.
//
// Lanes are positions for scores and elements of a head for values; a position has the same lane wherever the span begins. For each
// chunk of 64 positions, in order, a query's part (m, s, values) is made so:
//   score   each position: acc := fma(q[d], k[d], acc) for d in order; score := acc * (scale * log2 e), -inf where it is not seen
//   m'      max(m, scores)
//   weight  2^(score - m'), exactly 0 where it is not seen;  shrink := 2^(m - m')
//   s       s * shrink + the sum of the weights, in an order that knows no zeros: each lane over its vectors, then the lanes
//   values  acc := values * shrink; acc := fma(weight, v, acc) for the positions in order; values := acc + 0 (so never -0)
// A position that is not seen changes no bit of it, so neither does what lies before or behind what a query sees, nor a whole chunk of it,
// and nothing depends on the queries beside it. (v must be finite where any query of the sequence sees it: 0 * inf is NaN.)

namespace attention {

constexpr int kTile = kWide >= 4 ? kWide : 3;  // queries and vectors of a tile of registers
constexpr int kVectors = kWide >= 4 ? 4 : 2;
constexpr int kChunkVectors = kChunk / kLanes;

// 2^x to 1e-7 of itself for x <= 0, 0 at -inf, NaN at NaN (max gives its second argument where one is NaN)
static inline F two_to(F x) {
    x = max(set1(-200), x);
    const F n = round(x), r = sub(x, n);
    F p = set1(0.00015353361959569156f);
    p = fma(p, r, set1(0.0013398875016719103f));
    p = fma(p, r, set1(0.00961843691766262f));
    p = fma(p, r, set1(0.055503323674201965f));
    p = fma(p, r, set1(0.24022647738456726f));
    p = fma(p, r, set1(0.6931471824645996f));
    p = fma(p, r, set1(1));
    return scale2(p, n);
}

static inline F minus_infinity() { return set1(-__builtin_inff()); }
constexpr float kLowest = -3.0e38f;  // in place of a maximum over nothing, so that -inf - it is no NaN

template <KV KIND>
static inline F load_kv(const void* base, size_t at, int n) {  // n elements from `at` on, up to 16, and zeros
    if constexpr (KIND == KV::kF32) {
        return load_some(static_cast<const float*>(base) + at, n);
    } else {
        const uint16_t* p = static_cast<const uint16_t*>(base) + at;
        uint16_t t[kLanes] = {};
        if (n < kLanes) {
            __builtin_memcpy(t, p, sizeof(uint16_t) * n);
            p = t;
        }
        return KIND == KV::kF16 ? load_f16(p) : load_bf16(p);
    }
}

// 16 columns of keys from the 16 rows at at[i] (a row of zeros where low <= i < high does not hold) to out[j * 64 ...]
template <KV KIND, bool WHOLE>
static inline __attribute__((always_inline)) void load_keys(const void* base, const size_t* at, int low, int high, int n, float* out) {
    F rows[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++)
        rows[i] = WHOLE ? load_kv<KIND>(base, at[i], kLanes) : i >= low && i < high ? load_kv<KIND>(base, at[i], n) : zero();
    transpose(rows);
    if constexpr (WHOLE) {
#pragma GCC unroll 16
        for (int j = 0; j < kLanes; j++) store(out + j * kChunk, rows[j]);
    } else {
        for (int j = 0; j < n && j < kLanes; j++) store(out + j * kChunk, rows[j]);
    }
}

// Positions low .. high of a chunk: keys as [dim][64], values as [64][dim padded to 16]. slots: of the position `low`.
template <KV KIND>
static void load_chunk(const KVHead& head, const int32_t* slots, int low, int high, float* keys, float* values) {
    const int dim = head.dim, padded = (dim + kLanes - 1) / kLanes * kLanes;
    slots -= low;
    for (int first = low / kLanes * kLanes; first < high; first += kLanes) {
        const int begin = low > first ? low - first : 0, end = high - first < kLanes ? high - first : kLanes;
        size_t at[kLanes] = {};
        for (int i = begin; i < end; i++) at[i] = size_t(slots[first + i]) * head.stride;
        for (int d = 0; d < dim; d += kLanes) {
            float* out = keys + d * kChunk + first;
            if (end - begin == kLanes && dim - d >= kLanes) load_keys<KIND, true>(head.k, at, 0, kLanes, kLanes, out);
            else load_keys<KIND, false>(head.k, at, begin, end, dim - d, out);
            for (int i = 0; i < kLanes; i++) at[i] += kLanes;
        }
        for (int i = begin; i < end; i++) {
            float* out = values + (first + i) * padded;
            at[i] = size_t(slots[first + i]) * head.stride;
            int d = 0;
            for (; d + kLanes <= dim; d += kLanes) store(out + d, load_kv<KIND>(head.v, at[i] + d, kLanes));
            if (d < dim) store(out + d, load_kv<KIND>(head.v, at[i] + d, dim - d));
        }
    }
}

// What is fetched while something else is computed: the rows of some slots, one with each step.
struct Ahead {
    const char* base = nullptr;
    const int32_t* slots = nullptr;
    int count = 0;
    size_t slot_bytes = 0, row_bytes = 0;

    void fetch(int i) const {
        if (i >= count) return;
        const char* row = base + size_t(slots[i]) * slot_bytes;
        for (size_t j = 0; j < row_bytes; j += 64) __builtin_prefetch(row + j, 0, 3);
    }
};

// acc[r][c] += sum over i = begin .. end, in order, of a[r][i] * b[i * stride + 16 c ...]
template <int R, int C>
static inline __attribute__((always_inline)) void products(const float* const* a, const float* b, int stride, int begin, int end,
                                                           const Ahead& ahead, F (&acc)[R][C]) {
    const float* rows[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) rows[r] = a[r];
    b += begin * stride;
    for (int i = begin; i < end; i++, b += stride) {
        ahead.fetch(i - begin);
        F column[C];
#pragma GCC unroll 16
        for (int c = 0; c < C; c++) column[c] = load(b + c * kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const F x = set1(rows[r][i]);
#pragma GCC unroll 16
            for (int c = 0; c < C; c++) acc[r][c] = fma(x, column[c], acc[r][c]);
        }
    }
}

template <int R, int C>
static inline void scores(const float* const* q, const float* keys, int dim, float scale, const Ahead& ahead, float* out) {
    F acc[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) acc[r][c] = zero();
    products<R, C>(q, keys, kChunk, 0, dim, ahead, acc);
    const F by = set1(scale);
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(out + r * kChunk + c * kLanes, mul(acc[r][c], by));
}

template <int R, int C>
static inline void sums(const float* const* weights, const float* values, int padded, int low, int high, const float* shrink,
                        float* const* part, int at, const Ahead& ahead) {
    F acc[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) acc[r][c] = mul(load(part[r] + 2 + at + c * kLanes), set1(shrink[r]));
    products<R, C>(weights, values + at, padded, low, high, ahead, acc);
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(part[r] + 2 + at + c * kLanes, add(acc[r][c], zero()));
}

struct Chunk {
    const float *keys, *values;
    float* weights;   // [kTile][64]
    int start, size;  // the first position; how many of the 64 there are at most
    int dim, padded;
    float scale;
    Ahead ahead_keys, ahead_values;
};

// R queries over one chunk
template <int R>
static void tile(const Chunk& c, const float* const* q, const int32_t* from, const int32_t* to, float* const* part) {
    int begin[R], end[R], low = kChunk, high = 0;
    for (int r = 0; r < R; r++) {
        begin[r] = from[r] > c.start ? from[r] - c.start : 0;
        end[r] = to[r] < c.start + c.size ? to[r] - c.start : c.size;
        if (begin[r] >= end[r]) continue;
        if (begin[r] < low) low = begin[r];
        if (end[r] > high) high = end[r];
    }
    if (low >= high) return;
    const int first_vector = low / kLanes, vectors = (high + kLanes - 1) / kLanes;
    for (int v = first_vector; v < vectors;) {
        const float* keys = c.keys + v * kLanes;
        float* out = c.weights + v * kLanes;
        const int n = vectors - v;
        if constexpr (kVectors == 4) {
            if (n >= 4) scores<R, 4>(q, keys, c.dim, c.scale, v == first_vector ? c.ahead_keys : Ahead{}, out), v += 4;
            else if (n == 3) scores<R, 3>(q, keys, c.dim, c.scale, v == first_vector ? c.ahead_keys : Ahead{}, out), v += 3;
        }
        if (n == 1) scores<R, 1>(q, keys, c.dim, c.scale, v == first_vector ? c.ahead_keys : Ahead{}, out), v += 1;
        else if (n == 2 || kVectors == 2) scores<R, 2>(q, keys, c.dim, c.scale, v == first_vector ? c.ahead_keys : Ahead{}, out), v += 2;
    }
    float shrink[R];
    const float* weights[R];
    for (int r = 0; r < R; r++) {
        float* w = c.weights + r * kChunk;
        weights[r] = w;
        F score[kChunkVectors], top = minus_infinity();
        for (int v = first_vector; v < vectors; v++) {
            F s = load(w + v * kLanes);
            if (begin[r] > v * kLanes || end[r] < (v + 1) * kLanes)
                s = first(minus_infinity(), begin[r] - v * kLanes, first(s, end[r] - v * kLanes, minus_infinity()));
            score[v] = s;
            top = max(s, top);
        }
        const float before = part[r][0], here = reduce_max(top), most = here > before ? here : before;
        const F shift = set1(most > kLowest ? most : kLowest);
        F sum = zero();
        for (int v = first_vector; v < vectors; v++) {
            const F e = two_to(sub(score[v], shift));
            store(w + v * kLanes, e);
            sum = add(sum, e);
        }
        shrink[r] = reduce_max(two_to(sub(set1(before), shift)));
        part[r][0] = most;
        part[r][1] = part[r][1] * shrink[r] + reduce_add(sum);
    }
    for (int at = 0; at < c.padded;) {
        const int n = (c.padded - at) / kLanes;
        if constexpr (kVectors == 4) {
            if (n >= 4) sums<R, 4>(weights, c.values, c.padded, low, high, shrink, part, at, at == 0 ? c.ahead_values : Ahead{}), at += 4 * kLanes;
            else if (n == 3) sums<R, 3>(weights, c.values, c.padded, low, high, shrink, part, at, at == 0 ? c.ahead_values : Ahead{}), at += 3 * kLanes;
        }
        if (n == 1) sums<R, 1>(weights, c.values, c.padded, low, high, shrink, part, at, at == 0 ? c.ahead_values : Ahead{}), at += kLanes;
        else if (n == 2 || kVectors == 2) sums<R, 2>(weights, c.values, c.padded, low, high, shrink, part, at, at == 0 ? c.ahead_values : Ahead{}), at += 2 * kLanes;
    }
}

template <int R>
static void tiles(int count, const Chunk& c, const float* const* q, const int32_t* from, const int32_t* to, float* const* part) {
    if (count >= R) return tile<R>(c, q, from, to, part);
    if constexpr (R > 1) tiles<R - 1>(count, c, q, from, to, part);
}

static void attend(const KVHead& head, const int32_t* slots, int begin, int end, const float* const* q, const int32_t* from,
                   const int32_t* to, int count, float scale, float* const* part, float* scratch) {
    const int padded = (head.dim + kLanes - 1) / kLanes * kLanes;
    for (int i = 0; i < count; i++) {
        part[i][0] = -__builtin_inff();
        part[i][1] = 0;
        for (int d = 0; d < padded; d += kLanes) store(part[i] + 2 + d, zero());
    }
    float *keys = scratch, *values = keys + padded * kChunk, *weights = values + padded * kChunk;
    for (int start = begin / kChunk * kChunk; start < end; start += kChunk) {
        const int low = begin > start ? begin - start : 0, high = end - start < kChunk ? end - start : kChunk;
        const int done = start + low - begin, behind = start + kChunk;  // what comes next is fetched while this is computed
        const int32_t* ahead = behind < end ? slots + (behind - begin) : head.ahead;
        const int left = behind < end ? end - behind : head.ahead_count, ahead_count = left < kChunk ? left : kChunk;
        if (head.kind == KV::kF32) load_chunk<KV::kF32>(head, slots + done, low, high, keys, values);
        else if (head.kind == KV::kF16) load_chunk<KV::kF16>(head, slots + done, low, high, keys, values);
        else load_chunk<KV::kBF16>(head, slots + done, low, high, keys, values);
        const size_t element = head.kind == KV::kF32 ? 4 : 2;
        const auto rows = [&](const void* base) {
            return Ahead{static_cast<const char*>(base), ahead, ahead_count, head.stride * element, head.dim * element};
        };
        Chunk chunk{keys, values, weights, start, high, head.dim, padded, scale * 1.44269504088896341f, rows(head.k), rows(head.v)};
        for (int i = 0; i < count; i += kTile) {
            tiles<kTile>(count - i, chunk, q + i, from + i, to + i, part + i);
            chunk.ahead_keys.count = chunk.ahead_values.count = 0;
        }
    }
}

static void merge(float* into, const float* from, int dim) {
    const float a = into[0], b = from[0], most = b > a ? b : a;
    const F shift = set1(most > kLowest ? most : kLowest);
    const F keep = two_to(sub(set1(a), shift)), take = two_to(sub(set1(b), shift));
    into[0] = most;
    into[1] = into[1] * reduce_max(keep) + from[1] * reduce_max(take);
    for (int d = 2; d < dim + 2; d += kLanes) store(into + d, fma(load(from + d), take, mul(load(into + d), keep)));
}

static void finish(const float* part, int dim, float* out) {
    const F by = set1(1 / part[1]);
    for (int d = 0; d < dim; d += kLanes) store_some(out + d, mul(load(part + 2 + d), by), dim - d);
}

}  // namespace attention

using attention::attend;
using attention::finish;
using attention::merge;
