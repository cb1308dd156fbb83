// Attention of some queries over a span of positions whose keys and values are int16 codes in tiles of 16 slots. Included inside the namespace of
// an instruction set, after attention_impl.hpp.
//
// Nothing is brought into another form: scores are sums of products of two shorts, 16 slots at a time, and a query's part is made so:
//   score   the exact integer sum over the head, * the key's scale, * (scale * log2 e * the query's scale)
//   m, s    as for other kinds
//   code    of a weight: weight * the value's scale * kWeightCode / the largest such product of the row, to the nearest
//   values  the exact integer sum of code * value's code, * the largest product / kWeightCode
// Integers have no order, so how a span is cut into pieces changes no bit, and what is not seen has the code 0.
//
// Consecutive slots are a run. A run may begin anywhere in a tile: the lanes beside it are computed and dropped, or multiplied with 0.

namespace attention {

struct KeyTile {
    const uint8_t* codes;
    const uint8_t* soon;  // read after them: the values of these slots, if they lie together too
    const float* scales;
    int position, low, high;   // of lane 0; the positions that it holds
};

static inline int run_length(const int32_t* slots, int count) {
    int n = 1;
    while (n < count) {
        if (count - n >= kLanes) {
            int32_t other = 0;
            for (int i = 0; i < kLanes; i++) other |= slots[n + i] ^ (slots[0] + n + i);
            if (other == 0) {
                n += kLanes;
                continue;
            }
        }
        if (slots[n] != slots[0] + n) break;
        n++;
    }
    return n;
}

struct Run {
    unsigned slot;
    int position, count;
};

// The runs of the piece that was asked for last.
struct Runs {
    Run all[kSpan];
    int count = 0;

