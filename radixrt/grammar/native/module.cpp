// radixrt.grammar._native: the lazy automaton for Python. Vocabulary, Automaton (shared), Matcher (one per sequence).
#include "flatten.hpp"
#include "objects.hpp"
#include "regular.hpp"
#include "substring.hpp"

namespace radixrt {
namespace {

// -- Vocabulary(spelled: Sequence[bytes], ends: Sequence[int])

PyObject* vocabulary_new(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject *spelled, *ends;
    if (!PyArg_ParseTuple(args, "OO", &spelled, &ends)) return nullptr;
    auto core = std::make_shared<Vocabulary>();
    PyObject* list = PySequence_Fast(spelled, "spelled: a sequence of bytes");
    if (!list) return nullptr;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(list); i++) {
        char* text;
        Py_ssize_t length;
        if (PyBytes_AsStringAndSize(PySequence_Fast_GET_ITEM(list, i), &text, &length) < 0) {
            Py_DECREF(list);
            return nullptr;
        }
        core->spelled.emplace_back(text, size_t(std::min<Py_ssize_t>(length, 65000)));
        if (length > 65000) core->spelled.back().clear();
    }
    Py_DECREF(list);
    list = PySequence_Fast(ends, "ends: a sequence of token ids");
    if (!list) return nullptr;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(list); i++) {
        long id = PyLong_AsLong(PySequence_Fast_GET_ITEM(list, i));
        if (id == -1 && PyErr_Occurred()) {
            Py_DECREF(list);
            return nullptr;
        }
        if (id < 0 || size_t(id) >= core->spelled.size()) continue;
        core->ends.push_back(i32(id));
        core->spelled[size_t(id)].clear();
    }
    Py_DECREF(list);
    if (!guarded(true, [&] { core->build(); })) return nullptr;
    auto* self = allocate<VocabularyObject>(type);
    if (self) new (&self->core) std::shared_ptr<Vocabulary>(std::move(core));
    return reinterpret_cast<PyObject*>(self);
}

void vocabulary_dealloc(PyObject* object) {
    auto* self = reinterpret_cast<VocabularyObject*>(object);
    PyTypeObject* type = Py_TYPE(object);
    self->core.~shared_ptr();
    type->tp_free(object);
    Py_DECREF(type);
}

PyObject* vocabulary_memory(PyObject* object, void*) {
    return PyLong_FromSize_t(reinterpret_cast<VocabularyObject*>(object)->core->memory());
}

// -- Automaton(vocabulary, code, at, roots, blob, nullable, start, max_states, items, depth, memory)

PyObject* automaton_new(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject* vocabulary;
    Py_buffer code, at, roots, blob, nullable;
    int start;
    Py_ssize_t max_states, items, depth, memory;
    if (!PyArg_ParseTuple(args, "O!y*y*y*y*y*innnn", vocabulary_type, &vocabulary, &code, &at, &roots, &blob, &nullable, &start,
                          &max_states, &items, &depth, &memory))
        return nullptr;
    Tables tables;
    auto ints = [](const Py_buffer& b) {
        auto* p = static_cast<const i32*>(b.buf);
        return std::vector<i32>(p, p + b.len / 4);
    };
    tables.code = ints(code);
    tables.at = ints(at);
    tables.roots = ints(roots);
    tables.blob.assign(static_cast<const char*>(blob.buf), size_t(blob.len));
    tables.nullable.assign(static_cast<const char*>(nullable.buf), size_t(nullable.len));
    tables.start = start;
    for (Py_buffer* b : {&code, &at, &roots, &blob, &nullable}) PyBuffer_Release(b);
    std::shared_ptr<Vocabulary> v = reinterpret_cast<VocabularyObject*>(vocabulary)->core;
    std::unique_ptr<Automaton> core;
    Limits limits{size_t(items), size_t(depth), size_t(memory)};
    if (!guarded(true, [&] {
            core = std::make_unique<Automaton>(Builder(tables, v->single, size_t(max_states)).build(), v, limits);
        }))
        return nullptr;
    auto* self = allocate<AutomatonObject>(type);
    if (!self) return nullptr;
    new (&self->core) std::unique_ptr<Automaton>(std::move(core));
    new (&self->mutex) std::unique_ptr<std::mutex>(new std::mutex);
    self->matchers = new std::vector<MatcherObject*>;
    self->vocabulary = Py_NewRef(vocabulary);
    return reinterpret_cast<PyObject*>(self);
}

