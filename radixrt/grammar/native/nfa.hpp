// A grammar's tables become one byte NFA: states, edges, empty moves, calls, counted loops, and each state's shortest way out.
// Source of the construction: Thompson 1968, with calls and counters as states; costs: Knuth 1977's generalization of Dijkstra.
#pragma once

#include <algorithm>
#include <cstdint>
#include <queue>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace radixrt {

using i32 = int32_t;
using u32 = uint32_t;
using u64 = uint64_t;

constexpr u64 NEVER = u64(1) << 40;  // no way out, or none of a length anyone could write

struct TooLarge : std::runtime_error {
    using std::runtime_error::runtime_error;
};

inline u64 plus(u64 a, u64 b) { return a >= NEVER || b >= NEVER || a + b >= NEVER ? NEVER : a + b; }
inline u64 times(u64 n, u64 cost) {
    if (n == 0) return 0;
    return cost >= NEVER || (cost && n > NEVER / cost) ? NEVER : n * cost;
}

// What Python's Program holds.
struct Tables {
    std::vector<i32> code, at, roots;
    std::string blob, nullable;
    i32 start;
};

enum class Op : i32 { LITERAL, SET, SEQ, ALT, REPEAT, REF, DFA, JSON };

// PLAIN: edges and empty moves. CALL: runs the fragment at a, comes back at b. END: of a fragment. LOOP: a counted repeat whose
// body has no calls, the count rides on the states of the body. FRAMES: one whose body is a fragment, the count rides on the frame.
// STEP: the end of a LOOP's body. ACCEPT: the whole output may end.
enum class Kind : uint8_t { PLAIN, CALL, END, LOOP, FRAMES, STEP, ACCEPT };

struct Edge {
    uint8_t low, high;
    i32 to;
};

struct Loop {
    u32 low, high;  // high: ~0 without end
    i32 body, exit, state;
    u32 cap() const { return high == ~0u ? low : high; }
    u32 next(u32 count) const { return std::min(count + 1, cap()); }
    u32 left(u32 count) const { return count < low ? low - count : 0; }
};

// What a state has to do with text, the plain characters of JSON strings. TAKES: an edge that some byte of one can take. STARTS:
// stands before a character of a JsonChars. FREE: takes any text whatever, for ever.
enum Text : uint8_t { TAKES = 1, STARTS = 2, FREE = 4 };

struct Nfa {
    std::vector<Kind> kind;
    std::vector<i32> a, b;          // CALL: fragment, return; LOOP, FRAMES, STEP: number of the loop
    std::vector<i32> loop_of;       // the LOOP a state's count belongs to, or -1
    std::vector<u32> edge_at, empty_at;
    std::vector<Edge> edges;
    std::vector<i32> empties;
    std::vector<Loop> loops;
    std::vector<u64> cost, reach;   // bytes to the END (STEP inside a LOOP): spelled with the vocabulary, and with any bytes
    std::vector<uint8_t> text;      // see Text
    uint8_t byte_class[256];
    uint8_t first_byte[257];
    i32 classes = 0;
    i32 start = 0, accept = 0;
    u64 free_cost = 0;              // the longest shortest way out of any FREE state
    bool partial = false;           // whether the vocabulary can spell a way on must be asked of each place

    size_t size() const { return kind.size(); }
    const std::vector<u64>& costs(bool any) const { return any && partial ? reach : cost; }

    // The shortest way from (state, count) to the end of its fragment.
    u64 way(i32 s, u32 count, bool any) const {
        const auto& d = costs(any);
        if (kind[s] == Kind::LOOP || kind[s] == Kind::FRAMES) {
            const Loop& l = loops[a[s]];
            return plus(times(l.left(count), d[l.body]), d[l.exit]);
        }
        i32 owner = loop_of[s];
        if (owner < 0) return d[s];
        const Loop& l = loops[owner];
        return plus(d[s], plus(times(l.left(count + 1), d[l.body]), d[l.exit]));
    }

    bool takes_text(i32 s) const { return text[s] & TAKES; }
    bool starts_text(i32 s) const { return text[s] & STARTS; }
    bool free_text(i32 s) const { return text[s] & FREE; }
};

class Builder {
  public:
    Builder(const Tables& tables, const bool* spelled, size_t max_states)
        : t_(tables), spelled_(spelled), max_states_(max_states) {}

