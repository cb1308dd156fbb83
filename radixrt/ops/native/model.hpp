// Model: a decoder's forward over one flattened batch, and what follows from its hidden states, on the pool of threads.
//
// Buffers grow to the largest batch seen and are kept. One call at a time. A row's result does not depend on the batch it is in.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <tuple>
#include <vector>

#include "attention.hpp"
#include "draw.hpp"
#include "kernels.hpp"
#include "threads.hpp"

namespace radixrt {

struct Shape {
    int hidden, heads, kv_heads, dim, inner, vocab;
    float eps, scale;
    KV kv;
};

struct LayerWeights {
    const float *input_norm, *post_norm, *q_norm, *k_norm;  // q_norm, k_norm: none, or one weight an element of a head
    Matrix q, k, v, o, gate, up, down;
    int window;  // 0: all positions
    uint8_t *k_cache, *v_cache;  // [kv_heads, kv_slots, kv_elements(kind, dim)]
};

// Row `index` of a matrix, as numbers.
inline void unpack_row(const Matrix& w, int index, const Kernels& kernels, float* out);

// The rows that a matmul reads, in every form that its matrices want.
class Input {
public:
    void reserve(size_t rows, int k, unsigned forms) {
        const size_t all = rows * size_t(k);
        if ((forms & kFloat) && x_.size() < all) x_.resize(all);
        for (int g = 0; g < 2; g++) {
            if (!(forms & (g ? kGroup16 : kGroup32))) continue;
            auto& form = forms_[g];
            const size_t groups = rows * size_t(k / (g ? 16 : 32));
            if (form.codes.size() < all + 64) form.codes.resize(all + 64);
            if (form.scale.size() < groups) form.scale.resize(groups);
            if (form.weight.size() < groups) form.weight.resize(groups);
            if (form.sum.size() < groups) form.sum.resize(groups);
        }
    }

    void fill(const Kernels& kernels, size_t row, const float* from, int k, unsigned forms) { fill(kernels, row, 0, from, k, k, forms); }

    // n elements of a row of k, from the one numbered `first` on; both numbers are multiples of kPart
    void fill(const Kernels& kernels, size_t row, int first, const float* from, int n, int k, unsigned forms) {
        const size_t element = row * size_t(k) + size_t(first);
        if (forms & kFloat) std::memcpy(x_.data() + element, from, size_t(n) * sizeof(float));
        for (int g = 0; g < 2; g++) {
            if (!(forms & (g ? kGroup16 : kGroup32))) continue;
            auto& form = forms_[g];
            const size_t at = element / (g ? 16 : 32);
            kernels.quantize(from, n, g ? 16 : 32, form.codes.data() + element, form.scale.data() + at, form.weight.data() + at,
                             form.sum.data() + at);
        }
    }

    Rows rows(const Matrix& w, size_t first, int count) const {
        Rows rows;
        rows.rows = count;
        rows.k = w.k;
        if (!x_.empty()) rows.x = x_.data() + first * w.k;
        if (w.kind == Kind::kQ4 || w.kind == Kind::kQ8) {
            const auto& form = forms_[w.group == 16];
            const size_t at = first * size_t(w.k / w.group);
            rows.codes = form.codes.data() + first * w.k;
            rows.scale = form.scale.data() + at;
            rows.weight = form.weight.data() + at;
            rows.sum = form.sum.data() + at;
        }
        return rows;
    }

