// The kernels on one row. Included inside the namespace of an instruction set, after its simd header.
//
// What a row's tail lacks of a vector is filled up and computed as the rest is.

static inline F load_some(const float* p, int n) {
    if (n >= kLanes) return load(p);
    float t[kLanes] = {};
    __builtin_memcpy(t, p, sizeof(float) * n);
    return load(t);
}

static inline void store_some(float* p, F a, int n) {
    if (n >= kLanes) return store(p, a);
    float t[kLanes];
    store(t, a);
    __builtin_memcpy(p, t, sizeof(float) * n);
}

// e^x to 1e-7 of itself over all floats; denormal results too, 0 at -inf, inf at inf; what NaN gives is not specified
static inline F exp_all(F x) {
    x = max(min(x, set1(110)), set1(-110));
    const F n = round(mul(x, set1(1.44269504088896341f)));
    F r = fma(n, set1(-0.693359375f), x);  // ln 2 in two parts, the first exact in its products
    r = fma(n, set1(2.12194440e-4f), r);
    F p = set1(1.f / 5040);
    p = fma(p, r, set1(1.f / 720));
    p = fma(p, r, set1(1.f / 120));
    p = fma(p, r, set1(1.f / 24));
    p = fma(p, r, set1(1.f / 6));
    p = fma(p, r, set1(0.5f));
    p = fma(mul(p, r), r, r);
    p = add(p, set1(1));
    const F part = round(mul(n, set1(0.5f)));  // 2^n in two steps, neither of which leaves the range
    return scale2(scale2(p, part), sub(n, part));
}

static void rms_norm(const float* x, const float* weight, float eps, int k, float* out) {
    F s[4] = {zero(), zero(), zero(), zero()};
    int i = 0;
    for (; i + 4 * kLanes <= k; i += 4 * kLanes)
        for (int j = 0; j < 4; j++) {
            const F a = load(x + i + j * kLanes);
            s[j] = fma(a, a, s[j]);
        }
    for (; i < k; i += kLanes) {
        const F a = load_some(x + i, k - i);
        s[0] = fma(a, a, s[0]);
    }
    const float mean = reduce_add(add(add(s[0], s[1]), add(s[2], s[3]))) / float(k);
    const F by = set1(1 / __builtin_sqrtf(mean + eps));
    for (i = 0; i < k; i += kLanes)
        store_some(out + i, mul(mul(load_some(x + i, k - i), by), load_some(weight + i, k - i)), k - i);
}

static void rope(float* head, const float* cos, const float* sin, int half) {
    for (int i = 0; i < half; i += kLanes) {
        const int n = half - i;
        const F low = load_some(head + i, n), high = load_some(head + half + i, n);
        const F c = load_some(cos + i, n), s = load_some(sin + i, n);
        store_some(head + i, sub(mul(low, c), mul(high, s)), n);
        store_some(head + half + i, add(mul(high, c), mul(low, s)), n);
    }
}

static void silu_mul(const float* gate, const float* up, int n, float* out) {
    for (int i = 0; i < n; i += kLanes) {
        const F g = load_some(gate + i, n - i);
        const F s = div(g, add(set1(1), exp_all(sub(zero(), g))));
        store_some(out + i, mul(s, load_some(up + i, n - i)), n - i);
    }
}

// A group with anything infinite or NaN gets the scale NaN: so does all that is computed of it. One below 1e-30 counts as zero.
static void quantize(const float* x, int k, int group, int8_t* codes, float* scale, float* weight, int32_t* sum) {
    for (int g = 0; g < k / group; g++, x += group, codes += group) {
        F most = zero(), bad = zero();
        for (int i = 0; i < group; i += kLanes) {
            const F a = load(x + i);
            most = max(abs(a), most);
            bad = fma(a, zero(), bad);  // 0, or NaN
        }
        const float largest = reduce_max(most), poison = reduce_add(bad);
        const bool small = !(largest > 1e-30f);
        const F by = set1(small ? 0 : 127 / largest);
        F total = zero();
        for (int i = 0; i < group; i += kLanes) {
            const F c = round(max(min(mul(load(x + i), by), set1(127)), set1(-127)));
            store_bytes(codes + i, to_int(c));
            total = add(total, c);
        }
        scale[g] = (small ? 0 : largest / 127) + poison;
        sum[g] = poison == 0 ? int32_t(reduce_add(total)) : 0;
        weight[g] = scale[g] * float(sum[g]);
    }
}

static inline uint16_t to_bf16(float x) {  // to nearest even
    uint32_t u;
    __builtin_memcpy(&u, &x, 4);
    const uint32_t rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
    return uint16_t((u & 0x7fffffff) > 0x7f800000 ? u >> 16 | 0x40 : rounded);
}

