// Attention of some queries over a span of positions. Included inside the namespace of an instruction set, after rows_impl.hpp.
//
// Lanes are positions for scores and elements of a head for values; a position has the same lane wherever a piece begins. First the scores
// of all queries, then their weights, then the sums; a query's part (m, s, values) is made so:
//   score   each position: acc := fma(q[d], k[d], acc) for d in order; score := acc * (scale * log2 e * the key's own scale), -inf where it is not seen
//   m       max(scores)
//   weight  2^(score - m), exactly 0 where it is not seen
//   s       the sum of the weights, in an order that knows no zeros: each lane over its vectors, then the lanes
//   values  acc := fma(weight, v, acc) for the positions in order, from 0; values := acc + 0 (so never -0)
// A position that is not seen changes no bit of it, so neither does what lies before or behind what a query sees, nor how the span is cut into
// pieces, and nothing depends on the queries beside it. (v must be finite where any query of the sequence sees it: 0 * inf is NaN.)

namespace attention {

constexpr int kTile = kWide >= 4 ? kWide : 3;  // queries and vectors of a tile of registers
constexpr int kVectors = kWide >= 4 ? 4 : 2;
constexpr int kSpanVectors = kSpan / kLanes;
constexpr int kStored = kTile < 4 ? kTile : 4;  // queries up to which values are not brought into float32 first

// 2^x to 2e-7 of itself for x <= 0, 0 at -inf, NaN at NaN (max gives its second argument where one is NaN)
static inline F two_to(F x) {
    x = max(set1(-200), x);
    const F n = round(x), r = sub(x, n);
    F p = set1(0.001326472731307149f);
    p = fma(p, r, set1(0.009671512991189957f));
    p = fma(p, r, set1(0.05550733581185341f));
    p = fma(p, r, set1(0.24022242426872253f));
    p = fma(p, r, set1(0.6931470036506653f));
    p = fma(p, r, set1(1));
    return scale2(p, n);
}

static inline F minus_infinity() { return set1(-__builtin_inff()); }
constexpr float kLowest = -3.0e38f;  // in place of a maximum over nothing, so that -inf - it is no NaN

template <KV KIND>
static inline F load_kv(const void* base, size_t at, int n) {  // n elements from `at` on, up to 16, and zeros
    if constexpr (KIND == KV::kF32) {
        return load_some(static_cast<const float*>(base) + at, n);
    } else if constexpr (KIND == KV::kI8) {
        const int8_t* p = static_cast<const int8_t*>(base) + at;
        int8_t t[kLanes] = {};
        if (n < kLanes) {
            __builtin_memcpy(t, p, size_t(n));
            p = t;
        }
        return load_i8(p);
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
static inline __attribute__((always_inline)) void load_columns(const void* base, const size_t* at, int low, int high, int n, float* out) {
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
    Ahead part(int i, int parts) const {  // of equal ones
        const int size = (count + parts - 1) / parts, begin = i * size < count ? i * size : count;
        Ahead some = *this;
        some.slots += begin, some.count = count - begin < size ? count - begin : size;
        return some;
    }
};

// Keys of the positions low .. high of a chunk as [dim][64]. slots: of the position `low`.
template <KV KIND>
static void load_keys(const KVHead& head, const int32_t* slots, int low, int high, float* keys, const Ahead& ahead) {
    slots -= low;
    int fetched = 0;
    const int columns = (head.dim + kLanes - 1) / kLanes, rows = (kLanes + columns - 1) / columns;  // fetched beside a block of 16 columns
    for (int first = low / kLanes * kLanes; first < high; first += kLanes) {
        const int begin = low > first ? low - first : 0, end = high - first < kLanes ? high - first : kLanes;
        size_t at[kLanes] = {};
        for (int i = begin; i < end; i++) at[i] = size_t(slots[first + i]) * head.stride;
        for (int d = 0; d < head.dim; d += kLanes) {
            float* out = keys + d * kChunk + first;
            for (const int behind = fetched + rows; fetched < behind; fetched++) ahead.fetch(fetched);
            if (end - begin == kLanes && head.dim - d >= kLanes) load_columns<KIND, true>(head.k, at, 0, kLanes, kLanes, out);
            else load_columns<KIND, false>(head.k, at, begin, end, head.dim - d, out);
            for (int i = 0; i < kLanes; i++) at[i] += kLanes;
        }
    }
}

// What the codes of a head in a slot are multiplied with; 1 where they are the numbers themselves.
template <KV KIND>
static inline float kv_scale(const void* base, size_t at, int dim) {
    float scale = 1;
    if constexpr (KIND == KV::kI8) __builtin_memcpy(&scale, static_cast<const char*>(base) + at + dim, sizeof scale);
    return scale;
}

// Values of `count` slots as [count][dim padded to 16].
template <KV KIND>
static void load_values(const KVHead& head, const int32_t* slots, int count, float* out) {
    const int dim = head.dim;
    const size_t stride = head.stride;
    const void* base = head.v;
    for (int i = 0; i < count; i++) {
        const size_t at = size_t(slots[i]) * stride;
        const F by = set1(kv_scale<KIND>(base, at, dim));
        const auto scaled = [by](F x) { return KIND == KV::kI8 ? mul(x, by) : x; };
        int d = 0;
        for (; d + kLanes <= dim; d += kLanes, out += kLanes) store(out, scaled(load_kv<KIND>(base, at + d, kLanes)));
        if (d < dim) store(out, scaled(load_kv<KIND>(base, at + d, dim - d))), out += kLanes;
    }
}

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

// Some positions of a piece: keys or values, and what is made of them.
struct Block {
    const float* rows;  // keys [dim][64], the position `start` first; values [positions][padded], the position `begin` first
    int start, begin, end;
    int dim, padded;
    const float* by;  // what the score of each of the 64 positions is multiplied with
};

// Which positions of a block any of R queries sees.
template <int R>
static inline bool seen(const Block& b, const int32_t* from, const int32_t* to, int& low, int& high) {
    low = b.end, high = b.begin;
    for (int r = 0; r < R; r++) {
        const int begin = from[r] > b.begin ? from[r] : b.begin, end = to[r] < b.end ? to[r] : b.end;
        if (begin >= end) continue;
        if (begin < low) low = begin;
        if (end > high) high = end;
    }
    return low < high;
}

template <int R, int C>
static inline void scores(const Block& b, const float* const* q, int vector, const Ahead& ahead, float* out) {
    F acc[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) acc[r][c] = zero();
    products<R, C>(q, b.rows + vector * kLanes, kChunk, 0, b.dim, ahead, acc);
    const float* by = b.by + vector * kLanes;
    const int position = b.start + vector * kLanes;
    out += vector * kLanes;
    if (position >= b.begin && position + C * kLanes <= b.end) {
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) store(out + r * kSpan + c * kLanes, mul(acc[r][c], load(by + c * kLanes)));
        return;
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) {  // what is beside the block is another piece's
            float* p = out + r * kSpan + c * kLanes;
            const int at = position + c * kLanes;
            const F old = load(p);
            store(p, first(old, b.begin - at, first(mul(acc[r][c], load(by + c * kLanes)), b.end - at, old)));
        }
}

// Scores of R queries over a block. out: of the first query, at the position `start`.
template <int R>
static void score_tile(const Block& b, const float* const* q, const int32_t* from, const int32_t* to, float* out, const Ahead& ahead) {
    int low, high;
    if (!seen<R>(b, from, to, low, high)) return;
    const int first = (low - b.start) / kLanes, vectors = (high - b.start + kLanes - 1) / kLanes;
    for (int v = first; v < vectors;) {
        const int n = vectors - v;
        const Ahead& now = v == first ? ahead : Ahead{};
        if constexpr (kVectors == 4) {
            if (n >= 4) scores<R, 4>(b, q, v, now, out), v += 4;
            else if (n == 3) scores<R, 3>(b, q, v, now, out), v += 3;
        }
        if (n == 1) scores<R, 1>(b, q, v, now, out), v += 1;
        else if (n == 2 || kVectors == 2) scores<R, 2>(b, q, v, now, out), v += 2;
    }
}

// A row of scores of a span, of which begin .. end are seen, becomes weights; m and s go to the part.
template <bool WHOLE>
static inline void weigh_row(float* row, int begin, int end, float* part) {
    const int low = WHOLE ? 0 : begin / kLanes, high = WHOLE ? kSpanVectors : (end + kLanes - 1) / kLanes;
    F score[kSpanVectors], top = minus_infinity();
#pragma GCC unroll 8
    for (int v = low; v < high; v++) {
        F s = load(row + v * kLanes);
        if (!WHOLE && (begin > v * kLanes || end < (v + 1) * kLanes))
            s = first(minus_infinity(), begin - v * kLanes, first(s, end - v * kLanes, minus_infinity()));
        score[v] = s;
        top = max(s, top);
    }
    const float most = reduce_max(top);
    const F shift = set1(most > kLowest ? most : kLowest);
    F sum = zero();
#pragma GCC unroll 8
    for (int v = low; v < high; v++) {
        const F e = two_to(sub(score[v], shift));
        store(row + v * kLanes, e);
        sum = add(sum, e);
    }
    part[0] = most;
    part[1] = reduce_add(sum);
    if constexpr (WHOLE) return;
    for (int v = 0; v < low; v++) store(row + v * kLanes, zero());
    for (int v = high; v < kSpanVectors; v++) store(row + v * kLanes, zero());
}

template <int R, int C>
static inline void sums(const float* const* weights, const float* values, int padded, int begin, int end, float* const* part, int at,
                        const Ahead& ahead) {
    F acc[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) acc[r][c] = load(part[r] + 2 + at + c * kLanes);
    products<R, C>(weights, values + at, padded, begin, end, ahead, acc);
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(part[r] + 2 + at + c * kLanes, add(acc[r][c], zero()));
}

// Sums of a block's values with the weights of R queries. weights: of the first query, at the block's first position.
template <int R>
static void sum_tile(const Block& b, const float* weights, const int32_t* from, const int32_t* to, float* const* part, const Ahead& ahead) {
    int low, high;
    if (!seen<R>(b, from, to, low, high)) return;
    low -= b.begin, high -= b.begin;
    const float* rows[R];
    for (int r = 0; r < R; r++) rows[r] = weights + r * kSpan;
    for (int at = 0; at < b.padded;) {
        const int n = (b.padded - at) / kLanes;
        const Ahead& now = at == 0 ? ahead : Ahead{};
        if constexpr (kVectors == 4) {
            if (n >= 4) sums<R, 4>(rows, b.rows, b.padded, low, high, part, at, now), at += 4 * kLanes;
            else if (n == 3) sums<R, 3>(rows, b.rows, b.padded, low, high, part, at, now), at += 3 * kLanes;
        }
        if (n == 1) sums<R, 1>(rows, b.rows, b.padded, low, high, part, at, now), at += kLanes;
        else if (n == 2 || kVectors == 2) sums<R, 2>(rows, b.rows, b.padded, low, high, part, at, now), at += 2 * kLanes;
    }
}

// The same sums for the queries of one tile, from the values as they are stored: nobody else reads them here.
template <KV KIND, int R>
static void sum_stored(const KVHead& head, const int32_t* slots, const Block& b, const float* weights, const int32_t* from, const int32_t* to,
                       float* const* part, const Ahead& ahead) {
    int low, high;
    if (!seen<R>(b, from, to, low, high)) return;
    const float* rows = weights - b.begin;
    slots -= b.begin;
    const size_t stride = head.stride;
    const void* base = head.v;
    for (int at = 0; at < b.padded; at += kVectors * kLanes) {
        F acc[R][kVectors];
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int c = 0; c < kVectors; c++) acc[r][c] = load(part[r] + 2 + at + c * kLanes);
        for (int i = low; i < high; i++) {
            if (at == 0) ahead.fetch(i - low);
            const size_t row = size_t(slots[i]) * stride;
            F column[kVectors];
#pragma GCC unroll 4
            for (int c = 0; c < kVectors; c++) column[c] = load_kv<KIND>(base, row + at + c * kLanes, kLanes);
            if constexpr (KIND == KV::kI8) {
                const F by = set1(kv_scale<KIND>(base, row, head.dim));
#pragma GCC unroll 4
                for (int c = 0; c < kVectors; c++) column[c] = mul(column[c], by);
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                const F x = set1(rows[r * kSpan + i]);
#pragma GCC unroll 4
                for (int c = 0; c < kVectors; c++) acc[r][c] = fma(x, column[c], acc[r][c]);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int c = 0; c < kVectors; c++) store(part[r] + 2 + at + c * kLanes, add(acc[r][c], zero()));
    }
}

template <KV KIND, int R>
static void sum_stored_tile(int count, const KVHead& head, const int32_t* slots, const Block& b, const float* weights, const int32_t* from,
                            const int32_t* to, float* const* part, const Ahead& ahead) {
    if (count >= R) return sum_stored<KIND, R>(head, slots, b, weights, from, to, part, ahead);
    if constexpr (R > 1) sum_stored_tile<KIND, R - 1>(count, head, slots, b, weights, from, to, part, ahead);
}

template <int R>
static void score_tiles(int count, const Block& b, const float* const* q, const int32_t* from, const int32_t* to, float* out,
                        const Ahead& ahead) {
    if (count >= R) return score_tile<R>(b, q, from, to, out, ahead);
    if constexpr (R > 1) score_tiles<R - 1>(count, b, q, from, to, out, ahead);
}

template <int R>
static void sum_tiles(int count, const Block& b, const float* weights, const int32_t* from, const int32_t* to, float* const* part,
                      const Ahead& ahead) {
    if (count >= R) return sum_tile<R>(b, weights, from, to, part, ahead);
    if constexpr (R > 1) sum_tiles<R - 1>(count, b, weights, from, to, part, ahead);
}

template <KV KIND>
static void attend_to(const KVHead& head, const Piece* pieces, int piece_count, const float* const* q, const int32_t* from,
                      const int32_t* to, int count, float scale, float* const* part, float* scratch) {
    const int padded = (head.dim + kLanes - 1) / kLanes * kLanes, span = pieces[0].begin / kSpan * kSpan;
    float *rows = scratch, *by = rows + 2 * padded * kChunk, *weights = by + kChunk;
    const size_t element = kv_element(KIND);
    scale *= 1.44269504088896341f;
    for (int i = 0; i < kChunk; i += kLanes) store(by + i, set1(scale));
    const auto ahead = [&](const void* base, const int32_t* slots, int n) {
        return Ahead{static_cast<const char*>(base), slots, n, head.stride * element, kv_bytes(KIND, head.dim)};
    };
    for (int p = 0; p < piece_count; p++) {
        const Piece& piece = pieces[p];
        if (p + 1 < piece_count) {
            const Ahead next = ahead(head.k, pieces[p + 1].slots, pieces[p + 1].end - pieces[p + 1].begin);
            for (int i = 0; i < next.count; i++) next.fetch(i);
        }
        for (int start = piece.begin / kChunk * kChunk; start < piece.end; start += kChunk) {
            const int begin = piece.begin > start ? piece.begin : start, end = piece.end < start + kChunk ? piece.end : start + kChunk;
            const int32_t* slots = piece.slots + (begin - piece.begin);
            const Ahead values = ahead(head.v, slots, end - begin);  // fetched in most of the time there is
            const int tiles = (piece.last - piece.first + kTile - 1) / kTile;
            load_keys<KIND>(head, slots, begin - start, end - start, rows, tiles == 1 ? values : Ahead{});
            if constexpr (KIND == KV::kI8)
                for (int i = begin; i < end; i++) by[i - start] = scale * kv_scale<KIND>(head.k, size_t(slots[i - begin]) * head.stride, head.dim);
            const Block block{rows, start, begin, end, head.dim, padded, by};
            for (int i = piece.first, t = 0; i < piece.last; i += kTile, t++)
                score_tiles<kTile>(piece.last - i, block, q + i, from + i, to + i, weights + i * kSpan + (start - span),
                                   tiles == 1 ? Ahead{} : values.part(t, tiles));
        }
    }
    for (int i = 0; i < count; i++) {
        const int begin = from[i] > span ? from[i] - span : 0, end = to[i] - span < kSpan ? to[i] - span : kSpan;
        for (int d = 0; d < padded; d += kLanes) store(part[i] + 2 + d, zero());
        if (begin == 0 && end == kSpan) weigh_row<true>(weights + i * kSpan, begin, end, part[i]);
        else if (begin < end) weigh_row<false>(weights + i * kSpan, begin, end, part[i]);
        else {
            part[i][0] = -__builtin_inff(), part[i][1] = 0;
            for (int v = 0; v < kSpanVectors; v++) store(weights + i * kSpan + v * kLanes, zero());
        }
    }
    const int at_once = padded <= kChunk ? kSpan : kChunk;  // in the first cache
    for (int p = 0; p < piece_count; p++) {
        const Piece& piece = pieces[p];
        const bool last = p + 1 == piece_count;
        if (!last) {
            const Ahead next = ahead(head.v, pieces[p + 1].slots, pieces[p + 1].end - pieces[p + 1].begin);
            for (int i = 0; i < next.count; i++) next.fetch(i);
        }
        for (int begin = piece.begin; begin < piece.end; begin += at_once) {
            const int end = piece.end - begin < at_once ? piece.end : begin + at_once;
            if (piece.last - piece.first <= kStored && head.dim % (kVectors * kLanes) == 0) {
                const Block block{nullptr, piece.begin, piece.begin, piece.end, head.dim, padded, nullptr};
                const int i = piece.first;
                sum_stored_tile<KIND, kStored>(piece.last - i, head, piece.slots, block, weights + i * kSpan + (piece.begin - span), from + i, to + i,
                                               part + i, ahead(head.ahead_k, head.ahead, last ? head.ahead_count : 0));
                break;
            }
            const Ahead next = ahead(head.ahead_k, head.ahead, last && end == piece.end ? head.ahead_count : 0);
            load_values<KIND>(head, piece.slots + (begin - piece.begin), end - begin, rows);
            const Block block{rows, begin, begin, end, head.dim, padded, nullptr};
            const int tiles = (piece.last - piece.first + kTile - 1) / kTile;
            for (int i = piece.first, t = 0; i < piece.last; i += kTile, t++)
                sum_tiles<kTile>(piece.last - i, block, weights + i * kSpan + (begin - span), from + i, to + i, part + i, next.part(t, tiles));
        }
    }
}

// of KV in tiles: attention_i16_impl.hpp
static void attend_by_tiles(const KVHead& head, const Piece* pieces, int piece_count, const float* const* q, const int32_t* from,
                            const int32_t* to, int count, float scale, float* const* part, float* scratch);

static void attend(const KVHead& head, const Piece* pieces, int piece_count, const float* const* q, const int32_t* from, const int32_t* to,
                   int count, float scale, float* const* part, float* scratch) {
    if (head.kind == KV::kF32) attend_to<KV::kF32>(head, pieces, piece_count, q, from, to, count, scale, part, scratch);
    else if (head.kind == KV::kF16) attend_to<KV::kF16>(head, pieces, piece_count, q, from, to, count, scale, part, scratch);
    else if (head.kind == KV::kI16) attend_by_tiles(head, pieces, piece_count, q, from, to, count, scale, part, scratch);
    else if (head.kind == KV::kI8) attend_to<KV::kI8>(head, pieces, piece_count, q, from, to, count, scale, part, scratch);
    else attend_to<KV::kBF16>(head, pieces, piece_count, q, from, to, count, scale, part, scratch);
}

// Of the two parts the one with the larger score keeps its numbers, the other is scaled: fma(part, scale, into), or into * scale + part.
static void merge(float* into, const float* from, int dim) {
    const float a = into[0], b = from[0], most = b > a ? b : a, least = b > a ? a : b;
    const F scale = two_to(set1(least - (most > kLowest ? most : kLowest)));
    float one[kLanes];
    store(one, scale);
    into[0] = most;
    if (b > a) {
        into[1] = into[1] * one[0] + from[1];
        for (int d = 2; d < dim + 2; d += kLanes) store(into + d, fma(load(into + d), scale, load(from + d)));
    } else {
        into[1] = into[1] + from[1] * one[0];
        for (int d = 2; d < dim + 2; d += kLanes) store(into + d, fma(load(from + d), scale, load(into + d)));
    }
}

static void finish(const float* part, int dim, float* out) {
    const F by = set1(1 / part[1]);
    for (int d = 0; d < dim; d += kLanes) store_some(out + d, mul(load(part + 2 + d), by), dim - d);
}

}  // namespace attention

using attention::attend;
using attention::finish;
using attention::merge;