    static constexpr int kPart = 32;  // elements: whole groups of every form
    static constexpr unsigned kFloat = 1, kGroup32 = 2, kGroup16 = 4;
    static unsigned form_of(const Matrix& w) {
        if (w.kind != Kind::kQ4 && w.kind != Kind::kQ8) return kFloat;
        return w.group == 16 ? kGroup16 : kGroup32;
    }

private:
    struct Form {
        std::vector<int8_t> codes;
        std::vector<float> scale, weight;
        std::vector<int32_t> sum;
    };
    std::vector<float> x_;
    Form forms_[2];
};

constexpr int kFew = 4;          // up to so many rows every thread prepares the input for itself
constexpr int kRowBlock = 256;   // rows that one item multiplies at most
constexpr int kNearRows = 64;    // up to so many rows KV is fetched while matrices are multiplied
constexpr size_t kNear = size_t(768) << 10;  // bytes of it for each thread: what its second cache holds beside the weights
constexpr int kRowItem = 16;     // rows that an item which works row by row has at most

inline int blocks(int count, int size) { return (count + size - 1) / size; }

// What one thread has for itself.
struct Bench {
    Input input;
    long prepared = -1;  // for which phase of which job `input` is made
    std::vector<float> wide, other, row, scratch;
};

class Model {
public:
    Model(std::shared_ptr<Threads> threads, const Kernels* kernels, const Shape& shape)
        : shape(shape), threads_(std::move(threads)), kernels_(*kernels), benches_(size_t(threads_->count())) {
        for (auto& bench : benches_) bench.scratch.resize(Attention::scratch_floats(shape.dim));
    }

    const Shape shape;
    std::vector<LayerWeights> layers;
    Matrix embed, head;
    const float* norm = nullptr;
    const float* cos_sin = nullptr;  // [positions, 2, dim / 2]
    float* hidden = nullptr;         // [slots, hidden]
    size_t kv_slots = 0;             // of the caches: slots, rounded up to whole tiles
    bool share = true;               // attention reads the KV that sequences have in common once

    const Kernels& kernels() const { return kernels_; }

    struct Batch {
        const int32_t *tokens, *positions, *write_slots, *q_lens, *kv_lens, *kv_slots;
        int rows, sequences;
    };

    void forward(const Batch& batch) {
        Forward job(*this, batch);
        threads_->run(job);
    }

    // Logits [count, vocab] of the hidden states in `slots`.
    void logits(const int32_t* slots, int count, float* out) {
        Head job(*this, slots, count);
        job.out = out;
        threads_->run(job);
    }

    // A token of each row, as wished, and the row's largest logit, which is not finite where there is none; see Draw.
    void draw(const int32_t* slots, int count, const Wishes& wishes, int32_t* ids, float* values) {
        Draw draw(kernels_, wishes, count, shape.vocab, threads_->count());
        Head job(*this, slots, count);
        job.draw = &draw;
        threads_->run(job);
        for (int r = 0; r < count; r++)
            std::tie(ids[r], values[r]) = draw.finish(r, [&](int block, float* logits) {
                const int begin = block * Draw::kTiles, end = std::min(head.tiles(), begin + Draw::kTiles);
                kernels_.matmul(head, begin, end, input_.rows(head, size_t(r), 1), logits - size_t(begin) * kLanes, Draw::kTokens, false, nullptr);
            });
    }

private:
    enum Phase { kNorm, kQKV, kAttend, kPrepareO, kO, kPostNorm, kGateUp, kDown, kPhases };

    unsigned forms(const LayerWeights& layer, Phase phase) const {
        switch (phase) {
            case kQKV: return Input::form_of(layer.q) | Input::form_of(layer.k) | Input::form_of(layer.v);
            case kO: return Input::form_of(layer.o);
            case kGateUp: return Input::form_of(layer.gate) | Input::form_of(layer.up);
            default: return Input::form_of(layer.down);
        }
    }

