// Draw: from blocks of logits, made by any thread in any order, to one token a row. All logits of a row never stand anywhere.
//
//   likeliest     the best of each thread, then of all; the lowest id of equal ones
//   drawn         each block leaves (m, s): its largest logit and the sum of 2^((logit - m) / temperature); inverting the sum of all at
//                 the row's chance finds a block, whose logits are then made once more
//   filtered      top-k, top-p and min-p look at the kCandidates likeliest tokens; a row whose filters might keep more is not settled, and
//                 is drawn from its full logits by the caller
//
// A block is the same 64 tokens in every batch and its sums are made the same way, so a row's token does not depend on the rows beside it.
// Order of what is asked: repetition penalty, the other penalties and bias, allowed tokens, temperature, top-k, top-p, min-p.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "kernels.hpp"

namespace radixrt {

struct Wishes {  // of each row
    const int32_t* const* masks = nullptr;   // null: all tokens, or for each row null or a bit for each token
    // without these: the likeliest token of each row
    const float* temperature = nullptr;      // 0: the likeliest
    const double* chance = nullptr;          // in [0, 1)
    const int32_t* top_k = nullptr;          // 0: all
    const float *top_p = nullptr, *min_p = nullptr;
    const int32_t* edit_end = nullptr;       // of the row's edits; they begin where those of the row before end
    const int32_t* edit_ids = nullptr;       // ascending within a row
    const float *edit_factor = nullptr, *edit_add = nullptr;  // logit / factor where above 0, else * factor; then + add
};

class Draw {
public:
    static constexpr int kTiles = 4, kTokens = kTiles * kLanes;  // of a block
    static constexpr size_t kCandidates = 256;
    static constexpr int32_t kNothing = -1, kUnsettled = -2;

    Draw(const Kernels& kernels, const Wishes& wishes, int rows, int vocab, int threads)
        : k_(kernels), w_(wishes), vocab_(vocab), blocks_((vocab + kTokens - 1) / kTokens), rows_(size_t(rows)), threads_(size_t(threads)),
          best_(rows_ * threads_), found_(rows_ * threads_) {
        if (w_.temperature && std::any_of(w_.temperature, w_.temperature + rows, [](float t) { return t > 0; }))
            sums_.resize(rows_ * size_t(blocks_), Sum{-kInfinity, 0});
    }

    int blocks() const { return blocks_; }

    // whether a token of this tile may come in this row
    bool wanted(int tile, int row) const { return allowed(tile, row) != 0; }

    // The logits of a block, in place made what is drawn from.
    void take(int block, int row, float* logits, int thread) {
        prepare(block, row, logits);
        const float most = k_.largest(logits, kTokens);
        if (most == -kInfinity) return;
        const bool draws = drawn(row);
        if (draws) sums_[size_t(row) * blocks_ + size_t(block)] = {most, k_.weigh(logits, kTokens, most, scale(row))};
        const size_t at = size_t(thread) * rows_ + size_t(row);
        Best& best = best_[at];
        if (std::isnan(most)) best.value = most;
        if (!(most < best.value) && !std::isnan(best.value)) {
            const int id = block * kTokens + int(std::find(logits, logits + kTokens, most) - logits);
            if (most > best.value || best.id < 0 || id < best.id) best = {most, id};
        }
        if (!draws || !filtered(row)) return;
        auto& found = found_[at];
        if (most < found.least) return;
        for (int i = 0; i < kTokens; i++)
            if (logits[i] >= found.least && logits[i] > -kInfinity) found.add({logits[i], block * kTokens + i});
    }

    // The token of a row, and its largest logit: not finite where no token can be had. `make(block, logits)` makes a block's logits again.
    template <class Make>
    std::pair<int32_t, float> finish(int row, Make make) const {
        Best best;
        for (size_t t = 0; t < threads_; t++) {
            const Best& other = best_[t * rows_ + size_t(row)];
            if (std::isnan(other.value)) return {kNothing, other.value};
            if (other.id >= 0 && (other.value > best.value || (other.value == best.value && (best.id < 0 || other.id < best.id)))) best = other;
        }
        if (!std::isfinite(best.value) || !drawn(row)) return {best.id, best.value};
        return {filtered(row) ? pick(row, best.value) : invert(row, best.value, make), best.value};
    }

private:
    static constexpr float kInfinity = std::numeric_limits<float>::infinity();

    struct Best {
        float value = -kInfinity;
        int32_t id = kNothing;
    };
    struct Sum {
        float most, sum;
    };
    struct Candidate {
        float logit;
        int32_t id;
        bool operator<(const Candidate& other) const { return logit != other.logit ? logit > other.logit : id < other.id; }
    };
    struct Found {  // the likeliest tokens of a row that one thread saw, and some more
        float least = -kInfinity;
        std::vector<Candidate> tokens;

