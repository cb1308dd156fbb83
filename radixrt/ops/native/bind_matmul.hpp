// Python's view of packing and of the row and matmul kernels: for loading, for tests of one variant, and for measuring limits.
#pragma once
#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "kernels.hpp"
#include "limits.hpp"
#include "pack.hpp"

namespace radixrt {
namespace binding {

// A contiguous buffer of items of one size, held while this lives. `ok()` is false with a Python error set.
class Buffer {
public:
    Buffer() = default;
    Buffer(PyObject* from, const char* what, Py_ssize_t item, bool writable = false) { take(from, what, item, writable); }
    Buffer(Buffer&& other) noexcept : view_(other.view_), held_(other.held_) { other.held_ = false; }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() {
        if (held_) PyBuffer_Release(&view_);
    }
    bool ok() const { return held_; }
    Py_ssize_t size() const { return view_.len / item_; }
    Py_ssize_t bytes() const { return view_.len; }
    template <class T>
    T* as() const {
        return static_cast<T*>(view_.buf);
    }
    bool has(Py_ssize_t items, const char* what) const {  // or sets the error
        if (size() == items) return true;
        PyErr_Format(PyExc_ValueError, "%s: %zd items expected, got %zd", what, items, size());
        return false;
    }

private:
    void take(PyObject* from, const char* what, Py_ssize_t item, bool writable) {
        item_ = item;
        if (PyObject_GetBuffer(from, &view_, PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0)) < 0) return;
        held_ = true;
        if (item == 1 || view_.itemsize == item) return;
        PyErr_Format(PyExc_ValueError, "%s: items of %zd bytes expected, got %zd", what, item, view_.itemsize);
        PyBuffer_Release(&view_);
        held_ = false;
    }
    Py_buffer view_{};
    Py_ssize_t item_ = 1;
    bool held_ = false;
};

inline const Kernels* variant(const char* name) {
    const Kernels* k = kernels_by_name(name);
    if (!k) PyErr_Format(PyExc_ValueError, "variant='%s': unknown, or not for this machine", name);
    return k;
}

inline bool known_type(int type, Block& b) {
    if (block_of(Type(type), b)) return true;
    PyErr_Format(PyExc_ValueError, "type=%d: cannot be packed", type);
    return false;
}

inline PyObject* new_bytes(Py_ssize_t size) { return PyByteArray_FromStringAndSize(nullptr, size); }
template <class T>
T* bytes_as(PyObject* o) {
    return reinterpret_cast<T*>(PyByteArray_AS_STRING(o));
}

}  // namespace binding

