// out = x . w, for many rows x. Included inside the namespace of an instruction set, after rows_impl.hpp.
//
// An output is made the same way in every tile size, from the first element of k to the last:
//   quantized   each group:   dot  := the exact integer dot product, - offset * sum of x where w has no mins
//                             acc  := fma(d * float(dot), scale of x, acc)
//                             acc  := fma(m, weight of x, acc)               where w has mins
//   float       each element: acc  := fma(x, w, acc)
// and then (acc + bias), and out + that with `add`.

constexpr int kPairRows = 5;              // rows from which tiles are multiplied two at a time: for fewer, memory is better read in one stream
constexpr size_t kRowsCache = 448 << 10;  // bytes of rows that stay in L2 while tiles of weights pass

// SMALL: no code is above 127; else the offset is 128
template <Kind KIND, int GROUP, bool MINS, bool WIDE, bool SMALL = KIND == Kind::kQ4 || MINS || WIDE>
struct Format {
    static constexpr Kind kind = KIND;
    static constexpr bool small = SMALL;
    static constexpr int group = GROUP;
    static constexpr bool mins = MINS, wide = WIDE;
    static constexpr int codes = GROUP * kLanes / (KIND == Kind::kQ4 ? 2 : 1);  // bytes of a group
    static constexpr int scales = kLanes * (WIDE ? 4 : 2);
    static constexpr int bytes = codes + scales * (MINS ? 2 : 1);
};

// A dot product under way, with - offset * sum of x in it from the start. On a machine that sums 16 bits faster, its simd header has its own
// `Nibbles`, and where `dot4` multiplies signed bytes, RADIXRT_SIGNED: it takes the offset 128 off by itself.
template <class T>
struct Dot {
    I sum;
    void start(I from) {
#ifdef RADIXRT_SIGNED
        if (!T::small) from = izero();
#endif
        sum = from;
    }
    void step(B w, const int8_t* x) { sum = T::small ? dot4_nibble(sum, w, x) : dot4(sum, w, x); }
    I end() const { return sum; }
};
#ifdef RADIXRT_NIBBLES
template <bool MINS, bool WIDE>
struct Dot<Format<Kind::kQ4, 32, MINS, WIDE, true>> : Nibbles {};
#endif

static inline void finish_tile(F acc, const Matrix& w, int tile, float* out, bool add_to) {
    const int n = w.n - tile * kLanes;
    if (w.bias) acc = add(acc, load(w.bias + tile * kLanes));
    out += tile * kLanes;
    if (add_to) acc = add(load_some(out, n), acc);
    store_some(out, acc, n);
}

// What is to be brought into the cache while a tile is computed: `step` bytes from `from` on for each group, one tile's or two.
struct Fetch {
    const uint8_t* from;  // or null: nothing
    int step;
    Near* near;  // and of this so many lines for each group; or null
    int lines;
};