    Nfa build() {
        measure();
        n_.accept = fresh(Kind::ACCEPT);
        n_.start = fragment(t_.roots[t_.start], false);
        while (!todo_.empty()) {
            Fragment f = todo_.back();
            todo_.pop_back();
            loop_ = -1;
            emit(f.node, f.start, fresh(Kind::END), f.nonempty, true);
        }
        link();
        classes();
        mark_text();
        n_.cost = costs(true);
        for (u64 cost : n_.cost)  // so long that sums may pass NEVER: again a question for each token
            if (cost > u64(1) << 30 && cost < NEVER) n_.partial = true;
        if (n_.partial) n_.reach = costs(false);
        for (size_t s = 0; s < n_.size(); s++)
            if (n_.free_text(i32(s))) n_.free_cost = std::max(n_.free_cost, n_.cost[s]);
        return std::move(n_);
    }

  private:
    struct Raw {
        i32 from;
        Edge edge;
    };
    struct Fragment {
        i32 node, start;
        bool nonempty;
    };

    const i32* at(i32 node) const { return &t_.code[t_.at[node]]; }
    Op op(i32 node) const { return Op(at(node)[0]); }
    bool nullable(i32 node) const { return t_.nullable[node] != 0; }
    bool apart(i32 node) const { return uses_[node] > 1 && size_[node] > 16; }

    // How often each node is used, how many states it takes, and whether a count may ride on its states.
    void measure() {
        size_t count = t_.at.size();
        uses_.assign(count, 0);
        size_.assign(count, 0);
        flat_.assign(count, 0);
        for (i32 root : t_.roots) uses_[root]++;
        for (size_t i = 0; i < count; i++) {
            const i32* w = at(i);
            if (Op(w[0]) == Op::SEQ || Op(w[0]) == Op::ALT || Op(w[0]) == Op::REPEAT)
                for (i32 k = 0; k < w[3]; k++) uses_[w[4 + k]]++;
        }
        for (size_t i = 0; i < count; i++) {
            const i32* w = at(i);
            u64 size = 2;
            bool flat = true;
            switch (Op(w[0])) {
                case Op::LITERAL: size = w[2]; break;
                case Op::SET: size = 1; break;
                case Op::DFA: size = w[1]; break;
                case Op::REF: flat = false; break;
                case Op::JSON: size = 24; flat = false; break;
                default:
                    for (i32 k = 0; k < w[3]; k++) {
                        i32 kid = w[4 + k];
                        size += apart(kid) ? 1 : size_[kid];
                        flat = flat && flat_[kid] && !apart(kid);
                    }
                    if (Op(w[0]) == Op::REPEAT) flat = flat && (w[2] == 1 || (w[2] < 0 && w[1] <= 1));
            }
            size_[i] = std::min<u64>(size, u64(1) << 31);
            flat_[i] = flat;
        }
    }

    i32 fresh(Kind kind, i32 a = 0, i32 b = 0) {
        if (n_.kind.size() >= max_states_) throw TooLarge("is too large: more than " + std::to_string(max_states_) + " states");
        n_.kind.push_back(kind);
        n_.a.push_back(a);
        n_.b.push_back(b);
        n_.loop_of.push_back(kind == Kind::PLAIN ? loop_ : -1);
        return i32(n_.kind.size()) - 1;
    }
    i32 fresh() { return fresh(Kind::PLAIN); }
    void edge(i32 from, int low, int high, i32 to) {
        if (raw_.size() > 16 * max_states_) throw TooLarge("is too large: more than " + std::to_string(16 * max_states_) + " edges");
        raw_.push_back({from, {uint8_t(low), uint8_t(high), to}});
    }
    void empty(i32 from, i32 to) { raw_empty_.push_back({from, to}); }

    i32 fragment(i32 node, bool nonempty) {
        auto [it, is_new] = fragments_.try_emplace(u64(node) << 1 | nonempty, 0);
        if (is_new) {
            i32 keep = loop_;
            loop_ = -1;
            it->second = fresh();
            loop_ = keep;
            todo_.push_back({node, it->second, nonempty});
        }
        return it->second;
    }
    void call(i32 fragment, i32 in, i32 out) { empty(in, fresh(Kind::CALL, fragment, out)); }

    // The state after a literal, shared with other literals from the same state (a trie). Sound because such a state has
    // no other way in: what two alternatives have in common up to there, they have in common.
    i32 follow(i32 from, const char* text, i32 length) {
        for (i32 i = 0; i < length; i++) {
            auto [it, is_new] = trie_.try_emplace(u64(from) << 8 | uint8_t(text[i]), 0);
            if (is_new) {
                it->second = fresh();
                edge(from, uint8_t(text[i]), uint8_t(text[i]), it->second);
            }
            from = it->second;
        }
        return from;
    }

