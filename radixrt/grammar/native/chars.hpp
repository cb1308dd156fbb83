// Automata over classes of characters, as tables of next states: products and the canonical form. The Python beside it
// (regular/minimize.py, regular/chardfa.py) is the reference; results are equal, number for number.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <unordered_map>
#include <utility>
#include <vector>

namespace radixrt {

// A complete deterministic automaton: next[state * width + class]; state 0 is the start, every state can be reached.
struct CharTable {
    int32_t width = 0;
    std::vector<int32_t> next;
    std::vector<uint8_t> final;

    size_t size() const { return final.size(); }
    const int32_t* row(size_t state) const { return &next[state * size_t(width)]; }
};

// Hopcroft's refinement (1971) on arrays. Returns each state's block; blocks are numbered from 0.
class Refinement {
  public:
    explicit Refinement(const CharTable& t) : t_(t), n_(t.size()) {}

    std::vector<int32_t> run(size_t& blocks) {
        distinct_columns();
        invert();
        begin();
        while (!work_.empty()) {
            auto [block, column] = work_.back();
            work_.pop_back();
            waiting_[size_t(block) * columns_.size() + size_t(column)] = 0;
            split(block, column);
        }
        blocks = first_.size();
        return std::move(block_);
    }

  private:
    void distinct_columns() {
        std::unordered_map<uint64_t, std::vector<int32_t>> by_hash;
        for (int32_t c = 0; c < t_.width; c++) {
            uint64_t hash = 0;
            for (size_t s = 0; s < n_; s++) hash = (hash ^ uint64_t(t_.row(s)[c])) * 0x9E3779B97F4A7C15ull;
            auto& same = by_hash[hash];
            bool known = false;
            for (int32_t other : same) {
                known = true;
                for (size_t s = 0; s < n_ && known; s++) known = t_.row(s)[c] == t_.row(s)[other];
                if (known) break;
            }
            if (known) continue;
            same.push_back(c);
            columns_.push_back(c);
        }
    }

    // The states each column leads to a state from, in one list for each column.
    void invert() {
        at_.assign(columns_.size() * (n_ + 1), 0);
        from_.resize(columns_.size() * n_);
        for (size_t k = 0; k < columns_.size(); k++) {
            uint32_t* at = &at_[k * (n_ + 1)];
            for (size_t s = 0; s < n_; s++) at[t_.row(s)[columns_[k]] + 1]++;
            for (size_t s = 0; s < n_; s++) at[s + 1] += at[s];
            std::vector<uint32_t> fill(at, at + n_);
            for (size_t s = 0; s < n_; s++) from_[k * n_ + fill[size_t(t_.row(s)[columns_[k]])]++] = int32_t(s);
        }
    }

    void begin() {
        state_.resize(n_);
        place_.resize(n_);
        block_.assign(n_, 0);
        size_t ends = 0;
        for (size_t s = 0; s < n_; s++) ends += t_.final[s];
        size_t low = 0, high = ends == n_ ? 0 : n_ - ends;
        bool both = ends && ends < n_;
        for (size_t s = 0; s < n_; s++) {
            size_t at = t_.final[s] ? high++ : low++;
            state_[at] = int32_t(s);
            place_[s] = uint32_t(at);
            block_[s] = both && t_.final[s];
        }
        first_.push_back(0);
        end_.push_back(uint32_t(both ? n_ - ends : n_));
        if (both) {
            first_.push_back(end_[0]);
            end_.push_back(uint32_t(n_));
        }
        marked_.assign(first_.size(), 0);
        waiting_.assign(first_.size() * columns_.size(), 0);
        if (!both) return;
        int32_t smaller = end_[0] - first_[0] <= end_[1] - first_[1] ? 0 : 1;
        for (size_t k = 0; k < columns_.size(); k++) wait(smaller, int32_t(k));
    }

    void wait(int32_t block, int32_t column) {
        uint8_t& flag = waiting_[size_t(block) * columns_.size() + size_t(column)];
        if (flag) return;
        flag = 1;
        work_.push_back({block, column});
    }

    void split(int32_t block, int32_t column) {
        const uint32_t* at = &at_[size_t(column) * (n_ + 1)];
        const int32_t* from = &from_[size_t(column) * n_];
        hits_.clear();  // taken down first: marking moves states about, in this block too
        for (uint32_t i = first_[size_t(block)]; i < end_[size_t(block)]; i++)
            hits_.insert(hits_.end(), from + at[state_[i]], from + at[state_[i] + 1]);
        touched_.clear();
        for (int32_t s : hits_) {
            size_t b = size_t(block_[size_t(s)]);
            if (marked_[b] == 0) touched_.push_back(int32_t(b));
            uint32_t to = first_[b] + marked_[b]++, was = place_[size_t(s)];
            int32_t other = state_[to];
            std::swap(state_[to], state_[was]);
            place_[size_t(s)] = to;
            place_[size_t(other)] = was;
        }
        for (int32_t old : touched_) {
            uint32_t marks = marked_[size_t(old)];
            marked_[size_t(old)] = 0;
            if (marks == end_[size_t(old)] - first_[size_t(old)]) continue;
            int32_t made = int32_t(first_.size());  // the marked ones
            uint32_t begin = first_[size_t(old)], cut = begin + marks;
            first_.push_back(begin);
            end_.push_back(cut);
            marked_.push_back(0);
            first_[size_t(old)] = cut;
            for (uint32_t i = begin; i < cut; i++) block_[size_t(state_[i])] = made;
            waiting_.resize(first_.size() * columns_.size(), 0);
            bool fewer = marks <= end_[size_t(old)] - cut;
            for (size_t k = 0; k < columns_.size(); k++)
                wait(waiting_[size_t(old) * columns_.size() + k] || fewer ? made : old, int32_t(k));
        }
    }