// TILES tiles of 16 outputs x ROWS rows from `row` on. All integer dot products of a group run side by side, more of them than a dot product takes
// to be done; two tiles share what is loaded of the rows. The sums may not find room in registers beside them, which costs little: each is touched
// once a group.
template <class T, int ROWS, int TILES>
static void quantized_tile(const Matrix& w, int tile, const Rows& x, int row, float* out, size_t stride, bool add_to, Fetch fetch) {
    constexpr bool nibbles = T::kind == Kind::kQ4;
    constexpr int steps = T::group / 4, loads = nibbles ? steps / 2 : steps, together = ROWS < kTogether ? ROWS : kTogether;
    const int groups = w.k / T::group;
    const size_t k = x.k, tile_bytes = size_t(groups) * T::bytes;
    const uint8_t* p = w.data + size_t(tile) * tile_bytes;
    const int8_t* codes = x.codes + row * k;
    const size_t at = size_t(row) * groups;
    const float *scale = x.scale + at, *weight = x.weight + at;
    const int32_t* sum = x.sum + at;
    F acc[ROWS][TILES];
    for (int r = 0; r < ROWS; r++)
        for (int t = 0; t < TILES; t++) acc[r][t] = zero();
    for (int g = 0; g < groups; g++, p += T::bytes, codes += T::group, scale++, weight++, sum++) {
        if (fetch.from) {
#pragma GCC unroll 32
            for (int i = 0; i < T::bytes; i += 64) __builtin_prefetch(fetch.from + i);
            if (fetch.step > T::bytes)
#pragma GCC unroll 32
                for (int i = T::bytes; i < 2 * T::bytes; i += 64) __builtin_prefetch(fetch.from + i);
            fetch.from += fetch.step;
        }
        if (fetch.near) fetch.near->step(fetch.lines);
#pragma GCC unroll 16
        for (int first = 0; first < ROWS; first += together) {
            Dot<T> dot[together][TILES];
#pragma GCC unroll 16
            for (int r = 0; r < together; r++)
#pragma GCC unroll 2
                for (int t = 0; t < TILES; t++)
                    if (first + r < ROWS) dot[r][t].start(T::mins ? izero() : iset1(-w.offset * sum[size_t(first + r) * groups]));
#pragma GCC unroll 8
            for (int i = 0; i < loads; i++) {
                B b[TILES][2];
#pragma GCC unroll 2
                for (int t = 0; t < TILES; t++) {
                    b[t][0] = load_bytes(p + t * tile_bytes + 64 * i);
                    if (nibbles) b[t][1] = high(b[t][0]), b[t][0] = low(b[t][0]);
                }
#pragma GCC unroll 2
                for (int part = 0; part < (nibbles ? 2 : 1); part++)
#pragma GCC unroll 16
                    for (int r = 0; r < together; r++)
#pragma GCC unroll 2
                        for (int t = 0; t < TILES; t++)
                            if (first + r < ROWS) dot[r][t].step(b[t][part], codes + (first + r) * k + 4 * (i + part * loads));
            }
            F d[TILES], m[TILES];
#pragma GCC unroll 2
            for (int t = 0; t < TILES; t++) {
                const uint8_t* s = p + t * tile_bytes + T::codes;
                if constexpr (T::wide) {
                    d[t] = load(reinterpret_cast<const float*>(s));
                    if constexpr (T::mins) m[t] = load(reinterpret_cast<const float*>(s + T::scales));
                } else {
                    d[t] = load_f16(reinterpret_cast<const uint16_t*>(s));
                    if constexpr (T::mins) m[t] = load_f16(reinterpret_cast<const uint16_t*>(s + T::scales));
                }
            }
#pragma GCC unroll 16
            for (int r = 0; r < together; r++) {
                if (first + r >= ROWS) continue;
                const size_t of = size_t(first + r) * groups;
                const F by = set1(scale[of]);
#pragma GCC unroll 2
                for (int t = 0; t < TILES; t++) acc[first + r][t] = fma(mul(d[t], to_float(dot[r][t].end())), by, acc[first + r][t]);
                if constexpr (T::mins) {
                    const F least = set1(weight[of]);
#pragma GCC unroll 2
                    for (int t = 0; t < TILES; t++) acc[first + r][t] = fma(m[t], least, acc[first + r][t]);
                }
            }
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int t = 0; t < TILES; t++) finish_tile(acc[r][t], w, tile + t, out + (row + r) * stride, add_to);
}

template <class T, int ROWS, int TILES>
static void quantized_tail(int rows, const Matrix& w, int tile, const Rows& x, int row, float* out, size_t stride, bool add_to,
                           Fetch fetch) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return quantized_tail<T, ROWS - 1, TILES>(rows, w, tile, x, row, out, stride, add_to, fetch);
    quantized_tile<T, ROWS, TILES>(w, tile, x, row, out, stride, add_to, fetch);
}

static inline int rows_of_block(size_t row_bytes, int unit) {
    const int n = int(kRowsCache / row_bytes) / unit * unit;
    return n > unit ? n : unit;
}

template <class T>
static void quantized(const Matrix& w, int begin, int end, const Rows& x, float* out, size_t stride, bool add_to, Near* near) {
    const int block = rows_of_block(w.k + size_t(w.k / T::group) * 12, kRows);
    const size_t tile_bytes = size_t(w.k / T::group) * T::bytes;
    const size_t soon = tile_bytes < 8192 ? tile_bytes : 8192;
    int lines = 0;
    if (near) {
        const size_t steps = size_t((end - begin + kTiles - 1) / kTiles) * size_t(w.k / T::group) * size_t((x.rows + kRows - 1) / kRows);
        lines = int(near->lines() / steps) + 1;
    }
    for (int from = 0; from < x.rows; from += block) {
        const int to = x.rows - from < block ? x.rows : from + block;
        const bool once = to - from <= kRows;
        for (int tile = begin; tile < end;) {
            const int tiles = end - tile > 1 && to - from >= kPairRows ? kTiles : 1, next = tile + tiles;
            // The next tiles, of whoever computes them: the first rows bring the first and the second rows the second, or the only rows both.
            Fetch fetch{nullptr, T::bytes, near, lines};
            if (next + tiles <= w.tiles()) {
                fetch.from = w.data + next * tile_bytes;
                if (once && tiles > 1) fetch.step *= 2;
                if (once && tiles == 1) fetch.from = w.data + tile * tile_bytes + soon;
            }
            for (int row = from, n = 1; row < to; row += kRows, n++) {
                if (tiles > 1)
                    quantized_tail<T, kRows, kTiles>(to - row, w, tile, x, row, out, stride, add_to, fetch);
                else
                    quantized_tail<T, kRows, 1>(to - row, w, tile, x, row, out, stride, add_to, fetch);
                fetch.from = fetch.from && n < tiles ? fetch.from + tile_bytes : nullptr;
            }
            tile = next;
        }
    }
}