    const Runs& of(const Piece& piece) {
        if (piece_ == &piece) return *this;
        piece_ = &piece;
        count = 0;
        for (int p = piece.begin; p < piece.end; p += all[count - 1].count) {
            const int32_t* slots = piece.slots + (p - piece.begin);
            all[count++] = {unsigned(slots[0]), p, run_length(slots, piece.end - p)};
        }
        return *this;
    }

private:
    const Piece* piece_ = nullptr;
};

struct Pairs {  // of slots, in one tile of values
    const uint8_t* values;
    const uint8_t* fetched;  // meanwhile
    int word, count;         // of the weights' codes, two to a word, from the span's begin on
    int low, high;           // positions
};

constexpr int kRun = 8;       // consecutive slots whose keys are read where they are, when many queries read them
constexpr int kGathered = 16;  // tiles of a span's keys that are read elsewhere, at most: a run of kRun or the end lies behind each

// The keys of a piece in tiles.
static int key_tiles(const KVHead& head, const Piece& piece, const Runs& runs, float* gathered, KeyTile* tiles) {
    static_assert(kGathered * (kRun + 1) >= kSpan, "a run of kRun or more lies between two that are not full");
    // what is gathered stands behind the rows of all queries, see attend_by_tiles
    static_assert(kGathered * kLanes + 2 * kLanes <= 5 * kChunk && kGathered * kLanes / 2 <= 2 * kChunk, "Attention::kernel_floats is too little");
    const int padded = whole_lanes(head.dim), least = piece.last - piece.first <= kTile ? 1 : kRun;
    const size_t bytes = tile_bytes(head.dim), scales = size_t(padded) * kLanes * 2;
    const auto* k = static_cast<const uint8_t*>(head.k);
    const ptrdiff_t values = static_cast<const uint8_t*>(head.v) - k;
    KeyTile* tile = tiles;
    int gathering = kLanes;  // lanes of the last tile, or all where it is not a gathered one
    float* to = nullptr;
    for (int i = 0; i < runs.count; i++) {
        const Run& run = runs.all[i];
        const int behind = run.position + run.count;
        if (run.count >= least) {
            const unsigned first = run.slot / kLanes;
            const uint8_t* codes = k + first * bytes;
            for (int at = run.position - int(run.slot % kLanes); at < behind; at += kLanes, codes += bytes)
                *tile++ = {codes, codes + values, reinterpret_cast<const float*>(codes + scales), at, at > run.position ? at : run.position,
                           at + kLanes < behind ? at + kLanes : behind};
            gathering = kLanes;
            continue;
        }
        for (int j = 0; j < run.count; j++) {
            if (gathering == kLanes) {
                to = gathered;
                gathered += (padded / 2 + 1) * kLanes;
                const auto* codes = reinterpret_cast<const uint8_t*>(to);
                const int at = run.position + j;
                *tile++ = {codes, codes, to + padded / 2 * kLanes, at, at, at};
                gathering = 0;
            }
            const unsigned slot = run.slot + unsigned(j);
            const uint8_t* from = k + slot / kLanes * bytes + slot % kLanes * 4;
            for (int d = 0; d <= padded / 2; d++) __builtin_memcpy(to + d * kLanes + gathering, from + d * kLanes * 4, 4);  // the last is the scale
            gathering++, tile[-1].high++;
        }
    }
    return int(tile - tiles);
}

// Which of some things that lie in order any of R queries sees.
template <int R, class Thing>
static inline bool seen_of(const Thing* things, int count, const int32_t* from, const int32_t* to, int& first, int& last) {
    int low = from[0], high = to[0];
    for (int r = 1; r < R; r++) {
        if (from[r] < low) low = from[r];
        if (to[r] > high) high = to[r];
    }
    first = 0, last = count;
    while (first < last && things[first].high <= low) first++;
    while (first < last && things[last - 1].low >= high) last--;
    return first < last;
}

// sums[r][c][16]: the products of R queries with the keys of C tiles.
template <int R, int C>
static void dot_tiles(const KeyTile* tiles, int padded, const float* const* q, int32_t* sums) {
    I acc[R][C];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) acc[r][c] = izero();
    const uint8_t *key[C], *soon[C];
    for (int c = 0; c < C; c++) key[c] = tiles[c].codes, soon[c] = tiles[c].soon;
    const int16_t* x[R];
    for (int r = 0; r < R; r++) x[r] = reinterpret_cast<const int16_t*>(q[r]);
    for (int i = 0; i < padded / 2; i++) {
        B codes[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) codes[c] = load_bytes(key[c] + i * 64);
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) __builtin_prefetch(soon[c] + i * 64, 0, 3);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) acc[r][c] = dot2(acc[r][c], codes[c], x[r] + 2 * i);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) store_ints(sums + (r * C + c) * kLanes, acc[r][c]);
}

template <int R, int C>
static void score_tiles(const KeyTile* tiles, int padded, const float* const* q, const float* by, float* out) {
    alignas(64) int32_t sums[R * C * kLanes];
    dot_tiles<R, C>(tiles, padded, q, sums);
    for (int c = 0; c < C; c++) {
        const KeyTile& tile = tiles[c];
        const F scales = load(tile.scales);
        const int before = tile.low - tile.position, behind = tile.high - tile.position;
        for (int r = 0; r < R; r++) {
            float* to = out + r * kSpan + tile.position;
            F score = mul(mul(to_float(load_ints(sums + (r * C + c) * kLanes)), scales), set1(by[r]));
            if (behind - before < kLanes) {  // what is beside it is another run's
                const F old = load(to);
                score = first(old, before, first(score, behind, old));
            }
            store(to, score);
        }
    }
}

