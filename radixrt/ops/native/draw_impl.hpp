// What a draw needs of a block of logits. Included inside the namespace of an instruction set, after attention_impl.hpp.

// The largest of n logits, n a multiple of 16; NaN where one is no number or infinite.
static float largest(const float* logits, int n) {
    F most = set1(-__builtin_inff()), bad = zero();
    for (int i = 0; i < n; i += kLanes) {
        const F x = load(logits + i);
        most = max(x, most);
        bad = add(bad, mul(max(set1(attention::kLowest), x), zero()));  // NaN stays, and infinity becomes NaN; minus infinity may stand there
    }
    return reduce_max(most) + reduce_add(bad);
}

// The sum of 2^((logit - most) * scale).
static float weigh(const float* logits, int n, float most, float scale) {
    const F shift = set1(most), by = set1(scale);
    F sum = zero();
    for (int i = 0; i < n; i += kLanes) sum = add(sum, attention::two_to(mul(sub(load(logits + i), shift), by)));
    return reduce_add(sum);
}