    const CharTable& t_;
    size_t n_;
    std::vector<int32_t> columns_, from_, state_, block_, hits_, touched_;
    std::vector<uint32_t> at_, place_, first_, end_, marked_;
    std::vector<uint8_t> waiting_;
    std::vector<std::pair<int32_t, int32_t>> work_;
};

// The minimal automaton, states numbered breadth first. `keep`: the columns, in the order in which states are found; empty: all.
inline CharTable quotient(const CharTable& t, const std::vector<int32_t>& block, size_t blocks, const std::vector<int32_t>& keep) {
    std::vector<int32_t> head(blocks, -1), place(blocks, -1), order{block[0]};
    for (size_t s = t.size(); s-- > 0;) head[size_t(block[s])] = int32_t(s);
    place[size_t(block[0])] = 0;
    CharTable out;
    out.width = keep.empty() ? t.width : int32_t(keep.size());
    for (size_t i = 0; i < order.size(); i++) {
        size_t s = size_t(head[size_t(order[i])]);
        out.final.push_back(t.final[s]);
        for (int32_t k = 0; k < out.width; k++) {
            int32_t to = block[size_t(t.row(s)[keep.empty() ? k : keep[size_t(k)]])];
            if (place[size_t(to)] < 0) {
                place[size_t(to)] = int32_t(order.size());
                order.push_back(to);
            }
            out.next.push_back(place[size_t(to)]);
        }
    }
    return out;
}

inline CharTable minimal(const CharTable& t) {
    size_t blocks;
    std::vector<int32_t> block = Refinement(t).run(blocks);
    return quotient(t, block, blocks, {});
}

// Minimal, and classes that are alike made one: `classes` of the alphabet's intervals (-1: none) are renamed in order of their
// first interval.
inline CharTable canonical(const CharTable& t, std::vector<int32_t>& classes) {
    CharTable small = minimal(t);
    std::vector<int32_t> name(size_t(small.width), -1), keep;
    std::unordered_map<uint64_t, std::vector<int32_t>> by_hash;  // of a column, to its number in keep
    for (int32_t& cls : classes) {
        if (cls < 0) continue;
        int32_t c = cls;
        if (name[size_t(c)] < 0) {
            uint64_t hash = 0;
            for (size_t s = 0; s < small.size(); s++) hash = (hash ^ uint64_t(small.row(s)[c])) * 0x9E3779B97F4A7C15ull;
            auto& same = by_hash[hash];
            for (int32_t k : same) {
                bool equal = true;
                for (size_t s = 0; s < small.size() && equal; s++) equal = small.row(s)[c] == small.row(s)[keep[size_t(k)]];
                if (equal) name[size_t(c)] = k;
            }
            if (name[size_t(c)] < 0) {
                name[size_t(c)] = int32_t(keep.size());
                same.push_back(name[size_t(c)]);
                keep.push_back(c);
            }
        }
        cls = name[size_t(c)];
    }
    std::vector<int32_t> each(small.size());
    std::iota(each.begin(), each.end(), 0);
    return quotient(small, each, small.size(), keep);
}

enum class Over { NO, WORK, STATES };

// The pairs of states both automata reach together; pairs: the classes of either for each class of the product. keep[2 * a + b]:
// whether a text is in the product that a and b say is in the two. A pair one side of which can decide alone stands for all.
inline Over product(const CharTable& a, const CharTable& b, const std::vector<std::pair<int32_t, int32_t>>& pairs, const bool keep[4],
                    int64_t max_states, int64_t work, CharTable& out) {
    auto sinks = [](const CharTable& t) {
        std::vector<uint8_t> sink(t.size());
        for (size_t s = 0; s < t.size(); s++)
            sink[s] = std::all_of(t.row(s), t.row(s) + t.width, [&](int32_t to) { return to == int32_t(s); });
        return sink;
    };
    std::vector<uint8_t> left = sinks(a), right = sinks(b);
    constexpr uint64_t NO = ~uint64_t(0), YES = NO - 1;
    auto settle = [&](int32_t x, int32_t y) {
        bool fx = a.final[size_t(x)], fy = b.final[size_t(y)];
        if (left[size_t(x)] && keep[2 * fx] == keep[2 * fx + 1]) return keep[2 * fx] ? YES : NO;
        if (right[size_t(y)] && keep[fy] == keep[2 + fy]) return keep[fy] ? YES : NO;
        return uint64_t(uint32_t(x)) << 32 | uint32_t(y);
    };
    out.width = int32_t(pairs.size());
    std::unordered_map<uint64_t, int32_t> ids;
    std::vector<uint64_t> order{settle(0, 0)};
    ids[order[0]] = 0;
    for (size_t i = 0; i < order.size(); i++) {
        uint64_t state = order[i];
        const int32_t *x = nullptr, *y = nullptr;
        if (state < YES) {
            x = a.row(size_t(state >> 32));
            y = b.row(size_t(uint32_t(state)));
            out.final.push_back(keep[2 * a.final[size_t(state >> 32)] + b.final[size_t(uint32_t(state))]]);
        } else {
            out.final.push_back(state == YES);
        }
        for (auto [p, q] : pairs) {
            uint64_t to = x ? settle(x[p], y[q]) : state;
            auto [it, is_new] = ids.try_emplace(to, int32_t(order.size()));
            if (is_new) order.push_back(to);
            out.next.push_back(it->second);
        }
        work -= int64_t(pairs.size());
        if (work < 0) return Over::WORK;
        if (int64_t(order.size()) > max_states) return Over::STATES;
    }
    return Over::NO;
}

}  // namespace radixrt