// codes[n], then the scale; with anything infinite or NaN the scale is NaN, and below 1e-30 all is zero
static void store_kv8(const float* from, int n, int8_t* to) {
    F most = zero(), bad = zero();
    for (int i = 0; i < n; i += kLanes) {
        const F a = load_some(from + i, n - i);
        most = max(abs(a), most);
        bad = fma(a, zero(), bad);  // 0, or NaN
    }
    const float largest = reduce_max(most), poison = reduce_add(bad);
    const bool small = !(largest > 1e-30f);
    const F by = set1(small ? 0 : 127 / largest);
    for (int i = 0; i < n; i += kLanes) {
        int8_t t[kLanes];
        store_bytes(t, to_int(round(max(min(mul(load_some(from + i, n - i), by), set1(127)), set1(-127)))));
        __builtin_memcpy(to + i, t, size_t(n - i < kLanes ? n - i : kLanes));
    }
    const float scale = (small ? 0 : largest / 127) + poison;
    __builtin_memcpy(to + n, &scale, sizeof scale);
}

static void store_kv(const float* from, int n, KV kind, void* to) {
    if (kind == KV::kF32) {
        __builtin_memcpy(to, from, sizeof(float) * n);
    } else if (kind == KV::kI8) {
        store_kv8(from, n, static_cast<int8_t*>(to));
    } else if (kind == KV::kBF16) {
        for (int i = 0; i < n; i++) static_cast<uint16_t*>(to)[i] = to_bf16(from[i]);
    } else {
        for (int i = 0; i < n; i += kLanes) {
            uint16_t t[kLanes];
            const int some = n - i < kLanes ? n - i : kLanes;
            store_f16(t, load_some(from + i, some));
            __builtin_memcpy(static_cast<uint16_t*>(to) + i, t, sizeof(uint16_t) * some);
        }
    }
}

// A code of a key or a query is at most key_code(dim) and one of a value kValueCode, so that sums of all products of a head, or of the weights of a
// span (kWeightCode) and values, are below 2^31.
constexpr int kValueCode = 2047, kWeightCode = 8191;
static_assert(int64_t(kValueCode) * kWeightCode * kSpan < int64_t(1) << 31, "");
static inline int key_code(int dim) { return int(__builtin_sqrt(2147483647.0 / whole_lanes(dim))); }

// codes[n, padded with zeros]; returns what they are multiplied with: NaN with anything infinite or NaN, 0 where all is below 1e-30
static float to_codes(const float* from, int n, int most_code, int16_t* codes) {
    F most = zero(), bad = zero();
    for (int i = 0; i < n; i += kLanes) {
        const F a = load_some(from + i, n - i);
        most = max(abs(a), most);
        bad = fma(a, zero(), bad);  // 0, or NaN
    }
    const float largest = reduce_max(most), poison = reduce_add(bad), limit = float(most_code);
    const bool small = !(largest > 1e-30f);
    const F by = set1(small ? 0 : limit / largest);
    for (int i = 0; i < n; i += kLanes)
        store_shorts(codes + i, to_int(max(min(mul(load_some(from + i, n - i), by), set1(limit)), set1(-limit))));
    return (small ? 0 : largest / limit) + poison;
}

static void store_tile(const float* from, int dim, bool key, void* tiles, size_t slot) {
    alignas(64) int16_t codes[kMostDim];
    const int padded = whole_lanes(dim), lane = int(slot % kLanes);
    const float scale = to_codes(from, dim, key ? key_code(dim) : kValueCode, codes);
    char* tile = static_cast<char*>(tiles) + slot / kLanes * tile_bytes(dim);
    if (key) {
        for (int i = 0; i < padded / 2; i++) __builtin_memcpy(tile + (size_t(i) * kLanes + lane) * 4, codes + 2 * i, 4);
    } else {
        char* pairs = tile + (size_t(lane / 2) * padded * 2 + lane % 2) * 2;
        for (int i = 0; i < padded; i++) __builtin_memcpy(pairs + size_t(i) * 4, codes + i, 2);
    }
    __builtin_memcpy(tile + (size_t(padded) * kLanes) * 2 + size_t(lane) * 4, &scale, 4);
}

static void store_query(const float* from, int dim, void* to) {
    alignas(64) int16_t codes[kMostDim];
    const int padded = whole_lanes(dim);
    const float scale = to_codes(from, dim, key_code(dim), codes);
    __builtin_memcpy(to, codes, size_t(padded) * 2);
    __builtin_memcpy(static_cast<char*>(to) + size_t(padded) * 2, &scale, 4);
}
