// What a configuration allows: masks over the vocabulary, forced bytes, shortest completions and the plans made of them.
#pragma once

#include "configurations.hpp"

namespace radixrt {

class Automaton : public Configurations {
  public:
    using Configurations::Configurations;

    bool mask_known(i32 n) const { return nodes_[n].alike != UNKNOWN && nodes_[nodes_[n].alike].mask; }

    const Mask& mask(i32 n) {
        i32 same = alike(n, 0);
        auto& slot = nodes_[same].mask;
        if (!slot) {
            auto made = std::make_unique<Mask>();
            made->bits.reset(new u32[v_->words]());
            fill(same, *made);
            masks_++;
            nodes_[same].mask = std::move(made);
            return *nodes_[same].mask;
        }
        return *slot;
    }

    // Tokens after which at most `left` more end the output. Returns false if that is every token of mask(n). One walk at most
    // beside that of mask(n), and none of that one where time is so short that some tokens are most likely too many.
    bool mask_within(i32 n, u64 left, u32* bits) {
        bool close = !mask_known(n) && left < cost(n) + 4 && left < u64(plan_length(n)) + 4;
        if (!close && mask(n).worst <= left) return false;
        i32 worst = nodes_[n].worst_plan;
        if (worst != UNKNOWN && u64(worst) <= left) return false;
        std::memset(bits, 0, v_->words * 4);
        u64 found = 0;
        each_token(n, [&](i32 to) {
            u64 length = u64(plan_length(to));
            found = std::max(found, length);
            return length <= left;
        }, bits);
        nodes_[n].worst_plan = i32(std::min<u64>(found, 0x7FFFFFFF));
        return true;
    }

    // The next byte of the shortest completion (the first in order of bytes among the shortest), or -1 at its end.
    int best_byte(i32 n) {
        int16_t known = nodes_[n].best;
        if (known != -2) return known;
        int found = -1;
        u64 want = nodes_[n].cost;
        if (want > 0 && want < NEVER) {
            for (int c : live_classes(n)) {
                uint8_t byte = nfa_.first_byte[c];
                if (v_->single[byte] && cost(step(n, c)) == want - 1) {
                    found = byte;
                    break;
                }
            }
        }
        nodes_[n].best = int16_t(found);
        return found;
    }

    // The one byte that may come next, or -1: several, or the output may end here.
    int forced_byte(i32 n) {
        int16_t known = nodes_[n].forced;
        if (known != -2) return known;
        int found = -1;
        if (n != DEAD && !accepts(n)) {
            std::vector<int> live = live_classes(n);
            if (live.size() == 1) {
                int c = live[0], end = c + 1 < nfa_.classes ? nfa_.first_byte[c + 1] : 256;
                if (end - nfa_.first_byte[c] == 1) found = nfa_.first_byte[c];
            }
        }
        nodes_[n].forced = int16_t(found);
        return found;
    }

    // The first token of the plan: the longest token the shortest completion begins with, or -1 at its end. `to`: where it leads.
    i32 plan_token(i32 n, i32* to) {
        i32 token = -1, place = -1, at = n;
        *to = n;
        while (true) {
            int byte = best_byte(at);
            if (byte < 0) break;
            place = v_->all.child(place, uint8_t(byte));
            if (place < 0) break;
            at = next(at, uint8_t(byte));
            if (v_->all.token[place] >= 0) {
                token = v_->all.token[place];
                *to = at;
            }
        }
        return token;
    }

    // Tokens of the plan: the shortest completion in bytes, cut into longest tokens. What follows its first token is the plan of
    // where that leads: the rest of the first of the shortest completions is again the first of the shortest.
    i32 plan_length(i32 n) {
        if (cost(n) >= NEVER) return 0x7FFFFFFF;
        std::vector<i32> path;
        while (nodes_[n].plan == UNKNOWN) {
            i32 to;
            if (plan_token(n, &to) < 0) {
                nodes_[n].plan = 0;
            } else {
                path.push_back(n);
                n = to;
            }
        }
        i32 length = nodes_[n].plan;
        for (size_t i = path.size(); i-- > 0;) nodes_[path[i]].plan = ++length;
        return length;
    }

