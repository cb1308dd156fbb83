// The configurations of one constraint and how bytes lead from one to the next, all found when first asked for.
//
// A node is a set of (key, node below), keys ascending and each once: a configuration with its stacks as a trie, shared from
// the top down. So a set of stacks takes as many keys as there are places, however many stacks there are. Node 0: dead. Node 1:
// below everything, accepts. A key is an NFA state and a repeat count. Nodes are made once each (hash-consed), so a number is an
// identity: rows, masks and plans hang on it. All of it is a cache: collect() drops what no matcher stands on.
#pragma once

#include <cstring>
#include <deque>
#include <memory>

#include "nfa.hpp"
#include "vocabulary.hpp"

namespace radixrt {

struct Limits {
    size_t items = 50000;            // keys of one configuration
    size_t depth = 20000;            // nested calls
    size_t memory = size_t(64) << 20;
};

struct Entry {
    u32 state, count;
    i32 below;
    u64 key() const { return u64(state) << 32 | count; }
    bool operator==(const Entry& o) const { return state == o.state && count == o.count && below == o.below; }
};

class Configurations {
  public:
    static constexpr i32 DEAD = 0, BOTTOM = 1, UNKNOWN = -1;

    Configurations(Nfa nfa, std::shared_ptr<const Vocabulary> vocabulary, Limits limits)
        : nfa_(std::move(nfa)), v_(std::move(vocabulary)), limits_(limits) {
        fixed_ = nfa_.size() * 41 + nfa_.edges.size() * sizeof(Edge) + nfa_.empties.size() * 4;
        reset();
    }

    const Nfa& nfa() const { return nfa_; }
    const Vocabulary& vocabulary() const { return *v_; }
    i32 start() const { return start_; }
    u64 cost(i32 n) const { return nodes_[n].cost; }
    bool accepts(i32 n) const { return nodes_[n].accepts; }
    bool continues(i32 n) const { return !live_classes(n).empty(); }
    size_t node_count() const { return nodes_.size(); }
    size_t mask_count() const { return masks_; }
    size_t memory() const {
        return fixed_ + nodes_.size() * (sizeof(Node) + 8) + entries_.size() * sizeof(Entry) +
               rows_ * (size_t(nfa_.classes) * 4 + 32) + masks_ * (v_->words * 4 + 64);
    }

    i32 next(i32 n, uint8_t byte) { return step(n, nfa_.byte_class[byte]); }

    i32 walk(i32 n, const char* text, size_t length) {
        for (size_t i = 0; i < length && n != DEAD; i++) n = next(n, uint8_t(text[i]));
        return n;
    }

    // What is reached by a token, or DEAD: also where the vocabulary cannot spell any way on.
    i32 walk_token(i32 n, i32 token) {
        if (token < 0 || size_t(token) >= v_->spelled.size() || v_->spelled[token].empty()) return DEAD;
        const std::string& text = v_->spelled[token];
        n = walk(n, text.data(), text.size());
        return cost(n) < NEVER ? n : DEAD;
    }

    struct Mask {
        std::unique_ptr<u32[]> bits;
        u64 worst = 0;  // the longest shortest completion, in bytes, after any token of it
    };

    // Drops all but the given nodes and what they stand on; gives them their new numbers.
    void collect(std::vector<i32*>& roots) {
        std::vector<Node> old;
        std::vector<Entry> old_entries;
        old.swap(nodes_);
        old_entries.swap(entries_);
        reset();
        std::vector<i32> moved(old.size(), UNKNOWN);
        moved[DEAD] = DEAD;
        moved[BOTTOM] = BOTTOM;
        std::vector<i32> todo;
        std::vector<Entry> copy;
        for (i32* root : roots) {
            todo.push_back(*root);
            while (!todo.empty()) {
                i32 n = todo.back();
                if (moved[n] != UNKNOWN) {
                    todo.pop_back();
                    continue;
                }
                bool ready = true;
                for (u32 i = 0; i < old[n].length; i++) {
                    i32 below = old_entries[old[n].at + i].below;
                    if (moved[below] == UNKNOWN) {
                        todo.push_back(below);
                        ready = false;
                    }
                }
                if (!ready) continue;
                copy.assign(old_entries.begin() + old[n].at, old_entries.begin() + old[n].at + old[n].length);
                for (auto& e : copy) e.below = moved[e.below];
                moved[n] = make(copy);
                todo.pop_back();
            }
            *root = moved[*root];
        }
    }
    bool full() const { return memory() - fixed_ > limits_.memory; }