void automaton_dealloc(PyObject* object) {
    auto* self = reinterpret_cast<AutomatonObject*>(object);
    PyTypeObject* type = Py_TYPE(object);
    self->core.~unique_ptr();
    self->mutex.~unique_ptr();
    delete self->matchers;
    Py_XDECREF(self->vocabulary);
    type->tp_free(object);
    Py_DECREF(type);
}

PyObject* automaton_figures(PyObject* object, PyObject*) {
    auto* self = reinterpret_cast<AutomatonObject*>(object);
    Lock lock(self);
    const Automaton& a = *self->core;
    return Py_BuildValue("{s:n,s:n,s:n,s:n,s:n}", "memory_bytes", Py_ssize_t(a.memory()), "states", Py_ssize_t(a.nfa().size()),
                         "configurations", Py_ssize_t(a.node_count()), "masks", Py_ssize_t(a.mask_count()), "classes",
                         Py_ssize_t(a.nfa().classes));
}

PyObject* automaton_empty(PyObject* object, PyObject*) {
    return PyBool_FromLong(reinterpret_cast<AutomatonObject*>(object)->core->nfa().way(
                               reinterpret_cast<AutomatonObject*>(object)->core->nfa().start, 0, true) >= NEVER);
}

// The bytes the grammar needs in some place and that are no token by themselves.
PyObject* automaton_unspelled(PyObject* object, PyObject*) {
    auto* self = reinterpret_cast<AutomatonObject*>(object);
    const Nfa& nfa = self->core->nfa();
    const bool* single = self->core->vocabulary().single;
    bool found[256] = {};
    for (const Edge& e : nfa.edges) {
        bool any = false;
        for (int b = e.low; b <= e.high; b++) any |= single[b];
        if (!any && nfa.costs(true)[e.to] < NEVER) found[e.low] = true;
    }
    std::string out;
    for (int b = 0; b < 256; b++)
        if (found[b]) out.push_back(char(b));
    return PyBytes_FromStringAndSize(out.data(), Py_ssize_t(out.size()));
}

PyObject* new_matcher(AutomatonObject* owner, const std::vector<i32>& states) {
    auto* self = allocate<MatcherObject>(matcher_type);
    if (!self) return nullptr;
    self->owner = owner;
    Py_INCREF(owner);
    self->states = new std::vector<i32>(states);
    owner->matchers->push_back(self);
    return reinterpret_cast<PyObject*>(self);
}

PyObject* automaton_matcher(PyObject* object, PyObject*) {
    auto* self = reinterpret_cast<AutomatonObject*>(object);
    Lock lock(self);
    return new_matcher(self, {self->core->start()});
}

// flatten(rules, start, types, max_nodes, max_depth, max_bytes): (code, at, blob, roots, names, nullable), or None
PyObject* flatten(PyObject*, PyObject* args) {
    PyObject *rules, *start, *types;
    int max_nodes, max_depth;
    Py_ssize_t max_bytes;
    if (!PyArg_ParseTuple(args, "O!UO!iin", &PyDict_Type, &rules, &start, &PyTuple_Type, &types, &max_nodes, &max_depth, &max_bytes))
        return nullptr;
    if (PyTuple_GET_SIZE(types) != 9) return PyErr_Format(PyExc_ValueError, "types: must be the 9 kinds of expressions");
    Flattener made(rules, types, max_nodes, max_depth, size_t(max_bytes));
    bool good = false;
    if (!guarded(false, [&] { good = made.run(start); })) return nullptr;
    if (!good) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    PyObject* names = PyTuple_New(Py_ssize_t(made.pending_.size()));
    if (!names) return nullptr;
    for (size_t i = 0; i < made.pending_.size(); i++) PyTuple_SET_ITEM(names, Py_ssize_t(i), Py_NewRef(made.pending_[i]));
    auto ints = [](const std::vector<i32>& v) { return reinterpret_cast<const char*>(v.data()); };
    const Tables& t = made.t_;
    return Py_BuildValue("(y#y#y#y#Ny#)", ints(t.code), Py_ssize_t(t.code.size() * 4), ints(t.at), Py_ssize_t(t.at.size() * 4),
                         t.blob.data(), Py_ssize_t(t.blob.size()), ints(t.roots), Py_ssize_t(t.roots.size() * 4), names,
                         t.nullable.data(), Py_ssize_t(t.nullable.size()));
}

