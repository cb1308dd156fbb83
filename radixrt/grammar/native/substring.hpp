// The substrings of a text as the words of an Op::DFA, the same ones as substring.py's reference makes.
// Source: the suffix automaton of Blumer et al. 1985, over characters; a mark before each character that may be the first one
// makes it the automaton of those suffixes only (see substring.py).
#pragma once

#include "objects.hpp"

namespace radixrt {
namespace {

class Substrings {
  public:
    static constexpr u32 MARK = 0x110000;  // no character

    // marks: one byte a character, not 0 where a unit begins; none: each character is one. most: units of an output, or -1.
    Substrings(const u32* text, size_t length, const char* marks, std::vector<u32> spaces, i32 most, bool empty, size_t max_states)
        : marked_(marks != nullptr), most_(most), spaces_(std::move(spaces)), max_states_(max_states) {
        states_.reserve(2 * length + 16);
        states_.push_back({-1, 0, MARK, 0, false, {}});
        i32 last = 0;
        for (size_t i = 0; i < length; i++) {
            if (marked_ && marks[i]) last = extend(last, MARK);
            last = extend(last, text[i]);
        }
        for (i32 s = last; s > 0; s = states_[size_t(s)].link) states_[size_t(s)].ends = true;
        if (most_ >= 0) measure();
        write(empty);
    }

    std::vector<i32> words;
    size_t count() const { return items_.size(); }

  private:
    struct Edge {
        u32 symbol;
        i32 to;
    };
    struct State {
        i32 link, length;
        u32 symbol;  // what leads here
        i32 height;  // most units that may still begin
        bool ends;   // so does the text, here
        std::vector<Edge> out;  // ascending
    };
    // A state of the result: of the suffix automaton with the units left, or within a character, before these bytes.
    struct Tail {
        u32 bytes;  // the first one lowest
        i32 length, to;
    };
    struct Item {
        i32 state, left;
        std::vector<Tail> tails;
    };

    std::vector<Edge>::iterator place(i32 s, u32 symbol) {
        auto& out = states_[size_t(s)].out;
        return std::lower_bound(out.begin(), out.end(), symbol, [](const Edge& e, u32 c) { return e.symbol < c; });
    }
    i32 find(i32 s, u32 symbol) {
        auto it = place(s, symbol);
        return it != states_[size_t(s)].out.end() && it->symbol == symbol ? it->to : -1;
    }

    i32 extend(i32 last, u32 symbol) {
        i32 now = i32(states_.size());
        states_.push_back({0, states_[size_t(last)].length + 1, symbol, 0, false, {}});
        i32 p = last;
        while (p >= 0 && find(p, symbol) < 0) {
            states_[size_t(p)].out.insert(place(p, symbol), {symbol, now});
            p = states_[size_t(p)].link;
        }
        if (p < 0) return now;
        i32 q = find(p, symbol);
        if (states_[size_t(q)].length != states_[size_t(p)].length + 1) {
            i32 copy = i32(states_.size());
            State same = states_[size_t(q)];
            same.length = states_[size_t(p)].length + 1;
            states_.push_back(std::move(same));
            states_[size_t(q)].link = copy;
            for (; p >= 0 && find(p, symbol) == q; p = states_[size_t(p)].link) place(p, symbol)->to = copy;
            q = copy;
        }
        states_[size_t(now)].link = q;
        return now;
    }

    bool space(u32 symbol) const { return std::binary_search(spaces_.begin(), spaces_.end(), symbol); }

    void measure() {
        std::vector<i32> order(states_.size());
        for (size_t s = 0; s < order.size(); s++) order[s] = i32(s);
        std::sort(order.begin(), order.end(),
                  [&](i32 x, i32 y) { return states_[size_t(x)].length > states_[size_t(y)].length; });
        for (i32 s : order)
            for (const Edge& e : states_[size_t(s)].out) {
                i32 unit = !marked_ || e.symbol == MARK;
                states_[size_t(s)].height = std::max(states_[size_t(s)].height, states_[size_t(e.to)].height + unit);
            }
    }

    i32 add(Item item) {
        if (items_.size() >= max_states_) throw TooLarge("");
        items_.push_back(std::move(item));
        return i32(items_.size()) - 1;
    }
    i32 number(i32 state, i32 left) {
        if (left >= 0) left = std::min(left, states_[size_t(state)].height);
        auto [it, is_new] = numbers_.try_emplace(u64(u32(state)) << 32 | u32(left), 0);
        if (is_new) it->second = add({state, left, {}});
        return it->second;
    }