    class Forward : public Job {
    public:
        Forward(Model& model, const Batch& batch) : m(model), b(batch), k(model.kernels_), s(model.shape) {
            serial = ++m.jobs_;
            const size_t rows = size_t(b.rows);
            grow(m.x_, rows * s.hidden);
            grow(m.q_, rows * s.heads * query_floats(s.kv, s.dim));
            grow(m.attended_, rows * s.heads * s.dim);
            unit = 1;
            while (unit * s.dim % kLanes) unit++;
            q_units = blocks(s.heads, unit);
            kv_units = blocks(s.kv_heads, unit);
            for (auto& bench : m.benches_) {
                bench.prepared = -1;
                if (bench.row.size() < size_t(std::max(s.hidden, s.inner))) bench.row.resize(size_t(std::max(s.hidden, s.inner)));
            }
            for (const auto& layer : m.layers) {
                if (plan(layer.window)) continue;
                plans.push_back({layer.window,
                                 std::make_unique<Attention>(b.q_lens, b.kv_lens, b.kv_slots, b.sequences, s.heads, s.kv_heads, s.dim,
                                                             layer.window, m.threads_->count(), m.share, m.arena_),
                                 {}});
                const size_t most = kNear * size_t(m.threads_->count()) / (2 * size_t(s.kv_heads) * kLanes * kv_bytes(s.kv, s.dim));
                if (b.rows <= kNearRows) plans.back().near = plans.back().attention->blocks(most);
            }
            few = b.rows <= kFew;
            by_head = !few && s.dim % Input::kPart == 0;
            if (few) grow(m.inner_, rows * s.inner);
            row_item = std::max(1, std::min(kRowItem, b.rows / (4 * m.threads_->count())));
            row_blocks = blocks(b.rows, kRowBlock);
            block = blocks(b.rows, row_blocks);
        }

        int phases() const override { return int(m.layers.size()) * kPhases + 2; }

        int items(int phase) override {
            if (phase == 0 || phase == phases() - 1) return blocks(b.rows, row_item);
            const auto& layer = m.layers[size_t(phase - 1) / kPhases];
            switch (Phase((phase - 1) % kPhases)) {
                case kPrepareO:
                    if (by_head) return 0;  // is done behind each head
                    [[fallthrough]];
                case kNorm:
                case kPostNorm: {
                    if (few) return 0;
                    const auto next = Phase((phase - 1) % kPhases + 1);
                    m.input_.reserve(size_t(b.rows), width(next), m.forms(layer, next));
                    return blocks(b.rows, row_item);
                }
                case kQKV: return row_blocks * (q_units + 2 * kv_units);
                case kAttend:
                    if (by_head) m.input_.reserve(size_t(b.rows), width(kO), m.forms(layer, kO));
                    attention = plan(layer.window)->attention.get();
                    attention->begin();
                    return attention->items();
                case kO: return row_blocks * groups(layer.o);
                case kGateUp:
                    if (!few) m.between_.reserve(size_t(b.rows), s.inner, m.forms(layer, kDown));
                    return row_blocks * groups(layer.gate);
                case kDown: return row_blocks * groups(layer.down);
                default: return 0;
            }
        }

        void run(int phase, int item, int thread) override {
            auto& bench = m.benches_[size_t(thread)];
            if (phase == 0) return embed(item);
            if (phase == phases() - 1) return finish(item, bench);
            const auto& layer = m.layers[size_t(phase - 1) / kPhases];
            const auto kind = Phase((phase - 1) % kPhases);
            switch (kind) {
                case kNorm:
                case kPrepareO:
                case kPostNorm: {
                    const auto next = Phase(kind + 1);
                    const int begin = item * row_item, end = std::min(b.rows, begin + row_item);
                    for (int r = begin; r < end; r++) prepare(layer, next, r, m.input_, bench);
                    return;
                }
                case kQKV: return qkv(layer, item, input(layer, kind, phase, bench), bench);
                case kAttend:
                    return attention->run(item, k, m.q_.data(), layer.k_cache, layer.v_cache, m.kv_slots, s.kv, s.scale, m.attended_.data(),
                                          bench.scratch.data(), [&](int row, int head, int heads) {
                                              if (!by_head) return;
                                              const int at = head * s.dim, all = width(kO);
                                              m.input_.fill(k, size_t(row), at, m.attended_.data() + size_t(row) * all + at, heads * s.dim, all,
                                                            m.forms(layer, kO));
                                          });
                case kO: return accumulate(layer.o, item, input(layer, kind, phase, bench), {});
                case kGateUp: return gate_up(layer, item, input(layer, kind, phase, bench), bench);
                default:
                    return accumulate(layer.down, item, input(layer, kind, phase, bench), near(layer, true, item, row_blocks * groups(layer.down)));
            }
        }