// -- Matcher

MatcherObject* as_matcher(PyObject* object) { return reinterpret_cast<MatcherObject*>(object); }

void matcher_dealloc(PyObject* object) {
    auto* self = as_matcher(object);
    PyTypeObject* type = Py_TYPE(object);
    if (self->owner) {
        {
            Lock lock(self->owner);
            auto& all = *self->owner->matchers;
            auto it = std::find(all.rbegin(), all.rend(), self);
            if (it != all.rend()) {
                *it = all.back();
                all.pop_back();
            }
        }
        Py_DECREF(self->owner);
    }
    delete self->states;
    type->tp_free(object);
    Py_DECREF(type);
}

// Drops cached configurations when there are too many. Needs the lock; numbers of configurations change.
void tidy(AutomatonObject* owner, i32* also = nullptr) {
    if (!owner->core->full()) return;
    std::vector<i32*> roots;
    if (also) roots.push_back(also);
    for (MatcherObject* m : *owner->matchers)
        for (i32& state : *m->states)
            if (state != FINISHED) roots.push_back(&state);
    owner->core->collect(roots);
}

struct Rows {
    Py_buffer view;
    size_t width;
    bool ok = false;

    explicit Rows(PyObject* array) {
        if (PyObject_GetBuffer(array, &view, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0) return;
        if (view.ndim != 2 || view.itemsize != 4) {
            PyErr_SetString(PyExc_ValueError, "mask: must be a C-contiguous int32 array [rows, words]");
            PyBuffer_Release(&view);
            return;
        }
        width = size_t(view.shape[1]);
        ok = true;
    }
    ~Rows() {
        if (ok) PyBuffer_Release(&view);
    }
    u32* row(Py_ssize_t r, size_t words) {
        if (r < 0 || r >= view.shape[0]) {
            PyErr_Format(PyExc_IndexError, "row=%zd: the mask has %zd rows", r, view.shape[0]);
            return nullptr;
        }
        if (width < words) {
            PyErr_Format(PyExc_ValueError, "mask: %zu words a row are too few, the vocabulary needs %zu", width, words);
            return nullptr;
        }
        return static_cast<u32*>(view.buf) + size_t(r) * width;
    }
};

// within < 0: no budget.
bool fill_row(MatcherObject* self, u32* out, size_t width, long long within) {
    AutomatonObject* owner = self->owner;
    const Vocabulary& v = owner->core->vocabulary();
    Lock lock(owner);
    i32 state = self->states->back();
    std::memset(out + v.words, 0, (width - v.words) * 4);
    if (state == FINISHED) {
        std::memset(out, 0, v.words * 4);
        return true;
    }
    bool quick = owner->core->mask_known(state) && within < 0;
    if (!guarded(!quick, [&] {
            tidy(owner);
            i32 at = self->states->back();
            if (within == 0) {
                std::memset(out, 0, v.words * 4);
            } else if (within < 0 || !owner->core->mask_within(at, u64(within - 1), out)) {
                std::memcpy(out, owner->core->mask(at).bits.get(), v.words * 4);
            }
            if (owner->core->accepts(at))
                for (i32 id : v.ends) out[id >> 5] |= 1u << (id & 31);
        }))
        return false;
    return true;
}

PyObject* matcher_fill(PyObject* object, PyObject* const* args, Py_ssize_t count) {
    if (count != 2 && count != 3) return PyErr_Format(PyExc_TypeError, "fill_mask(mask, row[, remaining])");
    auto* self = as_matcher(object);
    Py_ssize_t row = PyLong_AsSsize_t(args[1]);
    if (row == -1 && PyErr_Occurred()) return nullptr;
    long long within = -1;
    if (count == 3) {
        within = PyLong_AsLongLong(args[2]);
        if (within == -1 && PyErr_Occurred()) return nullptr;
        if (within < 0) within = 0;
    }
    Rows rows(args[0]);
    if (!rows.ok) return nullptr;
    u32* out = rows.row(row, self->owner->core->vocabulary().words);
    if (!out || !fill_row(self, out, rows.width, within)) return nullptr;
    Py_RETURN_NONE;
}

PyObject* fill_masks(PyObject*, PyObject* args) {
    PyObject *matchers, *mask, *numbers;
    if (!PyArg_ParseTuple(args, "OOO", &matchers, &mask, &numbers)) return nullptr;
    Rows rows(mask);
    if (!rows.ok) return nullptr;
    PyObject* list = PySequence_Fast(matchers, "matchers: a sequence");
    PyObject* where = list ? PySequence_Fast(numbers, "rows: a sequence") : nullptr;
    bool good = where && PySequence_Fast_GET_SIZE(list) == PySequence_Fast_GET_SIZE(where);
    if (where && !good) PyErr_SetString(PyExc_ValueError, "rows: must be as many as matchers");
    for (Py_ssize_t i = 0; good && i < PySequence_Fast_GET_SIZE(list); i++) {
        PyObject* object = PySequence_Fast_GET_ITEM(list, i);
        if (!PyObject_TypeCheck(object, matcher_type)) {
            PyErr_SetString(PyExc_TypeError, "matchers: must be native matchers");
            good = false;
            break;
        }
        auto* self = as_matcher(object);
        Py_ssize_t row = PyLong_AsSsize_t(PySequence_Fast_GET_ITEM(where, i));
        u32* out = row == -1 && PyErr_Occurred() ? nullptr : rows.row(row, self->owner->core->vocabulary().words);
        good = out && fill_row(self, out, rows.width, -1);
    }
    Py_XDECREF(list);
    Py_XDECREF(where);
    if (!good) return nullptr;
    Py_RETURN_NONE;
}

bool is_end(const Vocabulary& v, long token) { return std::find(v.ends.begin(), v.ends.end(), token) != v.ends.end(); }

PyObject* matcher_accept(PyObject* object, PyObject* argument) {
    auto* self = as_matcher(object);
    long token = PyLong_AsLong(argument);
    if (token == -1 && PyErr_Occurred()) return nullptr;
    Lock lock(self->owner);
    bool allowed = false;
    if (!guarded(false, [&] {
            tidy(self->owner);
            Automaton& a = *self->owner->core;
            i32 at = self->states->back();
            if (at == FINISHED || token < 0 || token > 0x7FFFFFFF) return;
            if (is_end(a.vocabulary(), token)) {
                allowed = a.accepts(at);
                if (allowed) self->states->push_back(FINISHED);
                return;
            }
            i32 to = a.walk_token(at, i32(token));
            allowed = to != Automaton::DEAD;
            if (allowed) self->states->push_back(to);
        }))
        return nullptr;
    return PyBool_FromLong(allowed);
}

PyObject* matcher_advance(PyObject* object, PyObject* argument) {
    auto* self = as_matcher(object);
    char* text;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(argument, &text, &length) < 0) return nullptr;
    Lock lock(self->owner);
    bool allowed = false;
    if (!guarded(length > 4096, [&] {
            tidy(self->owner);
            i32 at = self->states->back();
            if (at == FINISHED) return;
            i32 to = at;
            for (size_t done = 0; done < size_t(length) && to != Automaton::DEAD; done += 1024) {
                to = self->owner->core->walk(to, text + done, std::min<size_t>(1024, size_t(length) - done));
                tidy(self->owner, &to);
            }
            allowed = to != Automaton::DEAD;
            if (allowed) self->states->push_back(to);
        }))
        return nullptr;
    return PyBool_FromLong(allowed);
}