template <int R>
static void score_by_tiles(int count, const KeyTile* tiles, int tile_count, int padded, const float* const* q, const float* by,
                           const int32_t* from, const int32_t* to, float* out) {
    if constexpr (R > 1)
        if (count < R) return score_by_tiles<R - 1>(count, tiles, tile_count, padded, q, by, from, to, out);
    int t, last;
    if (!seen_of<R>(tiles, tile_count, from, to, t, last)) return;
    for (; last - t >= kVectors; t += kVectors) score_tiles<R, kVectors>(tiles + t, padded, q, by, out);
    if constexpr (kVectors == 4)
        if (last - t == 3) return score_tiles<R, 3>(tiles + t, padded, q, by, out);
    if constexpr (kVectors == 4)
        if (last - t == 2) return score_tiles<R, 2>(tiles + t, padded, q, by, out);
    if (last - t == 1) score_tiles<R, 1>(tiles + t, padded, q, by, out);
}

// Scores of a row, of which begin .. end are seen, become the codes of weight times scale of the value, anywhere but for the eight vectors
// themselves; m and s go to the part. Returns what a code is worth.
template <bool WHOLE>
static inline float code_row(const float* row, const float* scales, int begin, int end, bool poisoned, float* part, int16_t* codes) {
    F x[kSpanVectors], top = minus_infinity();
#pragma GCC unroll 8
    for (int v = 0; v < kSpanVectors; v++) {
        x[v] = load(row + v * kLanes);
        if (!WHOLE) x[v] = first(minus_infinity(), begin - v * kLanes, first(x[v], end - v * kLanes, minus_infinity()));
        top = max(x[v], top);
    }
    const float most = reduce_max(top);
    const F shift = set1(most > kLowest ? most : kLowest);
    F sum = zero(), high = zero();
#pragma GCC unroll 8
    for (int v = 0; v < kSpanVectors; v++) {
        const F e = two_to(sub(x[v], shift));
        sum = add(sum, e);
        x[v] = max(mul(e, load(scales + v * kLanes)), zero());  // 0 also for a value that is NaN, which may not be seen
        high = max(x[v], high);
    }
    part[0] = most;
    part[1] = reduce_add(sum);
    const float largest = reduce_max(high);
    const bool small = !(largest > 1e-30f);
    const F by = set1(small ? 0 : kWeightCode / largest);
#pragma GCC unroll 8
    for (int v = 0; v < kSpanVectors; v++) store_shorts(codes + v * kLanes, to_int(mul(x[v], by)));
    float worth = small ? 0 : largest / kWeightCode;
    if (poisoned)
        for (int i = begin; i < end; i++) worth += scales[i] * 0;  // NaN if a value that is seen is not finite
    return worth;
}

// The runs of all pieces that query i has, and the scales of its values by position in the span, 0 beside them.
static int runs_of(const KVHead& head, const Piece* pieces, int piece_count, int i, int span, Runs& found, Run* runs, float* scales) {
    const size_t bytes = tile_bytes(head.dim), behind = size_t(whole_lanes(head.dim)) * kLanes * 2;
    for (int v = 0; v < kSpanVectors; v++) store(scales + v * kLanes, zero());
    int n = 0;
    for (int p = 0; p < piece_count; p++) {
        if (i < pieces[p].first || i >= pieces[p].last) continue;
        const Runs& of = found.of(pieces[p]);
        for (int r = 0; r < of.count; r++) {
            const Run run = runs[n++] = of.all[r];
            const char* tile = static_cast<const char*>(head.v) + run.slot / kLanes * bytes + behind;
            const int before = int(run.slot % kLanes);
            float* to = scales + (run.position - span) - before;
            for (int j = 0; j < before + run.count; j += kLanes, tile += bytes, to += kLanes) {
                F x = load(reinterpret_cast<const float*>(tile));
                const int behind_run = before + run.count - j;
                if (j < before || behind_run < kLanes) {
                    const F old = load(to);
                    x = first(old, before - j, first(x, behind_run, old));
                }
                store(to, x);
            }
        }
    }
    return n;
}

