// program.py's tables from the expressions themselves, node for node the same. Whatever is out of order is left to program.py,
// which says what is wrong with it: flatten() then gives back false.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstring>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "nfa.hpp"

namespace radixrt {

class Flattener {
  public:
    // types: Bytes, ByteSet, Seq, Alt, Repeat, Ref, Dfa, JsonChars, PackedDfa.
    Flattener(PyObject* rules, PyObject* types, i32 max_nodes, i32 max_depth, size_t max_bytes)
        : rules_(rules), max_nodes_(max_nodes), max_depth_(max_depth), max_bytes_(max_bytes) {
        for (int i = 0; i < 9; i++) types_[i] = PyTuple_GET_ITEM(types, i);
        const char* names[] = {"value", "bits", "items", "item", "low", "high", "name", "edges", "accepting", "states", "words"};
        for (int i = 0; i < 11; i++) names_[i] = PyUnicode_InternFromString(names[i]);
        numbers_ = PyDict_New();
    }
    ~Flattener() {
        for (PyObject* held : held_) Py_DECREF(held);
        for (PyObject* name : names_) Py_XDECREF(name);
        Py_XDECREF(numbers_);
    }

    bool run(PyObject* start) {
        if (!numbers_ || number(start) < 0) return false;
        for (size_t i = 0; i < pending_.size(); i++) {
            PyObject* expr = PyDict_GetItemWithError(rules_, pending_[i]);
            i32 root = expr ? expression(expr) : -1;
            if (root < 0) return false;
            t_.roots.push_back(root);
        }
        find_nullable();
        return !left_recursive();
    }

    Tables t_;
    std::vector<PyObject*> pending_;  // the rules' names, by number

  private:
    enum Name { VALUE, BITS, ITEMS, ITEM, LOW, HIGH, NAME, EDGES, ACCEPTING, STATES, WORDS };

    PyObject* get(PyObject* object, Name name) {  // alive until the end
        PyObject* value = PyObject_GetAttr(object, names_[name]);
        if (value) held_.push_back(value);
        return value;
    }

    i32 number(PyObject* name) {
        if (PyObject* known = PyDict_GetItemWithError(numbers_, name)) return i32(PyLong_AsLong(known));
        if (PyErr_Occurred() || !PyDict_GetItemWithError(rules_, name)) return -1;
        PyObject* next = PyLong_FromSize_t(pending_.size());
        if (!next) return -1;
        held_.push_back(next);
        if (PyDict_SetItem(numbers_, name, next) < 0) return -1;
        pending_.push_back(name);
        return i32(pending_.size()) - 1;
    }

    i32 node(Op op, i32 a, i32 b, const i32* words, size_t count, i32 depth) {
        if (i64(t_.at.size()) >= max_nodes_ || i64(t_.code.size()) > 8 * i64(max_nodes_) || depth > max_depth_) return -1;
        t_.at.push_back(i32(t_.code.size()));
        depth_.push_back(depth);
        t_.code.insert(t_.code.end(), {i32(op), a, b, i32(count)});
        t_.code.insert(t_.code.end(), words, words + count);
        return i32(t_.at.size()) - 1;
    }
    template <class Make>
    i32 content(const std::string& key, Make&& make) {
        auto it = known_.find(key);
        if (it != known_.end()) return it->second;
        i32 made = make();
        if (made >= 0) known_.emplace(key, made);
        return made;
    }
    i32 empty() {
        return content("e", [&] { return node(Op::SEQ, 0, 0, nullptr, 0, 0); });
    }
    i32 nothing() {
        return content("n", [&] { return node(Op::ALT, 0, 0, nullptr, 0, 0); });
    }
    i32 store(const char* text, size_t length) {
        size_t offset = t_.blob.size();
        if (offset + length > max_bytes_) return -1;
        t_.blob.append(text, length);
        return i32(offset);
    }