    // Adds the ways from `in` to `out`. Never an edge into `in` nor one out of `out`, so that alternatives can share both.
    // nonempty: without the empty string.
    void emit(i32 node, i32 in, i32 out, bool nonempty, bool top = false) {
        nonempty = nonempty && nullable(node);
        if (!top && apart(node)) return call(fragment(node, nonempty), in, out);
        const i32* w = at(node);
        switch (Op(w[0])) {
            case Op::LITERAL: {
                const char* text = t_.blob.data() + w[1];
                i32 last = follow(in, text, w[2] - 1);
                return edge(last, uint8_t(text[w[2] - 1]), uint8_t(text[w[2] - 1]), out);
            }
            case Op::SET: return emit_set(w, in, out);
            case Op::SEQ: return nonempty ? emit_nonempty_seq(w, in, out) : emit_seq(w, in, out);
            case Op::ALT:
                for (i32 k = 0; k < w[3]; k++) emit(w[4 + k], in, out, nonempty);
                return;
            case Op::REPEAT: return emit_repeat(w, in, out, nonempty);
            case Op::REF: return call(fragment(t_.roots[w[1]], nonempty), in, out);
            case Op::DFA: return emit_dfa(w, in, out, nonempty);
            case Op::JSON: return emit_json(w, in, out, nonempty);
        }
    }

    void emit_set(const i32* w, i32 in, i32 out) {
        const uint8_t* bits = reinterpret_cast<const uint8_t*>(t_.blob.data()) + w[1];
        for (int b = 0; b < 256; b++) {
            if (!(bits[b >> 3] >> (b & 7) & 1)) continue;
            int high = b;
            while (high < 255 && bits[(high + 1) >> 3] >> ((high + 1) & 7) & 1) high++;
            edge(in, b, high, out);
            b = high;
        }
    }

    void emit_seq(const i32* w, i32 in, i32 out) {
        i32 n = w[3];
        if (n == 0) return empty(in, out);
        for (i32 k = 0; k < n; k++) {
            i32 kid = w[4 + k];
            const i32* kw = at(kid);
            if (k + 1 == n) return emit(kid, in, out, false);
            if (Op(kw[0]) == Op::LITERAL && !apart(kid)) {
                in = follow(in, t_.blob.data() + kw[1], kw[2]);
            } else {
                i32 next = fresh();
                emit(kid, in, next, false);
                in = next;
            }
        }
    }

    // All parts may be empty, the whole may not: `in` still owes a byte, `free` does not.
    void emit_nonempty_seq(const i32* w, i32 in, i32 out) {
        i32 free = -1, n = w[3];
        for (i32 k = 0; k < n; k++) {
            i32 after = k + 1 == n ? out : fresh();
            emit(w[4 + k], in, after, true);
            if (free >= 0) emit(w[4 + k], free, after, false);
            if (k + 1 < n) {
                i32 owes = fresh();
                empty(in, owes);
                in = owes;
            }
            free = after;
        }
    }

    void emit_repeat(const i32* w, i32 in, i32 out, bool nonempty) {
        i32 low = w[1], high = w[2], kid = w[4];
        bool hollow = nullable(kid);  // then an empty turn says nothing: turns are nonempty and none is owed
        if (hollow) low = 0;
        if (high < 0 && low <= 1) {
            i32 body = fresh(), again = fresh();
            emit(kid, body, again, hollow);
            empty(again, body);
            empty(again, out);
            return empty(in, low == 1 || nonempty ? body : again);
        }
        if (high == 1) {
            if (low == 0 && !nonempty) empty(in, out);
            return emit(kid, in, out, hollow);
        }
        if (nonempty && low == 0) low = 1;
        i32 number = i32(n_.loops.size());
        n_.loops.push_back({u32(low), high < 0 ? ~0u : u32(high), -1, out, -1});
        if (flat_[kid] && !apart(kid) && loop_ < 0) {
            empty(in, n_.loops[number].state = fresh(Kind::LOOP, number));
            i32 step = fresh(Kind::STEP, number);
            loop_ = number;
            i32 body = n_.loops[number].body = fresh();
            emit(kid, body, step, hollow);
            loop_ = -1;
        } else {
            empty(in, n_.loops[number].state = fresh(Kind::FRAMES, number));
            n_.loops[number].body = fragment(kid, hollow);
        }
    }

