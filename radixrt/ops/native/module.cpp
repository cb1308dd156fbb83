// radixrt.ops._native: packing of weights, and Model, the forward of a decoder. Buffers come through the buffer protocol; KV and hidden
// states by address, their owner keeps them alive as long as the model.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>

#include "kernels.hpp"
#include "model.hpp"
#include "bind_attention.hpp"
#include "bind_matmul.hpp"

namespace radixrt {
namespace {

struct Refused : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A buffer held for as long as this lives.
class Held {
public:
    Held(PyObject* from, const char* what, char format, Py_ssize_t items, int flags = 0) {
        if (PyObject_GetBuffer(from, &view_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | flags) < 0) throw Refused("");
        const char* f = view_.format ? view_.format : "B";
        const bool fits = f[0] == format || (format == 'i' && f[0] == 'l' && view_.itemsize == 4);
        if (!fits || f[1] || (items >= 0 && view_.len / view_.itemsize != items)) {
            const std::string text = std::string(what) + ": " + std::to_string(items) + " items of type " + format + " expected, got " +
                                     std::to_string(view_.len / view_.itemsize) + " of " + f;
            PyBuffer_Release(&view_);
            throw Refused(text);
        }
    }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;
    ~Held() { PyBuffer_Release(&view_); }
    template <class T>
    const T* data() const {
        return static_cast<const T*>(view_.buf);
    }
    int size() const { return int(view_.len / view_.itemsize); }

private:
    Py_buffer view_;
};

struct Owner {
    std::unique_ptr<Model> model;
    std::vector<std::unique_ptr<Held>> held;
    std::mutex mutex;
    int positions = 0, slots = 0;

    const float* floats(PyObject* from, const char* what, Py_ssize_t items) {
        if (from == Py_None) return nullptr;
        held.push_back(std::make_unique<Held>(from, what, 'f', items));
        return held.back()->data<float>();
    }