    private:
        static void grow(std::vector<float>& buffer, size_t size) {
            if (buffer.size() < size) buffer.resize(size);
        }

        struct Plan {
            int window;
            std::unique_ptr<Attention> attention;
            std::vector<uint32_t> near;
        };

        Plan* plan(int window) {
            for (auto& plan : plans)
                if (plan.window == window) return &plan;
            return nullptr;
        }

        int width(Phase phase) const {
            return phase == kO ? s.heads * s.dim : phase == kDown ? s.inner : s.hidden;
        }

        // Tiles of an item: a few when there are many rows, else so many that each thread has some items to choose from; pairs, which
        // several rows are multiplied with at once.
        int tiles_of_item(const Matrix& w) const {
            if (b.rows >= 64) return 4;
            const int size = std::max(1, std::min(8, w.tiles() / (6 * m.threads_->count())));
            return few ? size : std::max(2, size / 2 * 2);
        }
        int groups(const Matrix& w) const { return blocks(w.tiles(), tiles_of_item(w)); }

        void embed(int item) {
            const int begin = item * row_item, end = std::min(b.rows, begin + row_item);
            for (int r = begin; r < end; r++) unpack_row(m.embed, b.tokens[r], k, m.x_.data() + size_t(r) * s.hidden);
        }

        void finish(int item, Bench&) {
            const int begin = item * row_item, end = std::min(b.rows, begin + row_item);
            for (int r = begin; r < end; r++)
                k.rms_norm(m.x_.data() + size_t(r) * s.hidden, m.norm, s.eps, s.hidden, m.hidden + size_t(b.write_slots[r]) * s.hidden);
        }

        // Row r of the input of phase `next` into row r of `to`.
        void prepare(const LayerWeights& layer, Phase next, int r, Input& to, Bench& bench) {
            const float* from;
            if (next == kO) {
                from = m.attended_.data() + size_t(r) * s.heads * s.dim;
            } else if (next == kDown) {
                from = m.inner_.data() + size_t(r) * s.inner;
            } else {
                k.rms_norm(m.x_.data() + size_t(r) * s.hidden, next == kQKV ? layer.input_norm : layer.post_norm, s.eps, s.hidden,
                           bench.row.data());
                from = bench.row.data();
            }
            to.fill(k, size_t(r), from, width(next), m.forms(layer, next));
        }

        Input& input(const LayerWeights& layer, Phase phase, int number, Bench& bench) {
            if (!few) return phase == kDown ? m.between_ : m.input_;
            const long tag = long(serial) << 16 | number;
            if (bench.prepared != tag) {
                bench.input.reserve(size_t(b.rows), width(phase), m.forms(layer, phase));
                for (int r = 0; r < b.rows; r++) prepare(layer, phase, r, bench.input, bench);
                bench.prepared = tag;
            }
            return bench.input;
        }

