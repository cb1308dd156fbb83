// Character automata to byte automata: regular/encode.py's _Template.fill for every state, and the numbering of _tidy.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace radixrt {

struct Span {
    int32_t low, high, to;
};
using Spans = std::vector<Span>;

struct WordsHash {
    size_t operator()(const std::vector<int32_t>& words) const {
        uint64_t h = words.size();
        for (int32_t w : words) {
            h = (h ^ uint32_t(w)) * 0x9E3779B97F4A7C15ull;
            h ^= h >> 29;
        }
        return size_t(h);
    }
};

// The byte edges of one state with classes for leaves: nodes below `classes` are classes, the others inner nodes.
struct Template {
    Spans root;
    std::vector<Spans> edges;                 // of each node; none for classes
    std::vector<std::vector<int32_t>> used;   // the classes below each node
    std::vector<int32_t> forms;               // equal for nodes that differ in their classes only
    int32_t classes = 0;
};

class Speller {
  public:
    Speller(const Template& shape, size_t states) : t_(shape), nodes_(states) {}

    void fill(size_t state, const std::vector<int32_t>& row) {
        auto [it, is_new] = rows_.try_emplace(row, int32_t(state));
        nodes_[state] = is_new ? instance(row, t_.root) : nodes_[size_t(it->second)];
    }

    // The reachable states, the start first, in order of discovery; place: each node's number or -1.
    std::vector<int32_t> order(std::vector<int32_t>& place) const {
        std::vector<int32_t> out{0};
        place.assign(nodes_.size(), -1);
        place[0] = 0;
        for (size_t i = 0; i < out.size(); i++)
            for (const Span& e : nodes_[size_t(out[i])])
                if (place[size_t(e.to)] < 0) {
                    place[size_t(e.to)] = int32_t(out.size());
                    out.push_back(e.to);
                }
        return out;
    }

    const Spans& edges(int32_t node) const { return nodes_[size_t(node)]; }

  private:
    Spans instance(const std::vector<int32_t>& row, const Spans& edges) {
        Spans out;
        for (const Span& e : edges) {
            int32_t target = e.to < t_.classes ? row[size_t(e.to)] : inner(row, e.to);
            if (target < 0) continue;
            if (!out.empty() && out.back().to == target && out.back().high == e.low - 1) out.back().high = e.high;
            else out.push_back({e.low, e.high, target});
        }
        return out;
    }

    int32_t inner(const std::vector<int32_t>& row, int32_t node) {
        const std::vector<int32_t>& used = t_.used[size_t(node)];
        int32_t first = row[size_t(used[0])];
        bool same = true;
        for (size_t i = 1; i < used.size() && same; i++) same = row[size_t(used[i])] == first;
        if (same && first < 0) return -1;
        std::vector<int32_t> key;
        if (same) {
            key = {-1, t_.forms[size_t(node)], first};
        } else {
            key.reserve(used.size() + 1);
            key.push_back(node);
            for (int32_t c : used) key.push_back(row[size_t(c)]);
        }
        auto it = known_.find(key);
        if (it != known_.end()) return it->second;
        Spans made = instance(row, t_.edges[size_t(node)]);
        int32_t id = made.empty() ? -1 : number(std::move(made));
        known_.emplace(std::move(key), id);
        return id;
    }

    int32_t number(Spans&& made) {
        std::vector<int32_t> key;
        key.reserve(made.size() * 3);
        for (const Span& e : made) key.insert(key.end(), {e.low, e.high, e.to});
        auto [it, is_new] = contents_.try_emplace(std::move(key), int32_t(nodes_.size()));
        if (is_new) nodes_.push_back(std::move(made));
        return it->second;
    }

    const Template& t_;
    std::vector<Spans> nodes_;
    std::unordered_map<std::vector<int32_t>, int32_t, WordsHash> rows_, known_, contents_;
};

}  // namespace radixrt