    // (data, bias or None, n, k, kind, group, offset, mins, wide), as `pack` returns it
    Matrix matrix(PyObject* from, const char* what, int n, int k) {
        PyObject *data, *bias;
        Matrix w;
        int kind, mins, wide;
        if (!PyTuple_Check(from)) throw Refused(std::string(what) + ": a packed matrix is a tuple");
        if (!PyArg_ParseTuple(from, "OOiiiiipp", &data, &bias, &w.n, &w.k, &kind, &w.group, &w.offset, &mins, &wide)) throw Refused("");
        w.mins = mins;
        w.wide = wide;
        w.kind = Kind(kind);
        if (w.n != n || w.k != k)
            throw Refused(std::string(what) + ": " + std::to_string(n) + " x " + std::to_string(k) + " expected, got " +
                          std::to_string(w.n) + " x " + std::to_string(w.k));
        if (kind < 0 || kind > int(Kind::kBF16) || (kind < 2 && ((w.group != 16 && w.group != 32) || k % w.group)))
            throw Refused(std::string(what) + ": no such kind of matrix");
        held.push_back(std::make_unique<Held>(data, what, 'B', Py_ssize_t(matrix_bytes(w))));
        w.data = held.back()->data<uint8_t>();
        w.bias = floats(bias, what, Py_ssize_t(w.tiles()) * kLanes);
        return w;
    }
};

struct ModelObject {
    PyObject_HEAD
    Owner* owner;
};

using Reference = std::unique_ptr<PyObject, decltype(&Py_DecRef)>;  // an owned one

Reference bytes(Py_ssize_t size) {
    Reference made(PyByteArray_FromStringAndSize(nullptr, size), &Py_DecRef);
    if (!made) throw Refused("");  // with the error set
    return made;
}

template <class T>
T* items(const Reference& bytes) {
    return reinterpret_cast<T*>(PyByteArray_AS_STRING(bytes.get()));
}

template <class Body>
PyObject* guarded(Body body) {
    try {
        return body();
    } catch (const Refused& error) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    } catch (const std::system_error& error) {
        PyErr_SetString(PyExc_OSError, error.what());
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
}

// `body` without the interpreter's lock, alone.
template <class Body>
void run(Owner& own, Body body) {
    std::exception_ptr error;
    Py_BEGIN_ALLOW_THREADS;
    try {
        std::lock_guard<std::mutex> lock(own.mutex);
        body();
    } catch (...) {
        error = std::current_exception();
    }
    Py_END_ALLOW_THREADS;
    if (error) std::rethrow_exception(error);
}

Owner& owner(PyObject* object) { return *reinterpret_cast<ModelObject*>(object)->owner; }

// Model(kernels, threads, shape, embed, head, norm, cos_sin, positions, hidden, slots); OSError: there are not so many threads to be had
PyObject* model_new(PyTypeObject* type, PyObject* args, PyObject*) {
    const char* name;
    int threads, kv, positions, slots;
    Shape s;
    PyObject *embed, *head, *norm, *cos_sin;
    unsigned long long hidden;
    if (!PyArg_ParseTuple(args, "si(iiiiiiffi)OOOOiKi", &name, &threads, &s.hidden, &s.heads, &s.kv_heads, &s.dim, &s.inner, &s.vocab,
                          &s.eps, &s.scale, &kv, &embed, &head, &norm, &cos_sin, &positions, &hidden, &slots))
        return nullptr;
    return guarded([&]() -> PyObject* {
        const Kernels* kernels = *name ? kernels_by_name(name) : best_kernels();
        if (!kernels) throw Refused(std::string("kernels=") + name + ": not on this machine");
        if (kv < 0 || kv > int(KV::kI16)) throw Refused("kv: no such kind");
        if (s.hidden < 1 || s.kv_heads < 1 || s.heads < 1 || s.heads % s.kv_heads || s.dim < 2 || s.dim % 2 || s.inner < 1 || s.vocab < 1 || slots < 1)
            throw Refused("shape: sizes out of range");
        s.kv = KV(kv);
        if (s.kv == KV::kI16 && s.dim > kMostDim) throw Refused("dim=" + std::to_string(s.dim) + ": kv in int16 has heads of 4,096 elements at most");
        auto made = std::make_unique<Owner>();
        made->model = std::make_unique<Model>(Threads::make(threads), kernels, s);
        made->model->embed = made->matrix(embed, "embed", s.vocab, s.hidden);
        made->model->head = made->matrix(head, "head", s.vocab, s.hidden);
        made->model->norm = made->floats(norm, "norm", s.hidden);
        made->model->cos_sin = made->floats(cos_sin, "cos_sin", Py_ssize_t(positions) * s.dim);
        made->model->hidden = reinterpret_cast<float*>(hidden);
        made->positions = positions;
        made->slots = slots;
        made->model->kv_slots = size_t(s.kv == KV::kI16 ? whole_lanes(slots) : slots);
        auto* self = reinterpret_cast<ModelObject*>(type->tp_alloc(type, 0));
        if (self) self->owner = made.release();
        return reinterpret_cast<PyObject*>(self);
    });
}

void model_dealloc(PyObject* object) {
    PyTypeObject* type = Py_TYPE(object);
    delete reinterpret_cast<ModelObject*>(object)->owner;
    type->tp_free(object);
    Py_DECREF(type);
}

// add_layer(input_norm, q, k, v, q_norm, k_norm, o, post_norm, gate, up, down, window, k_cache, v_cache)
PyObject* model_add_layer(PyObject* object, PyObject* args) {
    PyObject *input_norm, *q, *k, *v, *q_norm, *k_norm, *o, *post_norm, *gate, *up, *down;
    unsigned long long k_cache, v_cache;
    int window;
    if (!PyArg_ParseTuple(args, "OOOOOOOOOOOiKK", &input_norm, &q, &k, &v, &q_norm, &k_norm, &o, &post_norm, &gate, &up, &down, &window,
                          &k_cache, &v_cache))
        return nullptr;
    return guarded([&]() -> PyObject* {
        Owner& own = owner(object);
        const Shape& s = own.model->shape;
        LayerWeights layer;
        layer.input_norm = own.floats(input_norm, "input_norm", s.hidden);
        layer.q = own.matrix(q, "q", s.heads * s.dim, s.hidden);
        layer.k = own.matrix(k, "k", s.kv_heads * s.dim, s.hidden);
        layer.v = own.matrix(v, "v", s.kv_heads * s.dim, s.hidden);
        layer.q_norm = own.floats(q_norm, "q_norm", s.dim);
        layer.k_norm = own.floats(k_norm, "k_norm", s.dim);
        layer.o = own.matrix(o, "o", s.hidden, s.heads * s.dim);
        layer.post_norm = own.floats(post_norm, "post_norm", s.hidden);
        layer.gate = own.matrix(gate, "gate", s.inner, s.hidden);
        layer.up = own.matrix(up, "up", s.inner, s.hidden);
        layer.down = own.matrix(down, "down", s.hidden, s.inner);
        layer.window = window;
        layer.k_cache = reinterpret_cast<uint8_t*>(k_cache);
        layer.v_cache = reinterpret_cast<uint8_t*>(v_cache);
        if (!layer.input_norm || !layer.post_norm || window < 0 || !k_cache || !v_cache) throw Refused("a layer is incomplete");
        own.model->layers.push_back(layer);
        Py_RETURN_NONE;
    });
}

void within(const Held& numbers, int low, int high, const char* what) {
    const int32_t* data = numbers.data<int32_t>();
    bool good = true;
    for (int i = 0; i < numbers.size(); i++) good &= data[i] >= low && data[i] < high;
    if (!good) throw Refused(std::string(what) + ": out of range");
}

// forward(tokens, positions, write_slots, q_lens, kv_lens, kv_slots), all int32
PyObject* model_forward(PyObject* object, PyObject* args) {
    PyObject* given[6];
    if (!PyArg_ParseTuple(args, "OOOOOO", &given[0], &given[1], &given[2], &given[3], &given[4], &given[5])) return nullptr;
    return guarded([&]() -> PyObject* {
        Owner& own = owner(object);
        const Held tokens(given[0], "tokens", 'i', -1);
        const Held positions(given[1], "positions", 'i', tokens.size());
        const Held write_slots(given[2], "write_slots", 'i', tokens.size());
        const Held q_lens(given[3], "q_lens", 'i', -1);
        const Held kv_lens(given[4], "kv_lens", 'i', q_lens.size());
        long long rows = 0, keys = 0;
        for (int i = 0; i < q_lens.size(); i++) {
            const int q = q_lens.data<int32_t>()[i], kv = kv_lens.data<int32_t>()[i];
            if (q < 1 || kv < q) throw Refused("q_lens, kv_lens: out of range");
            rows += q;
            keys += kv;
        }
        if (rows != tokens.size()) throw Refused("q_lens: the sum is not the number of tokens");
        const Held kv_slots(given[5], "kv_slots", 'i', Py_ssize_t(keys));
        within(tokens, 0, own.model->shape.vocab, "tokens");
        within(positions, 0, own.positions, "positions");
        within(write_slots, 0, own.slots, "write_slots");
        within(kv_slots, 0, own.slots, "kv_slots");
        if (!rows) Py_RETURN_NONE;
        const Model::Batch batch{tokens.data<int32_t>(), positions.data<int32_t>(), write_slots.data<int32_t>(), q_lens.data<int32_t>(),
                                 kv_lens.data<int32_t>(), kv_slots.data<int32_t>(), int(rows), q_lens.size()};
        run(own, [&] { own.model->forward(batch); });
        Py_RETURN_NONE;
    });
}

// logits(slots, out): out, float32 [len(slots), vocab], is written
PyObject* model_logits(PyObject* object, PyObject* args) {
    PyObject *given, *to;
    if (!PyArg_ParseTuple(args, "OO", &given, &to)) return nullptr;
    return guarded([&]() -> PyObject* {
        Owner& own = owner(object);
        const Held slots(given, "slots", 'i', -1);
        within(slots, 0, own.slots, "slots");
        const Held out(to, "out", 'f', Py_ssize_t(slots.size()) * own.model->shape.vocab, PyBUF_WRITABLE);
        if (slots.size()) run(own, [&] { own.model->logits(slots.data<int32_t>(), slots.size(), const_cast<float*>(out.data<float>())); });
        Py_RETURN_NONE;
    });
}

// draw(slots, masks, wishes) -> (ids, logits): bytearrays of int32 and float32.
// masks: None, or for each slot None or int32 [ceil(vocab / 32)], or longer: a tokenizer may know more tokens
// wishes: None (the likeliest tokens), or (temperature, chance, top_k, top_p, min_p, edit_end, edit_ids, edit_factor, edit_add), see Wishes
PyObject* model_draw(PyObject* object, PyObject* args) {
    PyObject *given, *masks, *wanted;
    if (!PyArg_ParseTuple(args, "OOO", &given, &masks, &wanted)) return nullptr;
    return guarded([&]() -> PyObject* {
        Owner& own = owner(object);
        const int vocab = own.model->shape.vocab;
        const Held slots(given, "slots", 'i', -1);
        within(slots, 0, own.slots, "slots");
        std::vector<std::unique_ptr<Held>> held;
        const auto hold = [&](PyObject* from, const char* what, char format, Py_ssize_t count) -> const Held& {
            held.push_back(std::make_unique<Held>(from, what, format, count));
            return *held.back();
        };
        std::vector<const int32_t*> rows;
        if (masks != Py_None) {
            if (!PyList_Check(masks) || PyList_GET_SIZE(masks) != slots.size()) throw Refused("masks: a list, one for each slot");
            for (int i = 0; i < slots.size(); i++) {
                PyObject* mask = PyList_GET_ITEM(masks, i);
                if (mask == Py_None) {
                    rows.push_back(nullptr);
                    continue;
                }
                const Held& bits = hold(mask, "masks", 'i', -1);
                if (bits.size() < (vocab + 31) / 32) throw Refused("masks: one has fewer bits than there are logits");
                rows.push_back(bits.data<int32_t>());
            }
        }
        Wishes wishes;
        if (!rows.empty()) wishes.masks = rows.data();
        if (wanted != Py_None) {
            PyObject* o[9];
            if (!PyTuple_Check(wanted)) throw Refused("wishes: a tuple");
            if (!PyArg_ParseTuple(wanted, "OOOOOOOOO", &o[0], &o[1], &o[2], &o[3], &o[4], &o[5], &o[6], &o[7], &o[8])) throw Refused("");
            const Py_ssize_t count = slots.size();
            wishes.temperature = hold(o[0], "temperature", 'f', count).data<float>();
            wishes.chance = hold(o[1], "chance", 'd', count).data<double>();
            wishes.top_k = hold(o[2], "top_k", 'i', count).data<int32_t>();
            wishes.top_p = hold(o[3], "top_p", 'f', count).data<float>();
            wishes.min_p = hold(o[4], "min_p", 'f', count).data<float>();
            const Held& end = hold(o[5], "edit_end", 'i', count);
            const Held& ids = hold(o[6], "edit_ids", 'i', -1);
            within(end, 0, ids.size() + 1, "edit_end");
            within(ids, 0, vocab, "edit_ids");
            for (int i = 1; i < end.size(); i++)
                if (end.data<int32_t>()[i] < end.data<int32_t>()[i - 1]) throw Refused("edit_end: does not ascend");
            wishes.edit_end = end.data<int32_t>();
            wishes.edit_ids = ids.data<int32_t>();
            wishes.edit_factor = hold(o[7], "edit_factor", 'f', ids.size()).data<float>();
            wishes.edit_add = hold(o[8], "edit_add", 'f', ids.size()).data<float>();
            if (!ids.size()) wishes.edit_end = nullptr;
        }
        const Py_ssize_t size = Py_ssize_t(slots.size()) * 4;
        const Reference ids = bytes(size), values = bytes(size);
        if (slots.size())
            run(own, [&] { own.model->draw(slots.data<int32_t>(), slots.size(), wishes, items<int32_t>(ids), items<float>(values)); });
        return PyTuple_Pack(2, ids.get(), values.get());
    });
}

PyObject* model_share(PyObject* object, PyObject* on) {
    owner(object).model->share = PyObject_IsTrue(on) == 1;
    Py_RETURN_NONE;
}

PyObject* model_kernels(PyObject* object, PyObject*) { return PyUnicode_FromString(owner(object).model->kernels().name); }

PyMethodDef model_methods[] = {
    {"kernels", model_kernels, METH_NOARGS, "the name of the variant that runs"},
    {"add_layer", model_add_layer, METH_VARARGS, nullptr},
    {"forward", model_forward, METH_VARARGS, nullptr},
    {"logits", model_logits, METH_VARARGS, nullptr},
    {"draw", model_draw, METH_VARARGS, nullptr},
    {"share", model_share, METH_O, "share(on): whether attention reads KV that sequences have in common once"},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot model_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(model_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(model_dealloc)},
    {Py_tp_methods, model_methods},
    {0, nullptr},
};
PyType_Spec model_spec = {"radixrt.ops._native.Model", sizeof(ModelObject), 0, Py_TPFLAGS_DEFAULT, model_slots};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "radixrt.ops._native", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace radixrt

PyMODINIT_FUNC PyInit__native() {
    using namespace radixrt;
    PyObject* self = PyModule_Create(&module);
    if (!self) return nullptr;
    static std::vector<PyMethodDef> methods;  // the module's functions point into it
    if (methods.empty()) {
        methods.assign(std::begin(matmul_methods), std::end(matmul_methods));
        methods.insert(methods.end(), std::begin(attention_methods), std::end(attention_methods));
        methods.push_back({nullptr, nullptr, 0, nullptr});
    }
    PyObject* model = PyType_FromSpec(&model_spec);
    if (!model || PyModule_AddObject(self, "Model", model) < 0 || PyModule_AddFunctions(self, methods.data()) < 0) {
        Py_DECREF(self);
        return nullptr;
    }
    return self;
}