  protected:
    struct Node {
        u32 at = 0, length = 0;
        u64 cost = NEVER;
        u32 depth = 0;
        bool accepts = false;
        int8_t free = -1;
        int16_t best = -2, forced = -2;
        i32 alike = UNKNOWN, plan = UNKNOWN, worst_plan = UNKNOWN;
        i32* row = nullptr;
        std::unique_ptr<Mask> mask;
    };

    void reset() {
        nodes_.clear();
        entries_.clear();
        row_memory_.clear();
        rows_ = masks_ = 0;
        table_.assign(1024, UNKNOWN);
        std::fill(unions_, unions_ + 1024, Union{});
        nodes_.emplace_back();  // DEAD
        nodes_.back().alike = DEAD;
        std::vector<Entry> bottom{{u32(nfa_.accept), 0, DEAD}};
        make(bottom);
        open();
        reach(nfa_.start, 0, BOTTOM);
        start_ = close();
    }

    // The node of these entries (ascending).
    i32 make(const std::vector<Entry>& entries) {
        if (entries.empty()) return DEAD;
        u64 h = 1469598103934665603ull;
        for (auto& e : entries) {
            h = (h ^ e.key()) * 0x9E3779B97F4A7C15ull;
            h = (h ^ (h >> 29) ^ u64(u32(e.below))) * 0xBF58476D1CE4E5B9ull;
        }
        h ^= h >> 32;
        size_t mask = table_.size() - 1, slot = h & mask;
        for (; table_[slot] != UNKNOWN; slot = (slot + 1) & mask) {
            const Node& n = nodes_[table_[slot]];
            if (n.length == entries.size() && std::equal(entries.begin(), entries.end(), entries_.begin() + n.at))
                return table_[slot];
        }
        i32 id = i32(nodes_.size());
        if (memory() - fixed_ > 4 * limits_.memory + (size_t(1) << 20)) throw TooLarge("needs more memory than its limit of " + std::to_string(limits_.memory) + " bytes");
        nodes_.emplace_back();
        Node& n = nodes_.back();
        n.at = u32(entries_.size());
        n.length = u32(entries.size());
        entries_.insert(entries_.end(), entries.begin(), entries.end());
        for (auto& e : entries) {
            if (i32(e.state) == nfa_.accept) {
                n.cost = 0;
                n.accepts = true;
            } else {
                n.cost = std::min(n.cost, plus(nfa_.way(e.state, e.count, false), nodes_[e.below].cost));
            }
            n.depth = std::max(n.depth, nodes_[e.below].depth + 1);
        }
        if (n.depth > limits_.depth) throw TooLarge("is nested more than " + std::to_string(limits_.depth) + " deep");
        table_[slot] = id;
        if (nodes_.size() * 2 > table_.size()) rehash();
        return id;
    }

    void rehash() {
        std::vector<i32> old(table_.size() * 2, UNKNOWN);
        old.swap(table_);
        size_t mask = table_.size() - 1;
        for (i32 id : old) {
            if (id == UNKNOWN) continue;
            u64 h = 1469598103934665603ull;
            for (u32 i = 0; i < nodes_[id].length; i++) {
                const Entry& e = entries_[nodes_[id].at + i];
                h = (h ^ e.key()) * 0x9E3779B97F4A7C15ull;
                h = (h ^ (h >> 29) ^ u64(u32(e.below))) * 0xBF58476D1CE4E5B9ull;
            }
            h ^= h >> 32;
            size_t slot = h & mask;
            while (table_[slot] != UNKNOWN) slot = (slot + 1) & mask;
            table_[slot] = id;
        }
    }

    i32 unite(i32 a, i32 b, int deep = 0) {
        if (a == b || b == DEAD) return a;
        if (a == DEAD) return b;
        if (a > b) std::swap(a, b);
        if (deep > 5000) throw TooLarge("is too ambiguous: more than 5,000 nested calls in doubt");
        Union& memo = unions_[(u32(a) * 0x9E3779B1u ^ u32(b) * 0x85EBCA6Bu) >> 22];
        if (memo.a == a && memo.b == b) return memo.made;
        std::vector<Entry> merged;
        u32 i = nodes_[a].at, j = nodes_[b].at, ie = i + nodes_[a].length, je = j + nodes_[b].length;
        merged.reserve(ie - i + je - j);
        while (i < ie || j < je) {
            if (j == je || (i < ie && entries_[i].key() < entries_[j].key())) {
                merged.push_back(entries_[i++]);
            } else if (i == ie || entries_[j].key() < entries_[i].key()) {
                merged.push_back(entries_[j++]);
            } else {
                Entry e = entries_[i];
                e.below = unite(entries_[i].below, entries_[j].below, deep + 1);
                merged.push_back(e);
                i++, j++;
            }
        }
        drop_covered(merged);
        if (merged.size() > limits_.items) throw TooLarge("is too ambiguous: more than " + std::to_string(limits_.items) + " places at once");
        i32 made = make(merged);
        unions_[(u32(a) * 0x9E3779B1u ^ u32(b) * 0x85EBCA6Bu) >> 22] = {a, b, made};
        return made;
    }