PyObject* matcher_rollback(PyObject* object, PyObject* argument) {
    auto* self = as_matcher(object);
    Py_ssize_t count = PyLong_AsSsize_t(argument);
    if (count == -1 && PyErr_Occurred()) return nullptr;
    Lock lock(self->owner);
    if (count < 0 || size_t(count) >= self->states->size())
        return PyErr_Format(PyExc_ValueError, "n=%zd: must be 0 to %zu, the tokens accepted", count, self->states->size() - 1);
    self->states->resize(self->states->size() - size_t(count));
    Py_RETURN_NONE;
}

PyObject* matcher_copy(PyObject* object, PyObject*) {
    auto* self = as_matcher(object);
    Lock lock(self->owner);
    return new_matcher(self->owner, *self->states);
}

PyObject* matcher_forced(PyObject* object, PyObject*) {
    auto* self = as_matcher(object);
    std::string out;
    Lock lock(self->owner);
    if (!guarded(false, [&] {
            tidy(self->owner);
            i32 at = self->states->back();
            if (at == FINISHED) return;
            while (out.size() < 4096) {
                int byte = self->owner->core->forced_byte(at);
                if (byte < 0) break;
                at = self->owner->core->next(at, uint8_t(byte));
                out.push_back(char(byte));
            }
        }))
        return nullptr;
    return PyBytes_FromStringAndSize(out.data(), Py_ssize_t(out.size()));
}