    void emit_dfa(const i32* w, i32 in, i32 out, bool nonempty) {
        std::vector<i32> state(w[1], -1);
        std::vector<i32> begin(w[1]);
        const i32* p = w + 4;
        for (i32 s = 0; s < w[1]; s++) {
            begin[s] = i32(p - w);
            p += 2 + 3 * p[1];
        }
        std::vector<i32> todo{0};
        auto spell = [&](i32 s, i32 from, bool may_end) {
            const i32* q = w + begin[s];
            if (q[0] && may_end) empty(from, out);
            for (i32 e = 0; e < q[1]; e++) {
                i32 to = q[4 + 3 * e];
                if (state[to] < 0) {
                    state[to] = fresh();
                    todo.push_back(to);
                }
                edge(from, q[2 + 3 * e], q[3 + 3 * e], state[to]);
            }
        };
        todo.clear();
        spell(0, in, !nonempty);
        while (!todo.empty()) {
            i32 s = todo.back();
            todo.pop_back();
            spell(s, state[s], true);
        }
    }

    void emit_json(const i32* w, i32 in, i32 out, bool nonempty) {
        u32 low = std::max(w[1], nonempty ? 1 : 0), high = w[2] < 0 ? ~0u : u32(w[2]);
        if (high == 0) return empty(in, out);
        i32 body, next;
        if (low == 0 && high == ~0u) {
            body = next = fresh();
            empty(in, body);
            empty(body, out);
        } else {
            i32 number = i32(n_.loops.size());
            n_.loops.push_back({low, high, -1, out, -1});
            empty(in, n_.loops[number].state = fresh(Kind::LOOP, number));
            next = fresh(Kind::STEP, number);
            loop_ = number;
            body = n_.loops[number].body = fresh();
        }
        json_starts_.push_back(body);
        i32 one = fresh(), two = fresh(), three = fresh(), e0 = fresh(), ed = fresh(), f0 = fresh(), f4 = fresh();
        edge(body, 0x20, 0x21, next);
        edge(body, 0x23, 0x5B, next);
        edge(body, 0x5D, 0x7F, next);
        edge(body, 0xC2, 0xDF, one);
        edge(body, 0xE0, 0xE0, e0);
        edge(body, 0xE1, 0xEC, two);
        edge(body, 0xED, 0xED, ed);
        edge(body, 0xEE, 0xEF, two);
        edge(body, 0xF0, 0xF0, f0);
        edge(body, 0xF1, 0xF3, three);
        edge(body, 0xF4, 0xF4, f4);
        edge(e0, 0xA0, 0xBF, one);
        edge(ed, 0x80, 0x9F, one);
        edge(f0, 0x90, 0xBF, two);
        edge(f4, 0x80, 0x8F, two);
        edge(three, 0x80, 0xBF, two);
        edge(two, 0x80, 0xBF, one);
        edge(one, 0x80, 0xBF, next);
        i32 escape = fresh(), u = fresh(), hex3 = fresh(), hex2 = fresh(), hex1 = fresh(), d = fresh();
        i32 high2 = fresh(), high1 = fresh(), slash = fresh(), u2 = fresh(), d2 = fresh(), low3 = fresh();
        edge(body, '\\', '\\', escape);
        for (char c : std::string("\"\\/bfnrt")) edge(escape, c, c, next);
        edge(escape, 'u', 'u', u);
        hex(u, "09acefACEF", hex3);
        hex(u, "ddDD", d);
        hex(hex3, "09afAF", hex2);
        hex(d, "07", hex2);
        hex(hex2, "09afAF", hex1);
        hex(hex1, "09afAF", next);
        hex(d, "89abAB", high2);
        hex(high2, "09afAF", high1);
        hex(high1, "09afAF", slash);
        edge(slash, '\\', '\\', u2);
        i32 dd = fresh();
        edge(u2, 'u', 'u', dd);
        hex(dd, "ddDD", d2);
        hex(d2, "cfCF", low3);
        hex(low3, "09afAF", hex1);
        if (n_.loop_of[body] >= 0) loop_ = -1;
    }
    void hex(i32 from, const char* ranges, i32 to) {
        for (; *ranges; ranges += 2) edge(from, ranges[0], ranges[1], to);
    }