        void qkv(const LayerWeights& layer, int item, Input& from, Bench& bench) {
            const int units = q_units + 2 * kv_units;
            const int first = item / units * block, count = std::min(block, b.rows - first);
            int at = item % units;
            const int part = at < q_units ? 0 : at < q_units + kv_units ? 1 : 2;
            at -= part == 0 ? 0 : part == 1 ? q_units : q_units + kv_units;
            const Matrix& w = part == 0 ? layer.q : part == 1 ? layer.k : layer.v;
            const int head = at * unit, heads = std::min(unit, (part == 0 ? s.heads : s.kv_heads) - head);
            const int tiles = unit * s.dim / kLanes, stride = tiles * kLanes;
            uint8_t* cache = part == 1 ? layer.k_cache : part == 2 ? layer.v_cache : nullptr;
            const size_t row_bytes = kv_bytes(s.kv, s.dim), query = query_floats(s.kv, s.dim);
            const bool tiled = s.kv == KV::kI16;
            const auto cache_of = [&](int h) { return cache + size_t(head + h) * m.kv_slots * row_bytes; };
            if (cache && count <= kRowItem)  // where the results go is far away; it is brought near meanwhile
                for (int r = 0; r < count; r++)
                    for (int h = 0; h < heads; h++) fetch(cache_of(h), size_t(b.write_slots[first + r]), part == 1);
            grow(bench.wide, size_t(count) * stride);
            k.matmul(w, at * tiles, std::min(w.tiles(), (at + 1) * tiles), from.rows(w, size_t(first), count),
                     bench.wide.data() - size_t(at) * tiles * kLanes, size_t(stride), false, nullptr);
            const float* norm = part == 0 ? layer.q_norm : part == 1 ? layer.k_norm : nullptr;
            const int half = s.dim / 2;
            for (int r = 0; r < count; r++) {
                const float* angles = m.cos_sin + size_t(b.positions[first + r]) * s.dim;
                for (int h = 0; h < heads; h++) {
                    float* values = bench.wide.data() + size_t(r) * stride + size_t(h) * s.dim;
                    if (norm) k.rms_norm(values, norm, s.eps, s.dim, values);
                    if (part < 2) k.rope(values, angles, angles + half, half);
                    float* to_query = m.q_.data() + (size_t(first + r) * s.heads + head + h) * query;
                    const size_t slot = size_t(b.write_slots[first + r]);
                    if (part == 0 && tiled) k.store_query(values, s.dim, to_query);
                    else if (part == 0) std::memcpy(to_query, values, size_t(s.dim) * sizeof(float));
                    else if (tiled) k.store_tile(values, s.dim, part == 1, cache_of(h), slot);
                    else k.store_kv(values, s.dim, s.kv, cache_of(h) + slot * row_bytes);
                }
            }
        }

        // Where a key or a value of a slot will be written.
        void fetch(const uint8_t* cache, size_t slot, bool key) const {
            const uint8_t* row = cache + slot * kv_bytes(s.kv, s.dim);
            size_t bytes = kv_bytes(s.kv, s.dim);
            if (s.kv == KV::kI16) {
                row = cache + slot / kLanes * tile_bytes(s.dim);
                bytes = tile_bytes(s.dim);
                __builtin_prefetch(row + bytes - 64, 1);  // its scale
                if (!key) bytes = size_t(whole_lanes(s.dim)) * 4, row += slot % kLanes / 2 * bytes;
            }
            for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 1);
        }

        void gate_up(const LayerWeights& layer, int item, Input& from, Bench& bench) {
            const int all = groups(layer.gate), size = tiles_of_item(layer.gate);
            const int first = item / all * block, count = std::min(block, b.rows - first);
            const int begin = item % all * size, end = std::min(layer.gate.tiles(), begin + size);
            const size_t stride = size_t(size) * kLanes;
            const int n = std::min(s.inner, end * kLanes) - begin * kLanes;
            grow(bench.wide, size_t(count) * stride);
            grow(bench.other, size_t(count) * stride);
            Near kv = near(layer, false, item, row_blocks * all);
            const size_t behind = kv.end;
            Near* const meanwhile = kv.next < behind ? &kv : nullptr;
            kv.end = kv.next + (behind - kv.next) / 2;
            k.matmul(layer.gate, begin, end, from.rows(layer.gate, size_t(first), count), bench.wide.data() - size_t(begin) * kLanes, stride,
                     false, meanwhile);
            kv.end = behind;
            k.matmul(layer.up, begin, end, from.rows(layer.up, size_t(first), count), bench.other.data() - size_t(begin) * kLanes, stride,
                     false, meanwhile);
            const unsigned wanted = m.forms(layer, kDown);
            for (int r = 0; r < count; r++) {
                const size_t row = size_t(first + r), at = size_t(begin) * kLanes;
                float* const gated = few ? m.inner_.data() + row * s.inner + at : bench.wide.data() + size_t(r) * stride;
                k.silu_mul(bench.wide.data() + size_t(r) * stride, bench.other.data() + size_t(r) * stride, n, gated);
                if (!few) m.between_.fill(k, row, int(at), gated, n, s.inner, wanted);
            }
        }