PyObject* matcher_shortest(PyObject* object, PyObject*) {
    auto* self = as_matcher(object);
    std::string out;
    Lock lock(self->owner);
    if (!guarded(true, [&] {
            tidy(self->owner);
            i32 at = self->states->back();
            if (at == FINISHED) return;
            for (int byte; (byte = self->owner->core->best_byte(at)) >= 0; out.push_back(char(byte)))
                at = self->owner->core->next(at, uint8_t(byte));
        }))
        return nullptr;
    return PyBytes_FromStringAndSize(out.data(), Py_ssize_t(out.size()));
}

PyObject* matcher_plan(PyObject* object, PyObject*) {
    auto* self = as_matcher(object);
    std::vector<i32> tokens;
    Lock lock(self->owner);
    if (!guarded(true, [&] {
            tidy(self->owner);
            i32 at = self->states->back();
            if (at == FINISHED) return;
            for (i32 token, to; (token = self->owner->core->plan_token(at, &to)) >= 0; at = to) tokens.push_back(token);
        }))
        return nullptr;
    PyObject* list = PyList_New(Py_ssize_t(tokens.size()));
    for (size_t i = 0; list && i < tokens.size(); i++) PyList_SET_ITEM(list, Py_ssize_t(i), PyLong_FromLong(tokens[i]));
    return list;
}

PyObject* matcher_min_tokens(PyObject* object, void*) {
    auto* self = as_matcher(object);
    long length = 0;
    Lock lock(self->owner);
    if (!guarded(true, [&] {
            tidy(self->owner);
            i32 at = self->states->back();
            if (at != FINISHED) length = self->owner->core->plan_length(at);
        }))
        return nullptr;
    return PyLong_FromLong(length);
}

PyObject* matcher_allows_within(PyObject* object, PyObject* args) {
    auto* self = as_matcher(object);
    long long token, remaining;
    if (!PyArg_ParseTuple(args, "LL", &token, &remaining)) return nullptr;
    Lock lock(self->owner);
    bool allowed = false;
    if (!guarded(true, [&] {
            tidy(self->owner);
            Automaton& a = *self->owner->core;
            i32 at = self->states->back();
            if (at == FINISHED || remaining < 0 || token < 0 || token > 0x7FFFFFFF) return;
            if (is_end(a.vocabulary(), long(token))) {
                allowed = a.accepts(at);
                return;
            }
            i32 to = a.walk_token(at, i32(token));
            allowed = to != Automaton::DEAD && a.plan_length(to) <= remaining;
        }))
        return nullptr;
    return PyBool_FromLong(allowed);
}

PyObject* matcher_can_end(PyObject* object, void*) {
    auto* self = as_matcher(object);
    Lock lock(self->owner);
    i32 at = self->states->back();
    return PyBool_FromLong(at != FINISHED && self->owner->core->accepts(at));
}
PyObject* matcher_can_continue(PyObject* object, void*) {
    auto* self = as_matcher(object);
    Lock lock(self->owner);
    i32 at = self->states->back();
    return PyBool_FromLong(at != FINISHED && self->owner->core->continues(at));
}
PyObject* matcher_finished(PyObject* object, void*) { return PyBool_FromLong(as_matcher(object)->states->back() == FINISHED); }
PyObject* matcher_length(PyObject* object, void*) { return PyLong_FromSize_t(as_matcher(object)->states->size() - 1); }
PyObject* matcher_min_bytes(PyObject* object, void*) {
    auto* self = as_matcher(object);
    Lock lock(self->owner);
    i32 at = self->states->back();
    return PyLong_FromUnsignedLongLong(at == FINISHED ? 0 : self->owner->core->cost(at));
}

