// out = x . w, for many rows x. Included inside the namespace of an instruction set, after rows_impl.hpp.
//
// An output is made the same way in every tile size, from the first element of k to the last:
//   quantized   each group:   dot  := the exact integer dot product, - offset * sum of x where w has no mins
//                             acc  := fma(d * float(dot), scale of x, acc)
//                             acc  := fma(m, weight of x, acc)               where w has mins
//   float       each element: acc  := fma(x, w, acc)
// and then (acc + bias), and out + that with `add`.

constexpr int kTogether = kRows < 4 ? kRows : 4;                 // rows whose integer dot products run side by side
constexpr size_t kRowsCache = 448 << 10;  // bytes of rows that stay in L2 while tiles of weights pass

// SMALL: no code is above 127
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

// A dot product under way; on a machine that sums 16 bits faster, its simd header has its own `Nibbles`.
template <class T>
struct Dot {
    I sum;
    void start(I from) { sum = from; }
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

// one tile of 16 outputs x ROWS rows from `row` on; `ahead`: where to prefetch, in bytes from what is read now, or 0
template <class T, int ROWS>
static void quantized_tile(const Matrix& w, int tile, const Rows& x, int row, float* out, size_t stride, bool add_to, size_t ahead) {
    const int groups = w.k / T::group;
    const size_t k = x.k;
    const uint8_t* p = w.data + size_t(tile) * groups * T::bytes;
    const int8_t* codes = x.codes + row * k;
    const float *scale = x.scale + size_t(row) * groups, *weight = x.weight + size_t(row) * groups;
    const int32_t* sum = x.sum + size_t(row) * groups;
    F acc[ROWS];
    for (int r = 0; r < ROWS; r++) acc[r] = zero();
    for (int g = 0; g < groups; g++, p += T::bytes, codes += T::group) {
        B b[T::group / 4];
        if constexpr (T::kind == Kind::kQ4) {
#pragma GCC unroll 8
            for (int i = 0; i < T::group / 8; i++) {
                const B both = load_bytes(p + 64 * i);
                b[i] = low(both);
                b[i + T::group / 8] = high(both);
            }
        } else {
#pragma GCC unroll 8
            for (int i = 0; i < T::group / 4; i++) b[i] = load_bytes(p + 64 * i);
        }
        if (ahead)
#pragma GCC unroll 16
            for (int i = 0; i < T::bytes; i += 64) __builtin_prefetch(p + ahead + i);
        const uint8_t* s = p + T::codes;
        F d, m;
        if constexpr (T::wide) {
            d = load(reinterpret_cast<const float*>(s));
            if constexpr (T::mins) m = load(reinterpret_cast<const float*>(s + T::scales));
        } else {
            d = load_f16(reinterpret_cast<const uint16_t*>(s));
            if constexpr (T::mins) m = load_f16(reinterpret_cast<const uint16_t*>(s + T::scales));
        }
#pragma GCC unroll 4
        for (int first = 0; first < ROWS; first += kTogether) {
            Dot<T> dot[kTogether];
#pragma GCC unroll 4
            for (int r = 0; r < kTogether; r++)
                if (first + r < ROWS) dot[r].start(T::mins ? izero() : iset1(-w.offset * sum[size_t(first + r) * groups + g]));
#pragma GCC unroll 8
            for (int i = 0; i < T::group / 4; i++)
#pragma GCC unroll 4
                for (int r = 0; r < kTogether; r++)
                    if (first + r < ROWS) dot[r].step(b[i], codes + (first + r) * k + 4 * i);
#pragma GCC unroll 4
            for (int r = 0; r < kTogether; r++) {
                if (first + r >= ROWS) continue;
                const size_t at = size_t(first + r) * groups + g;
                F& to = acc[first + r];
                to = fma(mul(d, to_float(dot[r].end())), set1(scale[at]), to);
                if constexpr (T::mins) to = fma(m, set1(weight[at]), to);
            }
        }
    }
    for (int r = 0; r < ROWS; r++) finish_tile(acc[r], w, tile, out + (row + r) * stride, add_to);
}

template <class T, int ROWS>
static void quantized_tail(int rows, const Matrix& w, int tile, const Rows& x, int row, float* out, size_t stride, bool add_to,
                           size_t ahead) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return quantized_tail<T, ROWS - 1>(rows, w, tile, x, row, out, stride, add_to, ahead);
    quantized_tile<T, ROWS>(w, tile, x, row, out, stride, add_to, ahead);
}

static inline int rows_of_block(size_t row_bytes, int unit) {
    const int n = int(kRowsCache / row_bytes) / unit * unit;
    return n > unit ? n : unit;
}

template <class T>
static void quantized(const Matrix& w, int begin, int end, const Rows& x, float* out, size_t stride, bool add_to) {
    const int block = rows_of_block(w.k + size_t(w.k / T::group) * 12, kRows);
    const size_t tile_bytes = size_t(w.k / T::group) * T::bytes;
    const size_t near = tile_bytes < 8192 ? tile_bytes : 8192;
    for (int from = 0; from < x.rows; from += block) {
        const int to = x.rows - from < block ? x.rows : from + block;
        for (int tile = begin; tile < end; tile++)
            for (int row = from; row < to; row += kRows) {
                // the first rows bring the next tile
                const size_t ahead = row != from || tile + 1 == end ? 0 : to - from <= kRows ? near : tile_bytes;
                quantized_tail<T, kRows>(to - row, w, tile, x, row, out, stride, add_to, ahead);
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

static void matmul(const Matrix& w, int begin, int end, const Rows& x, float* out, size_t stride, bool add_to) {
    switch (w.kind) {
        case Kind::kF32: return floats<Kind::kF32>(w, begin, end, x, out, stride, add_to);
        case Kind::kF16: return floats<Kind::kF16>(w, begin, end, x, out, stride, add_to);
        case Kind::kBF16: return floats<Kind::kBF16>(w, begin, end, x, out, stride, add_to);
        case Kind::kQ4:
            if (!w.mins) return quantized<Format<Kind::kQ4, 32, false, false>>(w, begin, end, x, out, stride, add_to);
            if (!w.wide) return quantized<Format<Kind::kQ4, 32, true, false>>(w, begin, end, x, out, stride, add_to);
            return quantized<Format<Kind::kQ4, 32, true, true>>(w, begin, end, x, out, stride, add_to);
        case Kind::kQ8:
            if (w.group == 16) return quantized<Format<Kind::kQ8, 16, false, true>>(w, begin, end, x, out, stride, add_to);
            if (w.offset >= 64) return quantized<Format<Kind::kQ8, 32, false, false>>(w, begin, end, x, out, stride, add_to);
            if (!w.mins) return quantized<Format<Kind::kQ8, 32, false, false, true>>(w, begin, end, x, out, stride, add_to);
            if (!w.wide) return quantized<Format<Kind::kQ8, 32, true, false>>(w, begin, end, x, out, stride, add_to);
            return quantized<Format<Kind::kQ8, 32, true, true>>(w, begin, end, x, out, stride, add_to);
    }
}