        // What the next layer attends to, shared out among the items of two phases so that mostly the thread which fetches it also attends to it.
        Near near(const LayerWeights& layer, bool down, int item, int items) {
            Near to;
            const size_t next = size_t(&layer - m.layers.data()) + 1;
            if (next == m.layers.size()) return to;
            const LayerWeights& of = m.layers[next];
            const auto& found = plan(of.window)->near;
            const size_t streams = 2 * size_t(s.kv_heads), most = (2 * streams + 1) / 3;
            to.blocks = found.data();
            to.first_stream = down ? most : 0, to.streams = down ? streams - most : most;
            to.k = of.k_cache, to.v = of.v_cache;
            to.head_bytes = m.kv_slots * kv_bytes(s.kv, s.dim), to.block_bytes = kLanes * kv_bytes(s.kv, s.dim);
            to.next = found.size() * size_t(item) / size_t(items) * to.streams, to.end = found.size() * size_t(item + 1) / size_t(items) * to.streams;
            return to;
        }

        void accumulate(const Matrix& w, int item, Input& from, Near near) {
            const int all = groups(w), size = tiles_of_item(w);
            const int first = item / all * block, count = std::min(block, b.rows - first);
            const int begin = item % all * size, end = std::min(w.tiles(), begin + size);
            k.matmul(w, begin, end, from.rows(w, size_t(first), count), m.x_.data() + size_t(first) * s.hidden, size_t(s.hidden), true,
                     near.next < near.end ? &near : nullptr);
        }

        Model& m;
        const Batch& b;
        const Kernels& k;
        const Shape& s;
        unsigned serial;
        int unit, q_units, kv_units, row_blocks, block, row_item;
        bool few, by_head;
        std::vector<Plan> plans;
        Attention* attention = nullptr;
    };

    class Head : public Job {
    public:
        Head(Model& model, const int32_t* slots, int count)
            : m(model), k(model.kernels_), slots(slots), count(count), w(model.head), forms(Input::form_of(model.head)) {
            size = count >= 64 ? Draw::kTiles : 2 * Draw::kTiles;
            row_item = std::max(1, std::min(kRowItem, count / (4 * model.threads_->count())));
            row_blocks = blocks(count, kRowBlock);
            block = blocks(count, row_blocks);
            m.input_.reserve(size_t(count), w.k, forms);
        }

        int phases() const override { return 2; }
        int items(int phase) override {
            if (phase == 0) return blocks(count, row_item);
            return row_blocks * blocks(w.tiles(), size);
        }