  private:
    // A node with the same mask: counts too far from their bounds for one token to feel are made equal. With M bytes in the
    // longest token at most M turns end in one token. Exits that are open stay open and caps out of reach stay so (count ->
    // low), exits out of reach stay so (count -> 0). The costs of the node given back are never lower.
    i32 alike(i32 n, int deep) {
        i32 known = nodes_[n].alike;
        if (known != UNKNOWN) return known;
        if (deep > 2000) return n;
        std::vector<Entry> entries(entries_.begin() + nodes_[n].at, entries_.begin() + nodes_[n].at + nodes_[n].length);
        bool changed = false;
        u64 window = u64(v_->all.deepest) + 2;
        for (auto& e : entries) {
            i32 number = loop_at(e.state);
            if (number >= 0) {
                const Loop& l = nfa_.loops[number];
                u32 count = e.count;
                if (count >= l.low && (l.high == ~0u || u64(l.high) > count + window)) e.count = l.low;
                else if (count + window < l.low) e.count = 0;
                changed |= count != e.count;
            }
            i32 below = alike(e.below, deep + 1);
            changed |= below != e.below;
            e.below = below;
        }
        i32 same = n;
        if (changed) {
            std::sort(entries.begin(), entries.end(), [](const Entry& x, const Entry& y) { return x.key() < y.key(); });
            std::vector<Entry> merged;
            for (auto& e : entries) {
                if (!merged.empty() && merged.back().key() == e.key()) merged.back().below = unite(merged.back().below, e.below);
                else merged.push_back(e);
            }
            same = make(merged);
            nodes_[same].alike = same;
        }
        nodes_[n].alike = same;
        return same;
    }

    // Whether every token that is text may come next; worst: at least the cost of what is left after any.
    bool free_text(i32 n, u64& worst) const {
        bool free = false;
        u64 best = NEVER;
        int most = v_->longest_text();
        for (u32 i = nodes_[n].at, end = i + nodes_[n].length; i < end; i++) {
            const Entry& e = entries_[i];
            if (nfa_.starts_text(i32(e.state))) {  // each character leaves at most as much to do
                i32 number = nfa_.loop_of[e.state];
                if (number >= 0 && nfa_.loops[number].high != ~0u && u64(nfa_.loops[number].high) < u64(e.count) + most) continue;
                best = std::min(best, plus(nfa_.way(i32(e.state), e.count, false), nodes_[e.below].cost));
                free = true;
            } else if (nfa_.free_text(i32(e.state))) {
                best = std::min(best, plus(nfa_.free_cost, nodes_[e.below].cost));
                free = true;
            }
        }
        if (best >= NEVER) return false;  // text may come, and nothing ends behind it
        worst = std::max(worst, best);
        return free;
    }
    bool known_free(i32 n, u64& worst) {
        int8_t& known = nodes_[n].free;
        if (known < 0) known = free_text(n, worst);
        return known && free_text(n, worst);
    }
    // Whether all text below a node of the trie of text may come. What follows inside a character is not itself text: a place
    // that takes any text need not take that, where a lone byte led to it.
    bool free_below(const Trie& text, i32 i, i32 to, u64& worst) {
        bool inside = i + 1 < text.end[i] && (text.byte[i + 1] & 0xC0) == 0x80;
        return !inside && known_free(to, worst);
    }

    // How long text may be that comes next, where only JSON strings take text and one character does as well as another; -1:
    // not so. steps: where each length leads.
    int text_allowed(i32 n, std::vector<i32>* steps) {
        int most = v_->longest_text();
        for (int taken = 0;; taken++) {
            bool any = false;
            for (u32 i = nodes_[n].at, end = i + nodes_[n].length; i < end; i++) {
                i32 s = i32(entries_[i].state);
                if (!nfa_.takes_text(s)) continue;
                if (!nfa_.starts_text(s)) return -1;
                any = true;
            }
            if (!any || taken == most) return taken;
            i32 to = next(n, 'a');
            if (to == DEAD) return taken;
            if (steps) steps->push_back(to);
            if (to == n) {
                if (steps) steps->resize(size_t(most), to);
                return most;
            }
            n = to;
        }
    }

    struct Nothing {
        void operator()(i32) const {}
    };

    // visit(token, where it leads) for each token on the way; enter(trie node, where): whether to go below; dead(trie node).
    template <class Visit, class Enter, class Dead = Nothing>
    void walk_trie(const Trie& trie, i32 n, Visit&& visit, Enter&& enter, Dead&& dead = {}) {
        path_.resize(size_t(trie.deepest) + 2);
        rowpath_.resize(path_.size());
        path_[0] = n;
        rowpath_[0] = row(n);
        const uint8_t* classes = nfa_.byte_class;
        i32 i = 0, size = i32(trie.size());
        while (i < size) {
            u32 d = trie.depth[i];
            int c = classes[trie.byte[i]];
            i32 to = rowpath_[d][c];
            if (to == UNKNOWN) to = step(path_[d], c);
            if (to == DEAD) {
                dead(i);
                i = trie.end[i];
                continue;
            }
            if (trie.token[i] >= 0) visit(trie.token[i], to);
            if (trie.end[i] > i + 1) {
                if (!enter(i, to)) {
                    i = trie.end[i];
                    continue;
                }
                path_[d + 1] = to;
                rowpath_[d + 1] = row(to);
            }
            i++;
        }
    }