    void write(bool empty) {
        i32 first = marked_ ? find(0, MARK) : 0;
        if (first < 0) {  // no unit at all
            add({-1, 0, {}});
            return spell(empty, {});
        }
        numbers_.reserve(states_.size());
        number(first, most_ < 0 ? -1 : most_ - marked_);
        std::vector<std::pair<u32, i32>> edges;
        std::vector<Tail> tails;
        for (size_t n = 0; n < items_.size(); n++) {
            Item item = std::move(items_[n]);
            if (item.state < 0) {
                spell(false, item.tails);
                continue;
            }
            edges.clear();
            bool last = leave(item, edges);
            tails.clear();
            for (auto [symbol, to] : edges) tails.push_back(utf8(symbol, to));
            spell(n == 0 ? empty : last, tails);
        }
    }

    // The characters that may follow, ascending; returns whether the output may end here.
    bool leave(const Item& item, std::vector<std::pair<u32, i32>>& edges) {
        const State& s = states_[size_t(item.state)];
        i32 less = item.left < 0 ? -1 : item.left - 1;
        bool full = item.left == 0, border = s.ends;
        i32 over = -1;
        if (!full || marked_)
            for (const Edge& e : s.out) {
                bool gap = marked_ && space(e.symbol);
                border = border || gap;
                if (e.symbol == MARK)
                    over = e.to;
                else if (!(gap && full))
                    edges.push_back({e.symbol, number(e.to, marked_ ? item.left : less)});
            }
        if (over >= 0 && !full) {
            for (const Edge& e : states_[size_t(over)].out) edges.push_back({e.symbol, number(e.to, less)});
            std::sort(edges.begin(), edges.end());
        }
        return !marked_ || ((border || over >= 0) && !space(s.symbol));
    }

    static Tail utf8(u32 c, i32 to) {
        if (c < 0x80) return {c, 1, to};
        if (c < 0x800) return {(0xC0 | c >> 6) | (0x80 | (c & 63)) << 8, 2, to};
        if (c < 0x10000) return {(0xE0 | c >> 12) | (0x80 | (c >> 6 & 63)) << 8 | (0x80 | (c & 63)) << 16, 3, to};
        return {(0xF0 | c >> 18) | (0x80 | (c >> 12 & 63)) << 8 | (0x80 | (c >> 6 & 63)) << 16 | (0x80 | (c & 63)) << 24, 4, to};
    }

    // A state's words; characters that begin with the same byte go on in a state of their own.
    void spell(bool last, const std::vector<Tail>& tails) {
        size_t at = words.size();
        words.push_back(last);
        words.push_back(0);
        for (size_t i = 0; i < tails.size();) {
            i32 byte = i32(tails[i].bytes & 255), to = tails[i].to;
            if (tails[i].length > 1) {
                Item within{-1, 0, {}};
                for (; i < tails.size() && i32(tails[i].bytes & 255) == byte; i++)
                    within.tails.push_back({tails[i].bytes >> 8, tails[i].length - 1, tails[i].to});
                to = add(std::move(within));
            } else {
                i++;
            }
            words.insert(words.end(), {byte, byte, to});
            words[at + 1]++;
        }
    }

    bool marked_;
    i32 most_;
    std::vector<u32> spaces_;
    size_t max_states_;
    std::vector<State> states_;
    std::vector<Item> items_;
    std::unordered_map<u64, i32> numbers_;
};

// substrings(text: UTF-32, marks: bytes | None, spaces: UTF-32, most, empty, max_states): (number of states, words)
PyObject* substrings(PyObject*, PyObject* args) {
    Py_buffer text, marks, spaces;
    int most, empty;
    Py_ssize_t max_states;
    if (!PyArg_ParseTuple(args, "y*z*y*ipn", &text, &marks, &spaces, &most, &empty, &max_states)) return nullptr;
    std::unique_ptr<Substrings> made;
    bool good = marks.buf == nullptr || marks.len == text.len / 4;
    if (!good) PyErr_SetString(PyExc_ValueError, "marks: must be one byte a character");
    good = good && guarded(true, [&] {
        auto* gaps = static_cast<const u32*>(spaces.buf);
        std::vector<u32> sorted(gaps, gaps + spaces.len / 4);
        std::sort(sorted.begin(), sorted.end());
        made = std::make_unique<Substrings>(static_cast<const u32*>(text.buf), size_t(text.len / 4), static_cast<const char*>(marks.buf),
                                            std::move(sorted), most, empty != 0, size_t(max_states));
    });
    for (Py_buffer* b : {&text, &marks, &spaces})
        if (b->obj) PyBuffer_Release(b);
    if (!good) return nullptr;
    return Py_BuildValue("(ny#)", Py_ssize_t(made->count()), reinterpret_cast<const char*>(made->words.data()),
                         Py_ssize_t(made->words.size() * 4));
}

}  // namespace
}  // namespace radixrt