        void run(int phase, int item, int thread) override {
            if (phase == 0) {
                for (int r = item * row_item; r < std::min(count, (item + 1) * row_item); r++)
                    m.input_.fill(k, size_t(r), m.hidden + size_t(slots[r]) * w.k, w.k, forms);
                return;
            }
            const int all = blocks(w.tiles(), size);
            const int first = item / all * block, rows = std::min(block, count - first);
            const int begin = item % all * size, end = std::min(w.tiles(), begin + size);
            const Rows from = m.input_.rows(w, size_t(first), rows);
            if (out) return k.matmul(w, begin, end, from, out + size_t(first) * w.n, size_t(w.n), false, nullptr);
            auto& buffer = m.benches_[size_t(thread)].wide;
            const size_t stride = size_t(size) * kLanes;
            if (buffer.size() < rows * stride) buffer.resize(rows * stride);
            for (int tile = begin; tile < end; tile++) {
                const int start = tile;  // of a run of tiles that some row wants
                while (tile < end && wanted(tile, first, rows)) tile++;
                if (tile > start) k.matmul(w, start, tile, from, buffer.data() - size_t(begin) * kLanes, stride, false, nullptr);
            }
            for (int tile = begin; tile < end; tile += Draw::kTiles)
                for (int r = 0; r < rows; r++)
                    draw->take(tile / Draw::kTiles, first + r, buffer.data() + r * stride + size_t(tile - begin) * kLanes, thread);
        }

        float* out = nullptr;
        Draw* draw = nullptr;

    private:
        bool wanted(int tile, int first, int rows) const {
            for (int r = first; r < first + rows; r++)
                if (draw->wanted(tile, r)) return true;
            return false;
        }

        Model& m;
        const Kernels& k;
        const int32_t* slots;
        const int count;
        const Matrix& w;
        const unsigned forms;
        int size, row_blocks, block, row_item;
    };

    std::shared_ptr<Threads> threads_;
    const Kernels& kernels_;
    std::vector<Bench> benches_;
    std::vector<float> x_, q_, attended_, inner_;
    Input input_, between_;  // between_: of the last matrix of a layer
    Attention::Arena arena_;
    unsigned jobs_ = 0;
};

inline float half_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 1023;
    float value;
    if (exponent == 0) {
        value = float(mantissa) * 0x1p-24f;
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        bits |= sign;
        std::memcpy(&value, &bits, 4);
        return value;
    }
    const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline void unpack_row(const Matrix& w, int index, const Kernels&, float* out) {
    const int tile = index / kLanes, lane = index % kLanes;
    if (w.kind == Kind::kQ4 || w.kind == Kind::kQ8) {
        const int code_bytes = w.group * kLanes / (w.kind == Kind::kQ4 ? 2 : 1), scale = w.wide ? 4 : 2;
        const uint8_t* at = w.data + size_t(tile) * (w.k / w.group) * group_bytes(w);
        for (int g = 0; g < w.k / w.group; g++, at += group_bytes(w)) {
            const auto number = [&](int which) {
                const uint8_t* p = at + code_bytes + (size_t(which) * kLanes + lane) * scale;
                if (w.wide) {
                    float value;
                    std::memcpy(&value, p, 4);
                    return value;
                }
                uint16_t half;
                std::memcpy(&half, p, 2);
                return half_to_float(half);
            };
            const float d = number(0), min = w.mins ? number(1) : -float(w.offset) * d;
            for (int i = 0; i < w.group; i++) {
                int code;
                if (w.kind == Kind::kQ8) {
                    code = at[i / 4 * 64 + lane * 4 + i % 4];
                } else {
                    const int half = w.group / 2, j = i % half;
                    code = at[j / 4 * 64 + lane * 4 + j % 4] >> (i < half ? 0 : 4) & 15;
                }
                out[g * w.group + i] = d * float(code) + min;
            }
        }
        return;
    }
    for (int i = 0; i < w.k; i++) {
        const size_t at = (size_t(tile) * w.k + i) * kLanes + lane;
        if (w.kind == Kind::kF32) {
            std::memcpy(out + i, w.data + at * 4, 4);
            continue;
        }
        uint16_t raw;
        std::memcpy(&raw, w.data + at * 2, 2);
        if (w.kind == Kind::kF16) {
            out[i] = half_to_float(raw);
        } else {
            const uint32_t bits = uint32_t(raw) << 16;
            std::memcpy(out + i, &bits, 4);
        }
    }
}

}  // namespace radixrt