// pack(type, sources, source, row, k, bias) -> (data, bias, n, k, kind, group, offset, mins, wide)
inline PyObject* pack_matrix(PyObject*, PyObject* args) {
    using namespace binding;
    int type, k;
    PyObject *sources, *source_of, *row_of, *bias;
    if (!PyArg_ParseTuple(args, "iOOOiO", &type, &sources, &source_of, &row_of, &k, &bias)) return nullptr;
    Block b;
    if (!known_type(type, b)) return nullptr;
    if (k <= 0 || k % b.elements) return PyErr_Format(PyExc_ValueError, "k=%d: must be a positive multiple of %d", k, b.elements);
    const Buffer source(source_of, "source", 4), row(row_of, "row", 4);
    if (!source.ok() || !row.ok() || !row.has(source.size(), "row")) return nullptr;
    if (source.size() > (1 << 30)) return PyErr_Format(PyExc_ValueError, "source: too many rows");
    const int n = int(source.size());
    PyObject* list = PySequence_Fast(sources, "sources: must be a sequence of buffers");
    if (!list) return nullptr;
    std::vector<Buffer> from;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(list); i++) {
        from.emplace_back(PySequence_Fast_GET_ITEM(list, i), "sources", 1);
        if (!from.back().ok()) {
            Py_DECREF(list);
            return nullptr;
        }
    }
    Py_DECREF(list);
    const size_t bytes = row_bytes(b, k);
    std::vector<const uint8_t*> rows(n);
    for (int j = 0; j < n; j++) {
        const int s = source.as<int32_t>()[j], r = row.as<int32_t>()[j];
        if (s < 0 || size_t(s) >= from.size())
            return PyErr_Format(PyExc_ValueError, "source[%d]=%d: there are %zu sources", j, s, from.size());
        if (r < 0 || size_t(r) >= size_t(from[s].bytes()) / bytes)
            return PyErr_Format(PyExc_ValueError, "row[%d]=%d: source %d has %zu rows", j, r, s, size_t(from[s].bytes()) / bytes);
        rows[j] = from[s].as<uint8_t>() + r * bytes;
    }
    const Matrix w = matrix_of(b, n, k);
    if (bias != Py_None) {
        const Buffer values(bias, "bias", 4);
        if (!values.ok() || !values.has(Py_ssize_t(w.tiles()) * kLanes, "bias")) return nullptr;
    }
    PyObject* data = new_bytes(Py_ssize_t(matrix_bytes(w)));
    if (!data) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    pack(Type(type), rows.data(), n, k, bytes_as<uint8_t>(data));
    Py_END_ALLOW_THREADS;
    return Py_BuildValue("(NOiiiiiOO)", data, bias, n, k, int(w.kind), w.group, w.offset, w.mins ? Py_True : Py_False,
                         w.wide ? Py_True : Py_False);
}

inline PyObject* variants(PyObject*, PyObject*) {
    PyObject* list = PyList_New(0);
    for (const char* name : {"avx512", "avxvnni", "avx2", "neon", "portable"})
        if (list && kernels_by_name(name)) {
            PyObject* text = PyUnicode_FromString(name);
            if (!text || PyList_Append(list, text) < 0) Py_CLEAR(list);
            Py_XDECREF(text);
        }
    return list;
}

// quantize(variant, x, group) -> (codes, scale, weight, sum)
inline PyObject* quantize_rows(PyObject*, PyObject* args) {
    using namespace binding;
    const char* name;
    PyObject* object;
    int group;
    if (!PyArg_ParseTuple(args, "sOi", &name, &object, &group)) return nullptr;
    const Kernels* kernels = variant(name);
    if (!kernels) return nullptr;
    const Buffer x(object, "x", 4);
    if (!x.ok()) return nullptr;
    if (group != 16 && group != 32) return PyErr_Format(PyExc_ValueError, "group=%d: must be 16 or 32", group);
    if (x.size() % group || x.size() > INT32_MAX)
        return PyErr_Format(PyExc_ValueError, "x: %zd items are not groups of %d", x.size(), group);
    const Py_ssize_t n = x.size(), m = n / group;
    PyObject *codes = new_bytes(n), *scale = new_bytes(4 * m), *weight = new_bytes(4 * m), *sum = new_bytes(4 * m);
    if (!codes || !scale || !weight || !sum) {
        Py_XDECREF(codes), Py_XDECREF(scale), Py_XDECREF(weight), Py_XDECREF(sum);
        return nullptr;
    }
    kernels->quantize(x.as<float>(), int(n), group, bytes_as<int8_t>(codes), bytes_as<float>(scale), bytes_as<float>(weight),
                      bytes_as<int32_t>(sum));
    return Py_BuildValue("(NNNN)", codes, scale, weight, sum);
}