template <Kind KIND>
static inline F load_weights(const uint8_t* p) {
    if constexpr (KIND == Kind::kF32)
        return load(reinterpret_cast<const float*>(p));
    else if constexpr (KIND == Kind::kF16)
        return load_f16(reinterpret_cast<const uint16_t*>(p));
    else
        return load_bf16(reinterpret_cast<const uint16_t*>(p));
}

template <Kind KIND, int ROWS, int TILES>
static void float_tile(const Matrix& w, int tile, const Rows& x, int row, float* out, size_t stride, bool add_to) {
    constexpr int bytes = kLanes * (KIND == Kind::kF32 ? 4 : 2);
    const size_t k = w.k, tile_bytes = k * bytes;
    const uint8_t* p = w.data + tile * tile_bytes;
    const float* a = x.x + row * k;
    F acc[ROWS][TILES];
    for (int r = 0; r < ROWS; r++)
        for (int t = 0; t < TILES; t++) acc[r][t] = zero();
    for (size_t i = 0; i < k; i++, p += bytes) {
        F b[TILES];
#pragma GCC unroll 4
        for (int t = 0; t < TILES; t++) b[t] = load_weights<KIND>(p + t * tile_bytes);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            const F v = set1(a[r * k + i]);
#pragma GCC unroll 4
            for (int t = 0; t < TILES; t++) acc[r][t] = fma(v, b[t], acc[r][t]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int t = 0; t < TILES; t++) finish_tile(acc[r][t], w, tile + t, out + (row + r) * stride, add_to);
}

template <Kind KIND, int ROWS, int TILES>
static void float_tail(int rows, const Matrix& w, int tile, const Rows& x, int row, float* out, size_t stride, bool add_to) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return float_tail<KIND, ROWS - 1, TILES>(rows, w, tile, x, row, out, stride, add_to);
    float_tile<KIND, ROWS, TILES>(w, tile, x, row, out, stride, add_to);
}

// Four tiles x kWide rows, or one tile x kRowsFloat rows where four tiles leave registers for a single row only.
template <Kind KIND>
static void floats(const Matrix& w, int begin, int end, const Rows& x, float* out, size_t stride, bool add_to) {
    constexpr int rows_wide = kWide, rows_narrow = kWide > 1 ? kWide : kRowsFloat;
    const int block = rows_of_block(size_t(w.k) * 4, rows_narrow);
    for (int from = 0; from < x.rows; from += block) {
        const int to = x.rows - from < block ? x.rows : from + block;
        for (int tile = begin; tile < end;) {
            const bool wide = end - tile >= 4 && (kWide > 1 || to - from <= kWide);
            if (wide)
                for (int row = from; row < to; row += rows_wide)
                    float_tail<KIND, rows_wide, 4>(to - row, w, tile, x, row, out, stride, add_to);
            else
                for (int row = from; row < to; row += rows_narrow)
                    float_tail<KIND, rows_narrow, 1>(to - row, w, tile, x, row, out, stride, add_to);
            tile += wide ? 4 : 1;
        }
    }
}

static void matmul(const Matrix& w, int begin, int end, const Rows& x, float* out, size_t stride, bool add_to, Near* near) {
    switch (w.kind) {
        case Kind::kF32: return floats<Kind::kF32>(w, begin, end, x, out, stride, add_to);
        case Kind::kF16: return floats<Kind::kF16>(w, begin, end, x, out, stride, add_to);
        case Kind::kBF16: return floats<Kind::kBF16>(w, begin, end, x, out, stride, add_to);
        case Kind::kQ4:
            if (!w.mins) return quantized<Format<Kind::kQ4, 32, false, false>>(w, begin, end, x, out, stride, add_to, near);
            if (!w.wide) return quantized<Format<Kind::kQ4, 32, true, false>>(w, begin, end, x, out, stride, add_to, near);
            return quantized<Format<Kind::kQ4, 32, true, true>>(w, begin, end, x, out, stride, add_to, near);
        case Kind::kQ8:
            if (w.group == 16) return quantized<Format<Kind::kQ8, 16, false, true>>(w, begin, end, x, out, stride, add_to, near);
            if (w.offset == 128) return quantized<Format<Kind::kQ8, 32, false, false>>(w, begin, end, x, out, stride, add_to, near);
            if (!w.mins) return quantized<Format<Kind::kQ8, 32, false, false, true>>(w, begin, end, x, out, stride, add_to, near);
            if (!w.wide) return quantized<Format<Kind::kQ8, 32, true, false>>(w, begin, end, x, out, stride, add_to, near);
            return quantized<Format<Kind::kQ8, 32, true, true>>(w, begin, end, x, out, stride, add_to, near);
    }
}