        void add(Candidate one) {
            tokens.push_back(one);
            if (tokens.size() < 2 * kCandidates) return;
            std::nth_element(tokens.begin(), tokens.begin() + (kCandidates - 1), tokens.end());
            tokens.resize(kCandidates);
            least = tokens.back().logit;
        }
    };

    bool drawn(int row) const { return w_.temperature && w_.temperature[row] > 0; }
    bool filtered(int row) const { return w_.top_k[row] > 0 || w_.top_p[row] < 1 || w_.min_p[row] > 0; }
    float scale(int row) const { return 1.44269504f / std::max(w_.temperature[row], 1e-6f); }

    unsigned allowed(int tile, int row) const {
        if (!w_.masks || !w_.masks[row]) return 0xffff;
        return uint32_t(w_.masks[row][tile / 2]) >> (tile % 2 * kLanes) & 0xffff;
    }

    void prepare(int block, int row, float* logits) const {
        const int first = block * kTokens, count = std::min(kTokens, vocab_ - first);
        if (w_.edit_end) {
            const int32_t *begin = w_.edit_ids + (row ? w_.edit_end[row - 1] : 0), *end = w_.edit_ids + w_.edit_end[row];
            for (const int32_t* id = std::lower_bound(begin, end, first); id < end && *id < first + count; id++) {
                float& logit = logits[*id - first];
                const float factor = w_.edit_factor[id - w_.edit_ids];
                logit = (logit > 0 ? logit / factor : logit * factor) + w_.edit_add[id - w_.edit_ids];
            }
        }
        std::fill(logits + count, logits + kTokens, -kInfinity);
        if (!w_.masks || !w_.masks[row]) return;
        for (int tile = 0; tile * kLanes < count; tile++) {
            const unsigned bits = allowed(block * kTiles + tile, row);
            if (bits == 0xffff) continue;
            for (int i = 0; i < kLanes; i++)
                if (!(bits >> i & 1)) logits[tile * kLanes + i] = -kInfinity;
        }
    }

    double total(int row, float best) const {
        double all = 0;
        const Sum* sums = sums_.data() + size_t(row) * size_t(blocks_);
        for (int b = 0; b < blocks_; b++) all += mass(row, sums[b], best);
        return all;
    }

    double mass(int row, const Sum& of, float best) const {
        return of.sum > 0 ? of.sum * std::exp2((double(of.most) - best) * scale(row)) : 0;
    }

    template <class Make>
    int32_t invert(int row, float best, Make make) const {
        const double target = w_.chance[row] * total(row, best);
        const Sum* sums = sums_.data() + size_t(row) * size_t(blocks_);
        double before = 0;
        int last = -1;  // that holds anything; rounding must not lead behind it
        double before_last = 0;
        for (int b = 0; b < blocks_; b++) {
            const double here = mass(row, sums[b], best);
            if (here <= 0) continue;
            last = b, before_last = before, before += here;
            if (before > target) break;
        }
        float logits[kTokens];
        make(last, logits);
        prepare(last, row, logits);
        int32_t token = kNothing;
        for (int i = 0; i < kTokens; i++) {
            const double weight = std::exp2((double(logits[i]) - best) * scale(row));
            if (!(weight > 0)) continue;
            token = last * kTokens + i;
            if ((before_last += weight) > target) break;
        }
        return token;
    }

    int32_t pick(int row, float best) const {
        std::vector<Candidate> tokens;
        for (size_t t = 0; t < threads_; t++) {
            const auto& found = found_[t * rows_ + size_t(row)].tokens;
            tokens.insert(tokens.end(), found.begin(), found.end());
        }
        std::sort(tokens.begin(), tokens.end());
        const bool all = tokens.size() <= kCandidates;
        if (!all) tokens.resize(kCandidates);
        const size_t most = w_.top_k[row] > 0 ? size_t(w_.top_k[row]) : size_t(vocab_);
        const bool complete = all || most <= kCandidates;
        if (tokens.size() > most) tokens.resize(most);
        std::vector<double> weights;
        double sum = 0;
        for (const auto& token : tokens) weights.push_back(std::exp2((double(token.logit) - best) * scale(row))), sum += weights.back();
        const double enough = w_.top_p[row] * (complete ? sum : total(row, best));
        size_t kept = 0;
        double before = 0;
        while (kept < tokens.size() && (!kept || (before < enough && weights[kept] >= w_.min_p[row] * weights[0] && weights[kept] > 0)))
            before += weights[kept++];
        if (kept == tokens.size() && !complete) return kUnsettled;
        const double target = w_.chance[row] * before;
        size_t i = 0;
        for (double until = weights[0]; until <= target && i + 1 < kept; until += weights[i]) i++;
        return tokens[i].id;
    }

    const Kernels& k_;
    const Wishes& w_;
    const int vocab_, blocks_;
    const size_t rows_, threads_;
    std::vector<Best> best_;    // [threads, rows]
    std::vector<Found> found_;  // [threads, rows]
    std::vector<Sum> sums_;     // [rows, blocks]
};

}  // namespace radixrt