    void set(u32* bits, i32 token) const {
        for (; token >= 0; token = v_->twin[token]) bits[token >> 5] |= 1u << (token & 31);
    }

    // Whether the output can end behind each of these steps.
    bool ends_behind(const std::vector<i32>& steps, int count) const {
        for (int k = 0; k < count; k++)
            if (nodes_[steps[size_t(k)]].cost >= NEVER) return false;
        return true;
    }

    void fill(i32 n, Mask& out) {
        u32* bits = out.bits.get();
        auto take = [&](i32 token, i32 to) {
            u64 cost = nodes_[to].cost;
            if (cost >= NEVER) return;
            out.worst = std::max(out.worst, cost);
            set(bits, token);
        };
        auto always = [](i32, i32) { return true; };
        if (nfa_.partial) return walk_trie(v_->all, n, take, always);  // whether a token leaves a way on is a question for each
        int allowed = -1;
        std::vector<i32> steps;
        if (free_text(n, out.worst)) {
            allowed = v_->longest_text();
        } else if ((allowed = text_allowed(n, &steps)) > 0 && ends_behind(steps, allowed)) {
            for (u32 i = nodes_[n].at, end = i + nodes_[n].length; i < end; i++)
                if (nfa_.starts_text(i32(entries_[i].state)))
                    out.worst = std::max(out.worst, plus(nfa_.way(i32(entries_[i].state), entries_[i].count, false),
                                                         nodes_[entries_[i].below].cost));
        } else if (allowed > 0) {
            allowed = -1;
        }
        if (allowed >= 0) std::memcpy(bits, v_->text[allowed].data(), v_->words * 4);
        else fill_text(n, out, take);
        walk_trie(v_->other, n, take, always);
    }

    // Text tokens one by one, but for whole subtrees where any text goes. Most of them do: all are set and the others
    // cleared; else the other way round.
    template <class Take>
    void fill_text(i32 n, Mask& out, Take&& take) {
        const Trie& trie = v_->plain;
        u32* bits = out.bits.get();
        i32 free = 0, dead = 0;
        for (int b = 0; b < 256; b++) {
            i32 i = trie.root[b];
            if (i < 0) continue;
            i32 to = next(n, uint8_t(b));
            i32 tokens = trie.first[trie.end[i]] - trie.first[i];
            if (to == DEAD) dead += tokens;
            else if (free_below(trie, i, to, out.worst)) free += tokens;
        }
        if (free <= dead) {
            walk_trie(trie, n, take, [&](i32 i, i32 to) {
                if (!free_below(trie, i, to, out.worst)) return true;
                for (i32 k = trie.first[i + 1 < trie.end[i] ? i + 1 : trie.end[i]]; k < trie.first[trie.end[i]]; k++)
                    bits[trie.order[k] >> 5] |= 1u << (trie.order[k] & 31);
                return false;
            });
            return;
        }
        std::memcpy(bits, v_->text[v_->longest_text()].data(), v_->words * 4);
        auto judge = [&](i32 token, i32 to) {
            if (nodes_[to].cost < NEVER) out.worst = std::max(out.worst, nodes_[to].cost);
            else for (; token >= 0; token = v_->twin[token]) bits[token >> 5] &= ~(1u << (token & 31));
        };
        walk_trie(trie, n, judge, [&](i32 i, i32 to) { return !free_below(trie, i, to, out.worst); }, [&](i32 i) {
            for (i32 k = trie.first[i]; k < trie.first[trie.end[i]]; k++) bits[trie.order[k] >> 5] &= ~(1u << (trie.order[k] & 31));
        });
    }

    // Visits where the allowed tokens lead; those for which visit says so are set in bits.
    template <class Visit>
    void each_token(i32 n, Visit&& visit, u32* bits) {
        std::vector<i32> steps;
        int allowed = nfa_.partial ? -1 : text_allowed(n, &steps);
        if (allowed >= 0) {
            for (int k = 1; k <= allowed; k++) {
                i32 to = steps[k - 1];
                if (k > 1 && to == steps[k - 2] && !bits) continue;
                if (cost(to) < NEVER && visit(to) && bits)
                    for (size_t w = 0; w < v_->words; w++) bits[w] |= v_->text[k][w] & ~v_->text[k - 1][w];
            }
        }
        tokens_.clear();  // visit makes new nodes and walks itself: first the walk, then the visits
        walk_trie(allowed >= 0 ? v_->other : v_->all, n, [&](i32 token, i32 to) {
            if (nodes_[to].cost < NEVER) tokens_.push_back({token, to});
        }, [](i32, i32) { return true; });
        for (auto [token, to] : tokens_)
            if (visit(to) && bits) set(bits, token);
    }

    std::vector<i32> path_;
    std::vector<i32*> rowpath_;
    std::vector<std::pair<i32, i32>> tokens_;
};

}  // namespace radixrt