PyGetSetDef vocabulary_getset[] = {{"memory_bytes", vocabulary_memory, nullptr, nullptr, nullptr}, {}};
PyMethodDef automaton_methods[] = {{"matcher", automaton_matcher, METH_NOARGS, nullptr},
                                   {"figures", automaton_figures, METH_NOARGS, nullptr},
                                   {"empty", automaton_empty, METH_NOARGS, nullptr},
                                   {"unspelled", automaton_unspelled, METH_NOARGS, nullptr},
                                   {}};
PyMethodDef matcher_methods[] = {
    {"fill_mask", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(matcher_fill)), METH_FASTCALL, nullptr},
    {"accept", matcher_accept, METH_O, nullptr},
    {"advance_bytes", matcher_advance, METH_O, nullptr},
    {"rollback", matcher_rollback, METH_O, nullptr},
    {"copy", matcher_copy, METH_NOARGS, nullptr},
    {"forced_bytes", matcher_forced, METH_NOARGS, nullptr},
    {"shortest_completion", matcher_shortest, METH_NOARGS, nullptr},
    {"plan", matcher_plan, METH_NOARGS, nullptr},
    {"allows_within", matcher_allows_within, METH_VARARGS, nullptr},
    {}};
PyGetSetDef matcher_getset[] = {{"can_end", matcher_can_end, nullptr, nullptr, nullptr},
                                {"can_continue", matcher_can_continue, nullptr, nullptr, nullptr},
                                {"finished", matcher_finished, nullptr, nullptr, nullptr},
                                {"length", matcher_length, nullptr, nullptr, nullptr},
                                {"min_bytes_to_end", matcher_min_bytes, nullptr, nullptr, nullptr},
                                {"min_tokens_to_end", matcher_min_tokens, nullptr, nullptr, nullptr},
                                {}};
PyMethodDef module_methods[] = {{"fill_masks", fill_masks, METH_VARARGS, nullptr},
                                {"flatten", flatten, METH_VARARGS, nullptr},
                                {"canonical", regular_canonical, METH_VARARGS, nullptr},
                                {"minimize", regular_minimize, METH_VARARGS, nullptr},
                                {"product", regular_product, METH_VARARGS, nullptr},
                                {"spell", regular_spell, METH_VARARGS, nullptr},
                                {"substrings", substrings, METH_VARARGS, nullptr},
                                {}};

PyType_Slot vocabulary_slots[] = {{Py_tp_new, reinterpret_cast<void*>(vocabulary_new)},
                                  {Py_tp_dealloc, reinterpret_cast<void*>(vocabulary_dealloc)},
                                  {Py_tp_getset, vocabulary_getset},
                                  {}};
PyType_Slot automaton_slots[] = {{Py_tp_new, reinterpret_cast<void*>(automaton_new)},
                                 {Py_tp_dealloc, reinterpret_cast<void*>(automaton_dealloc)},
                                 {Py_tp_methods, automaton_methods},
                                 {}};
PyType_Slot matcher_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(matcher_dealloc)},
                               {Py_tp_methods, matcher_methods},
                               {Py_tp_getset, matcher_getset},
                               {}};
PyType_Spec vocabulary_spec = {"radixrt.grammar._native.Vocabulary", sizeof(VocabularyObject), 0, Py_TPFLAGS_DEFAULT, vocabulary_slots};
PyType_Spec automaton_spec = {"radixrt.grammar._native.Automaton", sizeof(AutomatonObject), 0, Py_TPFLAGS_DEFAULT, automaton_slots};
PyType_Spec matcher_spec = {"radixrt.grammar._native.Matcher", sizeof(MatcherObject), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, matcher_slots};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", "The lazy automaton; see matcher.py.", -1, module_methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace radixrt

PyMODINIT_FUNC PyInit__native() {
    using namespace radixrt;
    PyObject* m = PyModule_Create(&module);
    if (!m) return nullptr;
    too_large = PyErr_NewException("radixrt.grammar._native.TooLarge", PyExc_RuntimeError, nullptr);
    vocabulary_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&vocabulary_spec));
    automaton_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&automaton_spec));
    matcher_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&matcher_spec));
    if (!too_large || !vocabulary_type || !automaton_type || !matcher_type || PyModule_AddObjectRef(m, "TooLarge", too_large) < 0 ||
        PyModule_AddType(m, vocabulary_type) < 0 || PyModule_AddType(m, automaton_type) < 0 || PyModule_AddType(m, matcher_type) < 0) {
        Py_DECREF(m);
        return nullptr;
    }
    return m;
}