    // Edges and empty moves by state, edges ascending.
    void link() {
        size_t count = n_.size();
        n_.edge_at.assign(count + 1, 0);
        n_.empty_at.assign(count + 1, 0);
        for (auto& r : raw_) n_.edge_at[r.from + 1]++;
        for (auto& r : raw_empty_) n_.empty_at[r.first + 1]++;
        for (size_t s = 0; s < count; s++) {
            n_.edge_at[s + 1] += n_.edge_at[s];
            n_.empty_at[s + 1] += n_.empty_at[s];
        }
        n_.edges.resize(raw_.size());
        n_.empties.resize(raw_empty_.size());
        std::vector<u32> e(n_.edge_at.begin(), n_.edge_at.end() - 1), m(n_.empty_at.begin(), n_.empty_at.end() - 1);
        for (auto& r : raw_) n_.edges[e[r.from]++] = r.edge;
        for (auto& r : raw_empty_) n_.empties[m[r.first]++] = r.second;
        for (size_t s = 0; s < count; s++)
            std::sort(n_.edges.begin() + n_.edge_at[s], n_.edges.begin() + n_.edge_at[s + 1],
                      [](const Edge& x, const Edge& y) { return x.low != y.low ? x.low < y.low : x.high < y.high; });
    }

    // Bytes that no edge tells apart: runs of neighbours, so that the order of classes is the order of bytes. A byte
    // without a token of its own stands alone.
    void classes() {
        bool begins[257] = {};
        begins[0] = true;
        for (auto& e : n_.edges) begins[e.low] = begins[e.high + 1] = true;
        for (int b = 0; b < 256; b++)
            if (!spelled_[b]) begins[b] = begins[b + 1] = true;
        n_.classes = 0;
        for (int b = 0; b < 256; b++) {
            if (begins[b]) n_.first_byte[n_.classes++] = uint8_t(b);
            n_.byte_class[b] = uint8_t(n_.classes - 1);
        }
        for (auto& e : n_.edges)
            if (!spellable(e)) n_.partial = true;
    }
    bool spellable(const Edge& e) const {
        for (int b = e.low; b <= e.high; b++)
            if (spelled_[b]) return true;
        return false;
    }

    void mark_text() {
        n_.text.assign(n_.size(), 0);
        for (size_t s = 0; s < n_.size(); s++)
            for (u32 i = n_.edge_at[s]; i < n_.edge_at[s + 1]; i++) {
                const Edge& e = n_.edges[i];
                if (e.high >= 0x20 && !(e.low == e.high && (e.low == '"' || e.low == '\\'))) n_.text[s] |= TAKES;
            }
        for (i32 s : json_starts_) n_.text[s] |= STARTS;
        mark_free();
    }

    // Greatest fixpoint. bit k of a state: it takes any text from within a character at k: 0 between characters, 1..3: so many
    // bytes to come, then the first bytes with a rule of their own (E0, ED, F0, F4).
    void mark_free() {
        struct Need {
            int at, low, high, then;
        };
        static constexpr Need needs[] = {
            {0, 0x20, 0x21, 0}, {0, 0x23, 0x5B, 0}, {0, 0x5D, 0x7F, 0}, {0, 0xC2, 0xDF, 1}, {0, 0xE0, 0xE0, 4}, {0, 0xE1, 0xEC, 2},
            {0, 0xED, 0xED, 5}, {0, 0xEE, 0xEF, 2}, {0, 0xF0, 0xF0, 6}, {0, 0xF1, 0xF3, 3}, {0, 0xF4, 0xF4, 7}, {1, 0x80, 0xBF, 0},
            {2, 0x80, 0xBF, 1}, {3, 0x80, 0xBF, 2}, {4, 0xA0, 0xBF, 1}, {5, 0x80, 0x9F, 1}, {6, 0x90, 0xBF, 2}, {7, 0x80, 0x8F, 2}};
        std::vector<uint8_t> can(n_.size(), 0);
        std::vector<i32> states;
        auto meets = [&](i32 s, const Need& need, bool first) {
            int covered = need.low;
            for (u32 i = n_.edge_at[s]; i < n_.edge_at[s + 1] && covered <= need.high; i++) {
                const Edge& e = n_.edges[i];
                if (e.low > covered) return false;
                if (e.high < covered) continue;
                bool good = first || can[e.to] >> need.then & 1;
                if (!first && n_.kind[e.to] == Kind::PLAIN)
                    for (u32 m = n_.empty_at[e.to]; m < n_.empty_at[e.to + 1] && !good; m++)
                        good = can[n_.empties[m]] >> need.then & 1;
                if (good) covered = e.high + 1;
            }
            return covered > need.high;
        };
        for (size_t s = 0; s < n_.size(); s++) {
            if (!(n_.text[s] & TAKES) || n_.loop_of[s] >= 0 || n_.edges[n_.edge_at[s + 1] - 1].high < 0x8F) continue;
            uint8_t bits = 0xFF;
            for (auto& need : needs)
                if (bits >> need.at & 1 && !meets(i32(s), need, true)) bits &= uint8_t(~(1 << need.at));
            can[s] = bits;
            if (bits) states.push_back(i32(s));
        }
        for (bool changed = true; changed;) {
            changed = false;
            for (i32 s : states)
                for (auto& need : needs)
                    if (can[s] >> need.at & 1 && !meets(s, need, false)) {
                        can[s] &= uint8_t(~(1 << need.at));
                        changed = true;
                    }
        }
        for (i32 s : states)
            if (can[s] & 1) n_.text[s] |= FREE;
    }