    bool counts(PyObject* expr, i32& low, i32& high) {
        PyObject *l = get(expr, LOW), *h = l ? get(expr, HIGH) : nullptr;
        if (!h || !PyLong_Check(l) || (h != Py_None && !PyLong_Check(h))) return false;
        int overflow = 0;
        long long lowest = PyLong_AsLongLongAndOverflow(l, &overflow);
        if (overflow || lowest < 0 || lowest > (1 << 30)) return false;
        long long highest = h == Py_None ? -1 : PyLong_AsLongLongAndOverflow(h, &overflow);
        if (overflow || (h != Py_None && highest < 0)) return false;
        low = i32(lowest);
        high = i32(std::min<long long>(highest, (1ll << 31) - 1));
        return true;
    }

    i32 leaf(PyObject* expr, PyObject* type) {
        if (type == types_[0]) {
            PyObject* value = get(expr, VALUE);
            if (!value || !PyBytes_CheckExact(value)) return -1;
            const char* text = PyBytes_AS_STRING(value);
            size_t length = size_t(PyBytes_GET_SIZE(value));
            if (!length) return empty();
            return content("l" + std::string(text, length), [&] {
                i32 at = store(text, length);
                return at < 0 ? -1 : node(Op::LITERAL, at, i32(length), nullptr, 0, 0);
            });
        }
        if (type == types_[1]) {
            PyObject* bits = get(expr, BITS);
            if (!bits || !PyLong_CheckExact(bits)) return -1;
            PyObject* bytes = PyObject_CallMethod(bits, "to_bytes", "is", 32, "little");
            if (!bytes) return -1;
            held_.push_back(bytes);
            std::string text(PyBytes_AS_STRING(bytes), 32);
            if (text == std::string(32, '\0')) return nothing();
            return content("s" + text, [&] {
                i32 at = store(text.data(), 32);
                return at < 0 ? -1 : node(Op::SET, at, 0, nullptr, 0, 0);
            });
        }
        if (type == types_[5]) {
            PyObject* name = get(expr, NAME);
            i32 rule = name && PyUnicode_CheckExact(name) ? number(name) : -1;
            return rule < 0 ? -1 : node(Op::REF, rule, 0, nullptr, 0, 0);
        }
        if (type == types_[6]) return dfa(expr);
        if (type == types_[8]) return packed(expr);
        if (type != types_[7]) return -1;
        i32 low, high;
        if (!counts(expr, low, high)) return -1;
        if (high >= 0 && low > high) return nothing();
        return content("j" + std::to_string(low) + " " + std::to_string(high),
                       [&] { return node(Op::JSON, low, high, nullptr, 0, 0); });
    }

    i32 dfa(PyObject* expr) {
        PyObject *edges = get(expr, EDGES), *accepting = edges ? get(expr, ACCEPTING) : nullptr;
        if (!accepting || !PyTuple_CheckExact(edges) || !PyAnySet_Check(accepting)) return -1;
        Py_ssize_t states = PyTuple_GET_SIZE(edges);
        if (!states || states > max_nodes_) return -1;
        std::vector<uint8_t> final(size_t(states), 0);
        PyObject* all = PySequence_List(accepting);
        if (!all) return -1;
        held_.push_back(all);
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(all); i++) {
            long state = PyLong_AsLong(PyList_GET_ITEM(all, i));
            if (state == -1 && PyErr_Occurred()) return -1;
            if (state >= 0 && state < states) final[size_t(state)] = 1;
        }
        std::vector<i32> words;
        for (Py_ssize_t s = 0; s < states; s++) {
            PyObject* out = PyTuple_GET_ITEM(edges, s);
            if (!PyTuple_CheckExact(out)) return -1;
            words.push_back(final[size_t(s)]);
            words.push_back(i32(PyTuple_GET_SIZE(out)));
            long last = -1;
            for (Py_ssize_t e = 0; e < PyTuple_GET_SIZE(out); e++) {
                PyObject* edge = PyTuple_GET_ITEM(out, e);
                if (!PyTuple_CheckExact(edge) || PyTuple_GET_SIZE(edge) != 3) return -1;
                long part[3];
                for (int k = 0; k < 3; k++) {
                    part[k] = PyLong_AsLong(PyTuple_GET_ITEM(edge, k));
                    if (part[k] == -1 && PyErr_Occurred()) return -1;
                }
                if (!(last < part[0] && part[0] <= part[1] && part[1] < 256) || part[2] < 0 || part[2] >= states) return -1;
                for (long p : part) words.push_back(i32(p));
                last = part[1];
            }
        }
        return node(Op::DFA, i32(states), 0, words.data(), words.size(), 0);
    }