// matmul(variant, packed, x, out, add, begin, end): out [rows, n] in place, in the tiles begin .. end
inline PyObject* matmul_rows(PyObject*, PyObject* args) {
    using namespace binding;
    const char* name;
    PyObject *packed, *x_object, *out_object, *data_object, *bias_object;
    int add, begin, end, kind, mins, wide;
    Matrix w;
    if (!PyArg_ParseTuple(args, "sO!OOpii", &name, &PyTuple_Type, &packed, &x_object, &out_object, &add, &begin, &end)) return nullptr;
    if (!PyArg_ParseTuple(packed, "OOiiiiipp", &data_object, &bias_object, &w.n, &w.k, &kind, &w.group, &w.offset, &mins, &wide))
        return nullptr;
    const Kernels* kernels = variant(name);
    if (!kernels) return nullptr;
    w.kind = Kind(kind), w.mins = mins, w.wide = wide;
    const bool quantized = kind < int(Kind::kF32);
    if (kind < 0 || kind > int(Kind::kBF16) || w.n <= 0 || w.k <= 0 || (w.group != 16 && w.group != 32) || (quantized && w.k % w.group))
        return PyErr_Format(PyExc_ValueError, "packed: no such kind of matrix");
    const Buffer data(data_object, "data", 1), x(x_object, "x", 4), out(out_object, "out", 4, true);
    if (!data.ok() || !data.has(Py_ssize_t(matrix_bytes(w)), "data") || !x.ok() || !out.ok()) return nullptr;
    w.data = data.as<uint8_t>();
    std::unique_ptr<Buffer> held;
    if (bias_object != Py_None) {
        held = std::make_unique<Buffer>(bias_object, "bias", 4);
        if (!held->ok() || !held->has(Py_ssize_t(w.tiles()) * kLanes, "bias")) return nullptr;
        w.bias = held->as<float>();
    }
    if (x.size() % w.k || x.size() / w.k > INT32_MAX)
        return PyErr_Format(PyExc_ValueError, "x: %zd items are not rows of %d", x.size(), w.k);
    Rows rows;
    rows.rows = int(x.size() / w.k), rows.k = w.k, rows.x = x.as<float>();
    if (!out.has(Py_ssize_t(rows.rows) * w.n, "out")) return nullptr;
    if (begin < 0 || end < begin || end > w.tiles())
        return PyErr_Format(PyExc_ValueError, "begin=%d, end=%d: must be tiles 0 .. %d", begin, end, w.tiles());
    Py_BEGIN_ALLOW_THREADS;
    const size_t count = quantized ? size_t(rows.rows) * w.k : 0, groups = count / w.group;
    std::vector<int8_t> codes(count);
    std::vector<float> scale(groups), weight(groups);
    std::vector<int32_t> sum(groups);
    if (quantized)
        for (int r = 0; r < rows.rows; r++) {
            const size_t g = size_t(r) * (w.k / w.group);
            kernels->quantize(rows.x + size_t(r) * w.k, w.k, w.group, codes.data() + size_t(r) * w.k, scale.data() + g, weight.data() + g,
                              sum.data() + g);
        }
    rows.codes = codes.data(), rows.scale = scale.data(), rows.weight = weight.data(), rows.sum = sum.data();
    kernels->matmul(w, begin, end, rows, out.as<float>(), size_t(w.n), add, nullptr);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

// rms_norm(variant, x, weight, eps) -> floats
inline PyObject* rms_norm_row(PyObject*, PyObject* args) {
    using namespace binding;
    const char* name;
    PyObject *x_object, *weight_object;
    float eps;
    if (!PyArg_ParseTuple(args, "sOOf", &name, &x_object, &weight_object, &eps)) return nullptr;
    const Kernels* kernels = variant(name);
    if (!kernels) return nullptr;
    const Buffer x(x_object, "x", 4), weight(weight_object, "weight", 4);
    if (!x.ok() || !weight.ok() || !weight.has(x.size(), "weight")) return nullptr;
    PyObject* out = new_bytes(x.bytes());
    if (out) kernels->rms_norm(x.as<float>(), weight.as<float>(), eps, int(x.size()), bytes_as<float>(out));
    return out;
}

// rope(variant, head, cos, sin): in place
inline PyObject* rope_head(PyObject*, PyObject* args) {
    using namespace binding;
    const char* name;
    PyObject *head_object, *cos_object, *sin_object;
    if (!PyArg_ParseTuple(args, "sOOO", &name, &head_object, &cos_object, &sin_object)) return nullptr;
    const Kernels* kernels = variant(name);
    if (!kernels) return nullptr;
    const Buffer head(head_object, "head", 4, true), cos(cos_object, "cos", 4), sin(sin_object, "sin", 4);
    if (!head.ok() || !cos.ok() || !sin.ok() || !sin.has(cos.size(), "sin") || !head.has(2 * cos.size(), "head")) return nullptr;
    kernels->rope(head.as<float>(), cos.as<float>(), sin.as<float>(), int(cos.size()));
    Py_RETURN_NONE;
}

// silu_mul(variant, gate, up) -> floats
inline PyObject* silu_mul_row(PyObject*, PyObject* args) {
    using namespace binding;
    const char* name;
    PyObject *gate_object, *up_object;
    if (!PyArg_ParseTuple(args, "sOO", &name, &gate_object, &up_object)) return nullptr;
    const Kernels* kernels = variant(name);
    if (!kernels) return nullptr;
    const Buffer gate(gate_object, "gate", 4), up(up_object, "up", 4);
    if (!gate.ok() || !up.ok() || !up.has(gate.size(), "up")) return nullptr;
    PyObject* out = new_bytes(gate.bytes());
    if (out) kernels->silu_mul(gate.as<float>(), up.as<float>(), int(gate.size()), bytes_as<float>(out));
    return out;
}

// store_kv(variant, x, kind) -> what a KV slot would hold
inline PyObject* store_kv_row(PyObject*, PyObject* args) {
    using namespace binding;
    const char* name;
    PyObject* object;
    int kind;
    if (!PyArg_ParseTuple(args, "sOi", &name, &object, &kind)) return nullptr;
    const Kernels* kernels = variant(name);
    if (!kernels) return nullptr;
    if (kind < 0 || kind > int(KV::kI8))
        return PyErr_Format(PyExc_ValueError, "kind=%d: must be 0 (float32), 1 (float16), 2 (bfloat16) or 3 (int8)", kind);
    const Buffer x(object, "x", 4);
    if (!x.ok()) return nullptr;
    PyObject* out = new_bytes(kv_bytes(KV(kind), int(x.size())));
    if (out) kernels->store_kv(x.as<float>(), int(x.size()), KV(kind), bytes_as<void>(out));
    return out;
}

// store_tiles(variant, x, dim, key) -> what the tiles hold once the rows of x are in their slots
inline PyObject* store_tiles(PyObject*, PyObject* args) {
    using namespace binding;
    const char* name;
    PyObject* object;
    int dim, key;
    if (!PyArg_ParseTuple(args, "sOip", &name, &object, &dim, &key)) return nullptr;
    const Kernels* kernels = variant(name);
    if (!kernels) return nullptr;
    const Buffer x(object, "x", 4);
    if (!x.ok()) return nullptr;
    if (dim < 1 || dim > kMostDim || x.size() % (dim * kLanes))
        return PyErr_Format(PyExc_ValueError, "x: %zd items are not a multiple of 16 rows of dim=%d, 1 .. %d", x.size(), dim, kMostDim);
    const size_t rows = size_t(x.size() / dim);
    PyObject* out = new_bytes(rows * kv_bytes(KV::kI16, dim));
    if (!out) return nullptr;
    for (size_t row = 0; row < rows; row++) kernels->store_tile(x.as<float>() + row * size_t(dim), dim, key != 0, bytes_as<void>(out), row);
    return out;
}

// peaks(buffer) -> {"variant": name, "int8", "int16": ops a second, "float32": ops a second, "read": bytes a second} of this thread
inline PyObject* peaks(PyObject*, PyObject* args) {
    using namespace binding;
    PyObject* object;
    if (!PyArg_ParseTuple(args, "O", &object)) return nullptr;
    const Buffer memory(object, "buffer", 1);
    if (!memory.ok()) return nullptr;
    const size_t bytes = size_t(memory.bytes()) / 4096 * 4096;
    if (bytes < 16384) return PyErr_Format(PyExc_ValueError, "buffer: %zd bytes are too few to measure reading", memory.bytes());
    const Limits* limits = best_limits();
    double dots = 0, pairs = 0, fmas = 0, read = 0;
    Py_BEGIN_ALLOW_THREADS;
    const auto rate = [](auto&& work) {  // the best of several
        double best = 0;
        for (int i = 0; i < 7; i++) {
            const auto start = std::chrono::steady_clock::now();
            const double done = double(work());
            best = std::max(best, done / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
        }
        return best;
    };
    alignas(64) static const float x[64] = {};
    const auto* raw = reinterpret_cast<const uint8_t*>(x);
    dots = rate([&] { return limits->dots(1 << 20, raw, reinterpret_cast<const int8_t*>(x)); });
    pairs = rate([&] { return limits->pairs(1 << 20, raw, reinterpret_cast<const int16_t*>(x)); });
    fmas = rate([&] { return limits->fmas(1 << 20, x); });
    int32_t sink = 0;
    read = rate([&] {
        limits->read(memory.as<uint8_t>(), bytes - 8192, &sink);
        return bytes - 8192;
    });
    Py_END_ALLOW_THREADS;
    return Py_BuildValue("{s:s,s:d,s:d,s:d,s:d}", "variant", limits->name, "int8", dots, "int16", pairs, "float32", fmas, "read", read);
}

// read(buffer): reads it once, for measuring
inline PyObject* read_buffer(PyObject*, PyObject* args) {
    using namespace binding;
    PyObject* object;
    if (!PyArg_ParseTuple(args, "O", &object)) return nullptr;
    const Buffer memory(object, "buffer", 1);
    if (!memory.ok()) return nullptr;
    const Limits* limits = best_limits();
    int32_t sink = 0;
    Py_BEGIN_ALLOW_THREADS;
    limits->read(memory.as<uint8_t>(), size_t(memory.bytes()) / 4096 * 4096, &sink);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyMethodDef matmul_methods[] = {
    {"read", read_buffer, METH_VARARGS, "read(buffer): reads its whole pages once, for measuring"},
    {"pack", pack_matrix, METH_VARARGS,
     "pack(type, sources, source, row, k, bias) -> (data, bias, n, k, kind, group, offset, mins, wide)\n\n"
     "Output j of the matrix is row row[j] of the buffer sources[source[j]], whose rows are k elements of the GGUF type; "
     "bias: float32, n rounded up to 16, or None."},
    {"variants", variants, METH_NOARGS, "variants(): the names of the kernels that this machine runs, best first"},
    {"quantize", quantize_rows, METH_VARARGS, "quantize(variant, x, group) -> (codes, scale, weight, sum)"},
    {"matmul", matmul_rows, METH_VARARGS,
     "matmul(variant, packed, x, out, add, begin, end): out [rows, n] in the tiles begin .. end, in place"},
    {"rms_norm", rms_norm_row, METH_VARARGS, "rms_norm(variant, x, weight, eps) -> float32 bytes"},
    {"rope", rope_head, METH_VARARGS, "rope(variant, head, cos, sin): in place"},
    {"silu_mul", silu_mul_row, METH_VARARGS, "silu_mul(variant, gate, up) -> float32 bytes"},
    {"store_kv", store_kv_row, METH_VARARGS, "store_kv(variant, x, kind) -> bytes"},
    {"store_tiles", store_tiles, METH_VARARGS, "store_tiles(variant, x, dim, key) -> bytes: int16 tiles of 16 slots each"},
    {"peaks", peaks, METH_VARARGS, "peaks(buffer) -> what one thread reaches: int8, int16 and float32 operations, bytes read of buffer, a second"},
};

}  // namespace radixrt