    std::vector<u64> costs(bool only_spelled) const {
        size_t count = n_.size();
        std::vector<u64> best(count, NEVER);
        std::vector<uint8_t> done(count, 0);
        // Who depends on a state: back edges in one list; weight 1 for a byte, 0 for an empty move, -1: work it out again.
        struct Back {
            i32 from;
            i32 weight;
        };
        std::vector<u32> back_at(count + 1, 0);
        auto each = [&](auto&& visit) {
            for (size_t s = 0; s < count; s++) {
                i32 from = i32(s);
                for (u32 i = n_.edge_at[s]; i < n_.edge_at[s + 1]; i++)
                    if (!only_spelled || spellable(n_.edges[i])) visit(n_.edges[i].to, from, 1);
                for (u32 i = n_.empty_at[s]; i < n_.empty_at[s + 1]; i++) visit(n_.empties[i], from, 0);
                if (n_.kind[s] == Kind::CALL) {
                    visit(n_.a[s], from, -1);
                    visit(n_.b[s], from, -1);
                } else if (n_.kind[s] == Kind::LOOP || n_.kind[s] == Kind::FRAMES) {
                    visit(n_.loops[n_.a[s]].body, from, -1);
                    visit(n_.loops[n_.a[s]].exit, from, -1);
                }
            }
        };
        each([&](i32 to, i32, i32) { back_at[to + 1]++; });
        for (size_t s = 0; s < count; s++) back_at[s + 1] += back_at[s];
        std::vector<Back> back(back_at[count]);
        std::vector<u32> fill(back_at.begin(), back_at.end() - 1);
        each([&](i32 to, i32 from, i32 weight) { back[fill[to]++] = {from, weight}; });
        using Item = std::pair<u64, i32>;
        std::priority_queue<Item, std::vector<Item>, std::greater<Item>> heap;
        auto offer = [&](i32 s, u64 cost) {
            if (cost < best[s]) {
                best[s] = cost;
                heap.push({cost, s});
            }
        };
        for (size_t s = 0; s < count; s++)
            if (n_.kind[s] == Kind::END || n_.kind[s] == Kind::STEP || n_.kind[s] == Kind::ACCEPT) offer(i32(s), 0);
        while (!heap.empty()) {
            auto [cost, s] = heap.top();
            heap.pop();
            if (done[s]) continue;
            done[s] = 1;
            for (u32 i = back_at[s]; i < back_at[s + 1]; i++) {
                auto [from, weight] = back[i];
                if (weight >= 0) {
                    offer(from, plus(cost, u64(weight)));
                } else if (n_.kind[from] == Kind::CALL) {
                    if (done[n_.a[from]] && done[n_.b[from]]) offer(from, plus(best[n_.a[from]], best[n_.b[from]]));
                } else {
                    const Loop& l = n_.loops[n_.a[from]];
                    if (done[l.exit] && (l.low == 0 || done[l.body]))
                        offer(from, plus(times(l.low, best[l.body]), best[l.exit]));
                }
            }
        }
        return best;
    }

    const Tables& t_;
    const bool* spelled_;
    size_t max_states_;
    Nfa n_;
    std::vector<u32> uses_;
    std::vector<u64> size_;
    std::vector<uint8_t> flat_;
    std::vector<Raw> raw_;
    std::vector<std::pair<i32, i32>> raw_empty_;
    std::unordered_map<u64, i32> fragments_, trie_;
    std::vector<Fragment> todo_;
    std::vector<i32> json_starts_;
    i32 loop_ = -1;
};

}  // namespace radixrt