    i32 loop_at(u32 state) const {
        return nfa_.kind[state] == Kind::FRAMES ? nfa_.a[state] : nfa_.loop_of[state];
    }

    // Drops what another entry of the same state and the same below covers: with an open exit, the fewest turns leave the
    // most; without an upper bound, the most turns owe the least. So ambiguous counts stay few. Entries are ascending.
    void drop_covered(std::vector<Entry>& entries) const {
        size_t out = 0, size = entries.size();
        for (size_t i = 0; i < size;) {
            size_t end = i + 1;
            while (end < size && entries[end].state == entries[i].state) end++;
            i32 number = end - i > 1 ? loop_at(entries[i].state) : -1;
            if (number < 0) {
                while (i < end) entries[out++] = entries[i++];
                continue;
            }
            const Loop& l = nfa_.loops[number];
            size_t first = out;
            if (l.high == ~0u) {
                for (; i < end; i++) {
                    bool covered = false;
                    for (size_t k = end - 1; k > i && k + 16 >= end && !covered; k--) covered = entries[k].below == entries[i].below;
                    if (!covered) entries[out++] = entries[i];
                }
            } else {
                for (; i < end; i++) {
                    bool covered = false;
                    if (entries[i].count >= l.low)
                        for (size_t k = out; k-- > first && out - k <= 16 && entries[k].count >= l.low && !covered;)
                            covered = entries[k].below == entries[i].below;
                    if (!covered) entries[out++] = entries[i];
                }
            }
        }
        entries.resize(out);
    }

    i32 frame(i32 state, u32 count, i32 below) {
        one_.assign(1, {u32(state), count, below});
        return make(one_);
    }

    // Puts a place on the list, or adds to what is below it. What cannot reach the end is left out.
    void reach(i32 state, u32 count, i32 below) {
        if (nfa_.kind[state] != Kind::ACCEPT && nfa_.way(state, count, true) >= NEVER) return;
        u64 key = u64(u32(state)) << 32 | count;
        i32 at = find(key);
        if (at >= 0) {
            i32 both = unite(seen_[at].below, below);
            if (both == seen_[at].below) return;
            seen_[at].below = both;
            if (fresh_[at] == DEAD) queue_.push_back(u32(at));
            fresh_[at] = unite(fresh_[at], below);
            return;
        }
        if (seen_.size() >= limits_.items) throw TooLarge("is too ambiguous: more than " + std::to_string(limits_.items) + " places at once");
        if (seen_.size() >= 32) {
            if (index_.empty())
                for (u32 i = 0; i < seen_.size(); i++) index_[seen_[i].key()] = i;
            index_[key] = u32(seen_.size());
        }
        queue_.push_back(u32(seen_.size()));
        seen_.push_back({u32(state), count, below});
        fresh_.push_back(below);
    }

    void open() {
        seen_.clear();
        fresh_.clear();
        queue_.clear();
        if (!index_.empty()) index_.clear();
    }

