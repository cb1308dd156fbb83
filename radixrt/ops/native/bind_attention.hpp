// Python's view of attention, for the tests: one layer over one batch, its items in any order on any number of threads.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <new>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "attention.hpp"

namespace radixrt::attention_binding {

struct Buffer {
    Py_buffer view{};
    ~Buffer() {
        if (view.obj) PyBuffer_Release(&view);
    }
    template <class T>
    T* as() const { return static_cast<T*>(view.buf); }
    template <class T>
    size_t count() const { return size_t(view.len) / sizeof(T); }
};

static PyObject* refuse(const char* problem) {
    PyErr_SetString(PyExc_ValueError, problem);
    return nullptr;
}

// What is wrong with a batch, or null.
static const char* wrong(const Buffer& q_lens, const Buffer& kv_lens, const Buffer& kv_slots, size_t slots, size_t& rows) {
    if (q_lens.view.len % 4 || kv_lens.view.len % 4 || kv_slots.view.len % 4) return "q_lens, kv_lens, kv_slots: must be int32";
    if (q_lens.view.len != kv_lens.view.len) return "kv_lens: must have as many elements as q_lens";
    size_t keys = 0;
    rows = 0;
    for (size_t i = 0; i < q_lens.count<int32_t>(); i++) {
        const int32_t q = q_lens.as<int32_t>()[i], kv = kv_lens.as<int32_t>()[i];
        if (q < 0 || kv < q) return "q_lens: 0 <= q_lens[i] <= kv_lens[i] must hold";
        rows += size_t(q), keys += size_t(kv);
    }
    if (keys != kv_slots.count<int32_t>()) return "kv_slots: must have sum(kv_lens) elements";
    for (size_t i = 0; i < keys; i++)
        if (kv_slots.as<int32_t>()[i] < 0 || size_t(kv_slots.as<int32_t>()[i]) >= slots) return "kv_slots: a slot outside of k and v";
    return nullptr;
}

static void run(Attention& plan, const std::vector<int>& order, int threads, const Kernels& kernels, int dim, const float* q, const void* k,
                const void* v, size_t slots, KV kind, float scale, float* out) {
    std::atomic<size_t> next{0};
    std::vector<std::vector<float>> scratch(size_t(threads), std::vector<float>(Attention::scratch_floats(dim), NAN));
    const auto work = [&](float* own) {
        for (size_t i; (i = next.fetch_add(1)) < order.size();) plan.run(order[i], kernels, q, k, v, slots, kind, scale, out, own, [](int, int, int) {});
    };
    plan.begin();
    std::vector<std::thread> others;
    for (int t = 1; t < threads; t++) others.emplace_back(work, scratch[size_t(t)].data());
    work(scratch[0].data());
    for (auto& thread : others) thread.join();
}

static PyObject* attention(PyObject*, PyObject* args) {
    const char* variant;
    Buffer q, k, v, q_lens, kv_lens, kv_slots, out;
    int kind, heads, kv_heads, dim, window, threads, share, seed;
    float scale;
    Py_ssize_t most_parts;
    if (!PyArg_ParseTuple(args, "sy*y*y*iy*y*y*iiiifw*ipin", &variant, &q.view, &k.view, &v.view, &kind, &q_lens.view, &kv_lens.view,
                          &kv_slots.view, &heads, &kv_heads, &dim, &window, &scale, &out.view, &threads, &share, &seed, &most_parts))
        return nullptr;
    const Kernels* kernels = kernels_by_name(variant);
    if (!kernels) return PyErr_Format(PyExc_ValueError, "variant=%s: unknown, or not for this machine", variant);
    if (kind < 0 || kind > int(KV::kI16)) return refuse("kind: must be 0 (float32), 1 (float16), 2 (bfloat16), 3 (int8) or 4 (int16)");
    if (heads < 1 || kv_heads < 1 || heads % kv_heads) return refuse("heads: must be a multiple of kv_heads, both at least 1");
    if (dim < 1 || dim > kMostDim) return refuse("dim: must be 1 .. 4096");
    if (window < 0) return refuse("window: must be at least 1, or 0 for none");
    if (threads < 1 || threads > 64) return refuse("threads: must be 1 .. 64");
    if (most_parts < 0) return refuse("most_parts: must be at least 0");
    const size_t slot = size_t(kv_heads) * kv_bytes(KV(kind), dim), slots = size_t(k.view.len) / slot;
    if (size_t(k.view.len) % slot) return refuse("k: must be [kv_heads, slots, dim] of the kind, for int8 [kv_heads, slots, dim + 4], for int16 tiles of 16 slots");
    if (KV(kind) == KV::kI16 && slots % kLanes) return refuse("k: int16 needs a multiple of 16 slots");
    if (k.view.len != v.view.len) return refuse("v: must be as large as k");
    size_t rows;
    if (const char* problem = wrong(q_lens, kv_lens, kv_slots, slots, rows)) return refuse(problem);
    if (size_t(q.view.len) != rows * size_t(heads) * size_t(dim) * 4) return refuse("q: must be float32 [sum(q_lens), heads, dim]");
    if (out.view.len != q.view.len) return refuse("out: must be as large as q");
    int items = 0, pieces = 0;
    bool memory = true;
    Py_BEGIN_ALLOW_THREADS
    try {
        Attention::Arena arena;
        Attention plan(q_lens.as<int32_t>(), kv_lens.as<int32_t>(), kv_slots.as<int32_t>(), int(q_lens.count<int32_t>()), heads, kv_heads, dim,
                       window, threads, share != 0, arena, size_t(most_parts));
        items = plan.items(), pieces = plan.pieces();
        std::vector<int> order(static_cast<size_t>(items));
        std::iota(order.begin(), order.end(), 0);
        if (seed) std::shuffle(order.begin(), order.end(), std::mt19937(unsigned(seed)));
        std::vector<float> coded;
        const float* queries = q.as<float>();
        if (KV(kind) == KV::kI16) {
            const size_t each = query_floats(KV::kI16, dim), all = rows * size_t(heads);
            coded.resize(all * each);
            for (size_t i = 0; i < all; i++) kernels->store_query(queries + i * size_t(dim), dim, coded.data() + i * each);
            queries = coded.data();
        }
        run(plan, order, threads, *kernels, dim, queries, k.as<void>(), v.as<void>(), slots, KV(kind), scale, out.as<float>());
    } catch (const std::bad_alloc&) {
        memory = false;
    }
    Py_END_ALLOW_THREADS
    if (!memory) return PyErr_NoMemory();
    return Py_BuildValue("ii", items, pieces);
}

}  // namespace radixrt::attention_binding

static PyMethodDef attention_methods[] = {
    {"attention", radixrt::attention_binding::attention, METH_VARARGS,
     "attention(variant, q, k, v, kind, q_lens, kv_lens, kv_slots, heads, kv_heads, dim, window, scale, out, threads, share, seed, most_parts)\n\n"
     "One layer's attention into out; returns the numbers of items and of pieces of KV that are read. seed: of the items' order, 0: as they are."},
};