// Slots that make pairs with those of a run, but are not in it, have the weight 0.
static inline void pair_ends(const Run& run, int span, float* row) {
    const int odd = int(run.slot & 1);
    const int16_t none = 0;
    auto* to = reinterpret_cast<char*>(row + (run.position - span));
    if (odd) __builtin_memcpy(to, &none, 2);
    if ((odd + run.count) & 1) __builtin_memcpy(to + (odd + run.count) * 2, &none, 2);
}

// Codes of weights of positions become words of two slots each, as their values stand in pairs.
static inline void pair_codes(const int16_t* codes, const Run* runs, int count, int span, float* row) {
    for (int i = 0; i < count; i++) {
        const int at = runs[i].position - span;
        __builtin_memcpy(reinterpret_cast<char*>(row + at) + (runs[i].slot & 1) * 2, codes + at, size_t(runs[i].count) * 2);
        pair_ends(runs[i], span, row);
    }
}

static int value_pairs(const KVHead& head, const Runs& runs, int span, bool last, Pairs* pairs) {
    constexpr unsigned half = kLanes / 2;
    const size_t bytes = tile_bytes(head.dim), pair_bytes = size_t(whole_lanes(head.dim)) * 4;
    Pairs* to = pairs;
    for (int i = 0; i < runs.count; i++) {
        const Run& run = runs.all[i];
        const unsigned first = run.slot / 2, behind = (run.slot + unsigned(run.count) + 1) / 2;
        const uint8_t* tile = static_cast<const uint8_t*>(head.v) + first / half * bytes;
        int at = run.position - int(run.slot & 1), word = run.position - span;
        for (unsigned pair = first, in = first % half; pair < behind; in = 0, tile += bytes) {
            const int count = int(behind - pair < half - in ? behind - pair : half - in);
            *to++ = {tile + in * pair_bytes, nullptr, word, count, at, at + 2 * count};
            pair += unsigned(count), word += count, at += 2 * count;
        }
    }
    const int n = int(to - pairs);
    if (last)
        for (int i = 0; i < n && i * kLanes < head.ahead_count; i++)
            pairs[i].fetched = static_cast<const uint8_t*>(head.ahead_k) + unsigned(head.ahead[i * kLanes]) / kLanes * bytes;
    return n;
}

template <int R, int C>
static inline void add_pairs(const Pairs* pairs, int first, int last, int padded, const float* row, float* const* part, int at) {
    I acc[R][C];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) acc[r][c] = load_ints(reinterpret_cast<const int32_t*>(part[r] + 2 + at + c * kLanes));
    for (int p = first; p < last; p++) {
        const uint8_t *values = pairs[p].values + at * 4, *fetched = at == 0 ? pairs[p].fetched : nullptr;
        const auto* words = reinterpret_cast<const int16_t*>(row + pairs[p].word);
        for (int i = 0; i < pairs[p].count; i++, values += padded * 4, words += 2) {
            B codes[C];
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) codes[c] = load_bytes(values + c * 64);
            if (fetched) {
                const uint8_t* from = fetched + i * padded * 4;
                for (int j = 0; j < padded * 4; j += 64) __builtin_prefetch(from + j, 0, 3);
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                for (int c = 0; c < C; c++) acc[r][c] = dot2(acc[r][c], codes[c], words + r * kSpan * 2);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) store_ints(reinterpret_cast<int32_t*>(part[r] + 2 + at + c * kLanes), acc[r][c]);
}

template <int R>
static void sum_by_pairs(int count, const Pairs* pairs, int pair_count, int padded, const float* row, const int32_t* from, const int32_t* to,
                         float* const* part) {
    if constexpr (R > 1)
        if (count < R) return sum_by_pairs<R - 1>(count, pairs, pair_count, padded, row, from, to, part);
    int first, last;
    if (!seen_of<R>(pairs, pair_count, from, to, first, last)) return;
    int at = 0;
    for (; padded - at >= kVectors * kLanes; at += kVectors * kLanes) add_pairs<R, kVectors>(pairs, first, last, padded, row, part, at);
    for (; at < padded; at += kLanes) add_pairs<R, 1>(pairs, first, last, padded, row, part, at);
}