    // Everything reached without a byte from the places put on the list since open(), as one node. First come, first served,
    // and with all that has come for a place by then: what two ways have in common is gone on with once.
    i32 close() {
        for (size_t turn = 0; turn < queue_.size(); turn++) {
            if (turn > 50 * limits_.items) throw TooLarge("is too ambiguous: more than " + std::to_string(50 * limits_.items) + " moves for one byte");
            u32 at = queue_[turn];
            Entry e = seen_[at];
            e.below = fresh_[at];
            fresh_[at] = DEAD;
            i32 s = i32(e.state);
            switch (nfa_.kind[s]) {
                case Kind::PLAIN:
                    for (u32 i = nfa_.empty_at[s]; i < nfa_.empty_at[s + 1]; i++) reach(nfa_.empties[i], e.count, e.below);
                    break;
                case Kind::CALL: {
                    i32 back = nfa_.b[s];
                    if (nfa_.kind[back] == Kind::END) {  // a tail call: nothing to come back for
                        reach(nfa_.a[s], 0, e.below);
                    } else if (nfa_.way(back, 0, true) < NEVER) {
                        reach(nfa_.a[s], 0, frame(back, 0, e.below));
                    }
                    break;
                }
                case Kind::END:
                    for (u32 i = nodes_[e.below].at, end = i + nodes_[e.below].length; i < end; i++) {
                        Entry back = entries_[i];
                        reach(i32(back.state), back.count, back.below);
                    }
                    break;
                case Kind::LOOP:
                case Kind::FRAMES: {
                    const Loop& l = nfa_.loops[nfa_.a[s]];
                    if (e.count >= l.low) reach(l.exit, 0, e.below);
                    if (e.count >= l.high) break;
                    if (nfa_.kind[s] == Kind::LOOP) reach(l.body, e.count, e.below);
                    else reach(l.body, 0, frame(s, l.next(e.count), e.below));
                    break;
                }
                case Kind::STEP: {
                    const Loop& l = nfa_.loops[nfa_.a[s]];
                    reach(l.state, l.next(e.count), e.below);
                    break;
                }
                case Kind::ACCEPT: break;
            }
        }
        kept_.clear();
        for (auto& e : seen_) {
            i32 s = i32(e.state);
            if (nfa_.kind[s] == Kind::ACCEPT || nfa_.edge_at[s] != nfa_.edge_at[s + 1]) kept_.push_back(e);
        }
        std::sort(kept_.begin(), kept_.end(), [](const Entry& x, const Entry& y) { return x.key() < y.key(); });
        drop_covered(kept_);
        return make(kept_);
    }

    i32 find(u64 key) const {
        if (!index_.empty()) {
            auto it = index_.find(key);
            return it == index_.end() ? -1 : i32(it->second);
        }
        for (size_t i = 0; i < seen_.size(); i++)
            if (seen_[i].key() == key) return i32(i);
        return -1;
    }

    i32* row(i32 n) {
        i32*& row = nodes_[n].row;
        if (!row) {
            row_memory_.emplace_back(new i32[nfa_.classes]);
            row = row_memory_.back().get();
            std::fill(row, row + nfa_.classes, UNKNOWN);
            rows_++;
        }
        return row;
    }

    i32 step(i32 n, int c) {
        if (n == DEAD) return DEAD;
        i32* known = &row(n)[c];  // rows stay where they are
        if (*known != UNKNOWN) return *known;
        uint8_t byte = nfa_.first_byte[c];
        open();
        for (u32 i = nodes_[n].at, end = i + nodes_[n].length; i < end; i++) {
            const Entry e = entries_[i];
            for (u32 k = nfa_.edge_at[e.state]; k < nfa_.edge_at[e.state + 1]; k++) {
                const Edge& edge = nfa_.edges[k];
                if (edge.low > byte) break;
                if (edge.high >= byte) reach(edge.to, e.count, e.below);
            }
        }
        return *known = seen_.empty() ? DEAD : close();
    }

    // The classes of bytes that may come next, ascending.
    std::vector<int> live_classes(i32 n) const {
        uint8_t live[256] = {};
        for (u32 i = nodes_[n].at, end = i + nodes_[n].length; i < end; i++) {
            const Entry& e = entries_[i];
            for (u32 k = nfa_.edge_at[e.state]; k < nfa_.edge_at[e.state + 1]; k++) {
                const Edge& edge = nfa_.edges[k];
                if (nfa_.way(edge.to, e.count, true) >= NEVER) continue;
                for (int c = nfa_.byte_class[edge.low]; c <= nfa_.byte_class[edge.high]; c++) live[c] = 1;
            }
        }
        std::vector<int> out;
        for (int c = 0; c < nfa_.classes; c++)
            if (live[c]) out.push_back(c);
        return out;
    }

    Nfa nfa_;
    std::shared_ptr<const Vocabulary> v_;
    Limits limits_;
    size_t fixed_ = 0, rows_ = 0, masks_ = 0;
    std::vector<Node> nodes_;
    std::vector<Entry> entries_, seen_, kept_, one_;
    std::vector<i32> fresh_;
    std::vector<u32> queue_;
    std::unordered_map<u64, u32> index_;
    std::vector<i32> table_;
    std::deque<std::unique_ptr<i32[]>> row_memory_;
    struct Union {
        i32 a = -1, b = -1, made = -1;
    };
    Union unions_[1024];
    i32 start_ = 0;
};

}  // namespace radixrt