    i32 packed(PyObject* expr) {
        PyObject *states = get(expr, STATES), *words = states ? get(expr, WORDS) : nullptr;
        if (!words || !PyLong_CheckExact(states) || !PyBytes_CheckExact(words) || PyBytes_GET_SIZE(words) % 4) return -1;
        long count = PyLong_AsLong(states);
        if (count < 1 || count > (1 << 30)) return -1;
        std::vector<i32> all(size_t(PyBytes_GET_SIZE(words)) / 4);
        std::memcpy(all.data(), PyBytes_AS_STRING(words), all.size() * 4);
        size_t i = 0;
        for (long s = 0; s < count; s++) {
            if (i + 2 > all.size()) return -1;
            i32 edges = all[i + 1], last = -1;
            i += 2;
            if (edges < 0 || size_t(edges) > (all.size() - i) / 3) return -1;
            for (i32 e = 0; e < edges; e++, i += 3) {
                if (!(last < all[i] && all[i] <= all[i + 1] && all[i + 1] < 256) || all[i + 2] < 0 || all[i + 2] >= count) return -1;
                last = all[i + 1];
            }
        }
        return i == all.size() ? node(Op::DFA, i32(count), 0, all.data(), all.size(), 0) : -1;
    }

    // Inner expressions first, on a stack of our own.
    i32 expression(PyObject* root) {
        std::vector<PyObject*> stack{root};
        std::vector<i32> kids;
        while (!stack.empty()) {
            PyObject* expr = stack.back();
            if (seen_.count(expr)) {
                stack.pop_back();
                continue;
            }
            auto* type = reinterpret_cast<PyObject*>(Py_TYPE(expr));
            PyObject* one = nullptr;
            PyObject** inner = &one;
            Py_ssize_t count = 1;
            if (type == types_[2] || type == types_[3]) {
                PyObject* items = get(expr, ITEMS);
                if (!items || !PyTuple_CheckExact(items)) return -1;
                inner = reinterpret_cast<PyTupleObject*>(items)->ob_item;
                count = PyTuple_GET_SIZE(items);
            } else if (type == types_[4]) {
                one = get(expr, ITEM);
                if (!one) return -1;
            } else {
                i32 made = leaf(expr, type);
                if (made < 0) return -1;
                seen_[expr] = made;
                stack.pop_back();
                continue;
            }
            bool ready = true;
            for (Py_ssize_t i = count; i-- > 0;)
                if (!seen_.count(inner[i])) {
                    stack.push_back(inner[i]);
                    ready = false;
                }
            if (!ready) {
                if (i64(stack.size()) > 4 * i64(max_nodes_)) return -1;
                continue;
            }
            stack.pop_back();
            kids.clear();
            i32 depth = 0;
            for (Py_ssize_t i = 0; i < count; i++) {
                kids.push_back(seen_[inner[i]]);
                depth = std::max(depth, depth_[size_t(kids.back())]);
            }
            i32 made = type == types_[4] ? repeat(expr, kids[0], depth + 1) : group(type == types_[2], kids, depth + 1);
            if (made < 0) return -1;
            seen_[expr] = made;
        }
        return seen_[root];
    }

