// What regular/ asks of the native module: canonical, minimize, product, spell. Arguments are read, then the work is done without
// the GIL, then the result is built.
#pragma once

#include "chars.hpp"
#include "objects.hpp"
#include "spell.hpp"

namespace radixrt {
namespace {

bool read_ints(PyObject* object, std::vector<i32>& out) {
    PyObject* list = PySequence_Fast(object, "a sequence of integers");
    if (!list) return false;
    Py_ssize_t n = PySequence_Fast_GET_SIZE(list);
    PyObject** items = PySequence_Fast_ITEMS(list);
    for (Py_ssize_t i = 0; i < n; i++) {
        long value = PyLong_AsLong(items[i]);
        if (value == -1 && PyErr_Occurred()) break;
        out.push_back(i32(value));
    }
    Py_DECREF(list);
    return !PyErr_Occurred();
}

// rows: sequences of states, all of one length. Which states are final is left open.
bool read_table(PyObject* object, CharTable& out) {
    PyObject* list = PySequence_Fast(object, "a sequence of rows");
    if (!list) return false;
    size_t n = size_t(PySequence_Fast_GET_SIZE(list));
    bool good = n > 0;
    for (size_t s = 0; s < n && good; s++) {
        size_t before = out.next.size();
        good = read_ints(PySequence_Fast_GET_ITEM(list, Py_ssize_t(s)), out.next);
        if (s == 0) out.width = i32(out.next.size());
        good = good && out.next.size() - before == size_t(out.width);
        for (size_t i = before; i < out.next.size() && good; i++) good = out.next[i] >= 0 && size_t(out.next[i]) < n;
    }
    Py_DECREF(list);
    if (!good && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "not the rows of a complete automaton");
    out.final.assign(n, 0);
    return good;
}

bool read_flags(PyObject* object, CharTable& out) {
    PyObject* list = PySequence_Fast(object, "a sequence of truth values");
    if (!list) return false;
    bool good = size_t(PySequence_Fast_GET_SIZE(list)) == out.size();
    for (size_t s = 0; s < out.size() && good; s++) {
        int flag = PyObject_IsTrue(PySequence_Fast_GET_ITEM(list, Py_ssize_t(s)));
        good = flag >= 0;
        out.final[s] = flag > 0;
    }
    Py_DECREF(list);
    if (!good && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "not one truth value for each state");
    return good;
}

bool read_set(PyObject* object, std::vector<uint8_t>& member) {
    PyObject* all = PySequence_List(object);
    std::vector<i32> states;
    bool good = all && read_ints(all, states);
    Py_XDECREF(all);
    for (i32 s : states)
        if (s >= 0 && size_t(s) < member.size()) member[size_t(s)] = 1;
    return good;
}

// A tuple of integers, or of such tuples: nothing for the garbage collector to follow, and there may be very many.
PyObject* untracked(PyObject* tuple) {
    if (tuple && PyObject_GC_IsTracked(tuple)) PyObject_GC_UnTrack(tuple);  // the empty one never is
    return tuple;
}

PyObject* ints(const i32* values, size_t count) {
    PyObject* out = PyTuple_New(Py_ssize_t(count));
    for (size_t i = 0; out && i < count; i++) {
        PyObject* value = PyLong_FromLong(values[i]);
        if (!value) Py_CLEAR(out);
        else PyTuple_SET_ITEM(out, Py_ssize_t(i), value);
    }
    return untracked(out);
}

PyObject* rows_of(const CharTable& t) {
    PyObject* out = PyTuple_New(Py_ssize_t(t.size()));
    for (size_t s = 0; out && s < t.size(); s++) {
        PyObject* row = ints(t.row(s), size_t(t.width));
        if (!row) Py_CLEAR(out);
        else PyTuple_SET_ITEM(out, Py_ssize_t(s), row);
    }
    return untracked(out);
}

PyObject* set_of(const std::vector<i32>& values) {
    PyObject* list = ints(values.data(), values.size());
    PyObject* out = list ? PyFrozenSet_New(list) : nullptr;
    Py_XDECREF(list);
    return out;
}

PyObject* canonical_result(const CharTable& t, const std::vector<i32>& classes) {
    std::vector<i32> ends;
    for (size_t s = 0; s < t.size(); s++)
        if (t.final[s]) ends.push_back(i32(s));
    PyObject *names = ints(classes.data(), classes.size()), *rows = rows_of(t), *final = set_of(ends);
    if (names && rows && final) return Py_BuildValue("NNN", names, rows, final);
    Py_XDECREF(names);
    Py_XDECREF(rows);
    Py_XDECREF(final);
    return nullptr;
}

bool within(const std::vector<i32>& values, i32 least, i32 end) {
    for (i32 v : values)
        if (v < least || v >= end) {
            PyErr_SetString(PyExc_ValueError, "a class out of range");
            return false;
        }
    return true;
}

// canonical(classes, rows, accepting: flags) -> (classes renamed, rows, accepting: set)
PyObject* regular_canonical(PyObject*, PyObject* args) {
    PyObject *classes, *rows, *flags;
    CharTable table, made;
    std::vector<i32> names;
    if (!PyArg_ParseTuple(args, "OOO", &classes, &rows, &flags) || !read_ints(classes, names) || !read_table(rows, table) ||
        !read_flags(flags, table) || !within(names, -1, table.width))
        return nullptr;
    if (!guarded(true, [&] { made = canonical(table, names); })) return nullptr;
    return canonical_result(made, names);
}

// minimize(rows, accepting: flags) -> (rows, accepting: flags)
PyObject* regular_minimize(PyObject*, PyObject* args) {
    PyObject *rows, *flags;
    CharTable table, made;
    if (!PyArg_ParseTuple(args, "OO", &rows, &flags) || !read_table(rows, table) || !read_flags(flags, table)) return nullptr;
    if (!guarded(true, [&] { made = minimal(table); })) return nullptr;
    PyObject *out = rows_of(made), *final = out ? PyList_New(Py_ssize_t(made.size())) : nullptr;
    if (!final) {
        Py_XDECREF(out);
        return nullptr;
    }
    for (size_t s = 0; s < made.size(); s++) PyList_SET_ITEM(final, Py_ssize_t(s), PyBool_FromLong(made.final[s]));
    return Py_BuildValue("NN", out, final);
}

// product(rows, accepting: set, rows, accepting: set, pairs of classes, classes, keep, states, work) -> as canonical, or the
// name of the limit it passed. keep: 4 truth values, for (no, no), (no, yes), (yes, no), (yes, yes).
PyObject* regular_product(PyObject*, PyObject* args) {
    PyObject *rows_a, *ends_a, *rows_b, *ends_b, *lefts, *rights, *classes;
    int keeps[4];
    long long states, work;
    CharTable a, b, pairs_made, made;
    std::vector<i32> left, right, names;
    if (!PyArg_ParseTuple(args, "OOOOOOO(pppp)LL", &rows_a, &ends_a, &rows_b, &ends_b, &lefts, &rights, &classes, &keeps[0],
                          &keeps[1], &keeps[2], &keeps[3], &states, &work) ||
        !read_table(rows_a, a) || !read_set(ends_a, a.final) || !read_table(rows_b, b) || !read_set(ends_b, b.final) ||
        !read_ints(lefts, left) || !read_ints(rights, right) || !read_ints(classes, names) || !within(left, 0, a.width) ||
        !within(right, 0, b.width) || !within(names, -1, i32(std::min(left.size(), right.size()))))
        return nullptr;
    Over over = Over::NO;
    if (!guarded(true, [&] {
            std::vector<std::pair<i32, i32>> pairs;
            for (size_t i = 0; i < std::min(left.size(), right.size()); i++) pairs.push_back({left[i], right[i]});
            bool keep[4] = {keeps[0] != 0, keeps[1] != 0, keeps[2] != 0, keeps[3] != 0};
            over = product(a, b, pairs, keep, states, work, pairs_made);
            if (over == Over::NO) made = canonical(pairs_made, names);
        }))
        return nullptr;
    if (over != Over::NO) return PyUnicode_FromString(over == Over::WORK ? "work" : "states");
    return canonical_result(made, names);
}

bool read_spans(PyObject* object, i32 nodes, Spans& out) {
    PyObject* list = PySequence_Fast(object, "edges");
    if (!list) return false;
    bool good = true;
    std::vector<i32> part;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(list) && good; i++) {
        part.clear();
        good = read_ints(PySequence_Fast_GET_ITEM(list, i), part) && part.size() == 3 && part[2] >= 0 && part[2] < nodes;
        if (good) out.push_back({part[0], part[1], part[2]});
    }
    Py_DECREF(list);
    if (!good && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a bad edge");
    return good;
}

bool read_template(PyObject* root, PyObject* edges, PyObject* used, PyObject* forms, Template& out) {
    PyObject *all = PySequence_Fast(edges, "edges"), *below = PySequence_Fast(used, "classes");
    bool good = all && below && read_ints(forms, out.forms);
    size_t n = out.forms.size();
    good = good && size_t(PySequence_Fast_GET_SIZE(all)) == n && size_t(PySequence_Fast_GET_SIZE(below)) == n;
    if (good) {
        out.edges.resize(n);
        out.used.resize(n);
        good = read_spans(root, i32(n), out.root);
    }
    for (size_t i = 0; i < n && good; i++) {
        good = read_spans(PySequence_Fast_GET_ITEM(all, Py_ssize_t(i)), i32(n), out.edges[i]) &&
               read_ints(PySequence_Fast_GET_ITEM(below, Py_ssize_t(i)), out.used[i]) && within(out.used[i], 0, out.classes) &&
               !out.used[i].empty();
        for (const Span& e : out.edges[i]) good = good && e.to < i32(i);  // inner nodes come after those they lead to
    }
    Py_XDECREF(all);
    Py_XDECREF(below);
    if (!good && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a bad template");
    return good;
}

// spell(rows, live: set, leaf, root, edges, used, forms) -> (edges of the reachable states, the start first; their old numbers)
PyObject* regular_spell(PyObject*, PyObject* args) {
    PyObject *rows, *live, *root, *edges, *used, *forms;
    int leaf;
    CharTable table;
    Template shape;
    if (!PyArg_ParseTuple(args, "OOiOOOO", &rows, &live, &leaf, &root, &edges, &used, &forms) || !read_table(rows, table) ||
        !read_set(live, table.final))
        return nullptr;
    shape.classes = table.width;
    if (!read_template(root, edges, used, forms, shape)) return nullptr;
    std::unique_ptr<Speller> made;
    std::vector<i32> order, place;
    if (!guarded(true, [&] {
            made = std::make_unique<Speller>(shape, table.size());
            std::vector<i32> row(size_t(table.width));
            for (size_t s = 0; s < table.size(); s++) {
                if (!table.final[s] || i32(s) == leaf) continue;  // final: live
                for (size_t c = 0; c < row.size(); c++) row[c] = table.final[size_t(table.row(s)[c])] ? table.row(s)[c] : -1;
                made->fill(s, row);
            }
            order = made->order(place);
        }))
        return nullptr;
    PyObject* out = PyTuple_New(Py_ssize_t(order.size()));
    for (size_t i = 0; out && i < order.size(); i++) {
        const Spans& spans = made->edges(order[i]);
        PyObject* row = PyTuple_New(Py_ssize_t(spans.size()));
        for (size_t k = 0; row && k < spans.size(); k++) {
            i32 part[3] = {spans[k].low, spans[k].high, place[size_t(spans[k].to)]};
            PyObject* edge = ints(part, 3);
            if (!edge) {
                Py_CLEAR(row);
                break;
            }
            PyTuple_SET_ITEM(row, Py_ssize_t(k), edge);
        }
        if (!row) {
            Py_CLEAR(out);
            break;
        }
        PyTuple_SET_ITEM(out, Py_ssize_t(i), untracked(row));
    }
    untracked(out);
    PyObject* old = out ? ints(order.data(), order.size()) : nullptr;
    if (!old) {
        Py_XDECREF(out);
        return nullptr;
    }
    return Py_BuildValue("NN", out, old);
}

}  // namespace
}  // namespace radixrt