static void attend_by_tiles(const KVHead& head, const Piece* pieces, int piece_count, const float* const* q, const int32_t* from,
                            const int32_t* to, int count, float scale, float* const* part, float* scratch) {
    const int padded = whole_lanes(head.dim), span = pieces[0].begin / kSpan * kSpan;
    float *rows = scratch + kLanes, *gathered = rows + count * kSpan + kLanes;  // a tile that a run begins in reaches beyond a row
    float worth[kMostQueries];
    for (int i = 0; i < count; i++) worth[i] = scale * 1.44269504088896341f * q[i][padded / 2];
    Runs found;
    for (int p = 0; p < piece_count; p++) {
        const Piece& piece = pieces[p];
        KeyTile tiles[kSpan];
        const int n = key_tiles(head, piece, found.of(piece), gathered, tiles);
        for (int i = piece.first; i < piece.last; i += kTile)
            score_by_tiles<kTile>(piece.last - i, tiles, n, padded, q + i, worth + i, from + i, to + i, rows + i * kSpan - span);
    }
    Run runs[kSpan];
    alignas(64) float around[kSpan + 2 * kLanes];
    float* scales = around + kLanes;
    int run_count = 0;
    bool poisoned = false;
    for (int i = 0; i < count; i++) {
        bool other = i == 0;
        for (int p = 0; p < piece_count && !other; p++) other = pieces[p].first == i || pieces[p].last == i;
        if (other) {
            run_count = runs_of(head, pieces, piece_count, i, span, found, runs, scales);
            F bad = zero();
            for (int v = 0; v < kSpanVectors; v++) bad = fma(load(scales + v * kLanes), zero(), bad);
            poisoned = reduce_add(bad) != 0;
        }
        const int begin = from[i] > span ? from[i] - span : 0, end = to[i] - span < kSpan ? to[i] - span : kSpan;
        float* row = rows + i * kSpan;
        for (int d = 0; d < padded; d += kLanes) store(part[i] + 2 + d, zero());
        if (begin >= end) {
            part[i][0] = -__builtin_inff(), part[i][1] = 0, worth[i] = 0;
            for (int v = 0; v < kSpanVectors; v++) store(row + v * kLanes, zero());
            continue;
        }
        alignas(64) int16_t aside[kSpan];
        // of one run the codes stand where their words are at once, in the row itself, and beside them are zeros
        const int shift = runs[0].position - span + int(runs[0].slot & 1);
        int16_t* codes = run_count == 1 ? reinterpret_cast<int16_t*>(row) + shift : aside;
        if (begin == 0 && end == kSpan) worth[i] = code_row<true>(row, scales, begin, end, poisoned, part[i], codes);
        else worth[i] = code_row<false>(row, scales, begin, end, poisoned, part[i], codes);
        if (run_count > 1) pair_codes(aside, runs, run_count, span, row);
        else pair_ends(runs[0], span, row);
    }
    for (int p = 0; p < piece_count; p++) {
        const Piece& piece = pieces[p];
        Pairs pairs[kSpan];
        const int n = value_pairs(head, found.of(piece), span, p + 1 == piece_count, pairs);
        for (int i = piece.first; i < piece.last; i += kTile) {
            sum_by_pairs<kTile>(piece.last - i, pairs, n, padded, rows + i * kSpan, from + i, to + i, part + i);
            if (i == piece.first)
                for (int j = 0; j < n; j++) pairs[j].fetched = nullptr;
        }
    }
    for (int i = 0; i < count; i++) {
        const F by = set1(worth[i]);
        for (int d = 0; d < padded; d += kLanes)
            store(part[i] + 2 + d, mul(to_float(load_ints(reinterpret_cast<const int32_t*>(part[i] + 2 + d))), by));
    }
}

}  // namespace attention