    i32 repeat(PyObject* expr, i32 kid, i32 depth) {
        i32 low, high;
        if (!counts(expr, low, high)) return -1;
        if (high >= 0 && low > high) return nothing();
        if (high == 0) return empty();
        return low == 1 && high == 1 ? kid : node(Op::REPEAT, low, high, &kid, 1, depth);
    }
    i32 group(bool seq, const std::vector<i32>& kids, i32 depth) {
        if (kids.size() == 1) return kids[0];
        if (kids.empty()) return seq ? empty() : nothing();
        return node(seq ? Op::SEQ : Op::ALT, 0, 0, kids.data(), kids.size(), depth);
    }

    void find_nullable() {
        std::vector<char> rules(t_.roots.size(), 0);
        for (bool changed = true; changed;) {
            t_.nullable.assign(t_.at.size(), 0);
            auto& nullable = t_.nullable;
            for (size_t i = 0; i < t_.at.size(); i++) {
                const i32* w = &t_.code[size_t(t_.at[i])];
                bool can = false;
                switch (Op(w[0])) {
                    case Op::SEQ:
                        can = true;
                        for (i32 k = 0; k < w[3]; k++) can = can && nullable[size_t(w[4 + k])];
                        break;
                    case Op::ALT:
                        for (i32 k = 0; k < w[3]; k++) can = can || nullable[size_t(w[4 + k])];
                        break;
                    case Op::REPEAT: can = w[1] == 0 || nullable[size_t(w[4])]; break;
                    case Op::REF: can = rules[size_t(w[1])]; break;
                    case Op::DFA: can = w[4]; break;
                    case Op::JSON: can = w[1] == 0; break;
                    default: break;
                }
                nullable[i] = can;
            }
            changed = false;
            for (size_t r = 0; r < rules.size(); r++) {
                char now = nullable[size_t(t_.roots[r])];
                changed |= now != rules[r];
                rules[r] = now;
            }
        }
    }

    std::vector<i32> first_rules(i32 root) {
        std::vector<i32> found, stack{root};
        mark_++;
        while (!stack.empty()) {
            i32 n = stack.back();
            stack.pop_back();
            if (marks_[size_t(n)] == mark_) continue;
            marks_[size_t(n)] = mark_;
            const i32* w = &t_.code[size_t(t_.at[size_t(n)])];
            if (Op(w[0]) == Op::REF) found.push_back(w[1]);
            if (Op(w[0]) != Op::SEQ && Op(w[0]) != Op::ALT && Op(w[0]) != Op::REPEAT) continue;
            for (i32 k = 0; k < w[3]; k++) {
                stack.push_back(w[4 + k]);
                if (Op(w[0]) == Op::SEQ && !t_.nullable[size_t(w[4 + k])]) break;
            }
        }
        return found;
    }

    bool left_recursive() {
        size_t count = t_.roots.size();
        marks_.assign(t_.at.size(), 0);
        std::vector<std::vector<i32>> first;
        for (i32 root : t_.roots) first.push_back(first_rules(root));
        std::vector<u32> before(count, 0);
        for (auto& rules : first)
            for (i32 r : rules) before[size_t(r)]++;
        std::vector<i32> free;
        for (size_t r = 0; r < count; r++)
            if (!before[r]) free.push_back(i32(r));
        size_t done = 0;
        while (!free.empty()) {
            i32 r = free.back();
            free.pop_back();
            done++;
            for (i32 after : first[size_t(r)])
                if (!--before[size_t(after)]) free.push_back(after);
        }
        return done < count;
    }

    using i64 = int64_t;
    PyObject* rules_;
    PyObject* types_[9];
    PyObject* names_[11] = {};
    PyObject* numbers_;
    i32 max_nodes_, max_depth_;
    size_t max_bytes_;
    std::vector<i32> depth_;
    std::unordered_map<PyObject*, i32> seen_;
    std::unordered_map<std::string, i32> known_;
    std::vector<PyObject*> held_;
    std::vector<u32> marks_;
    u32 mark_ = 0;
};

}  // namespace radixrt
