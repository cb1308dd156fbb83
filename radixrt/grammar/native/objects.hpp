// The Python objects of the native module and what guards them.
//
// Locks: each automaton has one mutex. Nobody waits for a mutex while holding the GIL, so a holder may wait for the GIL.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <memory>
#include <mutex>

#include "automaton.hpp"

namespace radixrt {
namespace {

PyObject* too_large = nullptr;  // the exception type; set once, when the module is made

struct VocabularyObject {
    PyObject_HEAD
    std::shared_ptr<Vocabulary> core;
};

struct MatcherObject;

struct AutomatonObject {
    PyObject_HEAD
    std::unique_ptr<Automaton> core;
    std::unique_ptr<std::mutex> mutex;
    std::vector<MatcherObject*>* matchers;
    PyObject* vocabulary;
};

constexpr i32 FINISHED = -1;

struct MatcherObject {
    PyObject_HEAD
    AutomatonObject* owner;
    std::vector<i32>* states;  // the start, then one after each token; FINISHED after an end token
};

PyTypeObject* vocabulary_type = nullptr;
PyTypeObject* automaton_type = nullptr;
PyTypeObject* matcher_type = nullptr;

class Lock {
  public:
    explicit Lock(AutomatonObject* a) : mutex_(*a->mutex) {
        if (!mutex_.try_lock()) {
            Py_BEGIN_ALLOW_THREADS
            mutex_.lock();
            Py_END_ALLOW_THREADS
        }
    }
    ~Lock() { mutex_.unlock(); }

  private:
    std::mutex& mutex_;
};

// Runs work under the automaton's mutex, without the GIL if it may take long; C++ exceptions become Python's. True: it worked.
template <class Work>
bool guarded(bool is_long, Work&& work) {
    PyThreadState* released = is_long ? PyEval_SaveThread() : nullptr;
    std::string problem;
    int failed = 0;
    try {
        work();
    } catch (const TooLarge& e) {
        failed = 1;
        problem = e.what();
    } catch (const std::bad_alloc&) {
        failed = 2;
    } catch (const std::exception& e) {
        failed = 3;
        problem = e.what();
    }
    if (released) PyEval_RestoreThread(released);
    if (failed == 1) PyErr_SetString(too_large, problem.c_str());
    if (failed == 2) PyErr_NoMemory();
    if (failed == 3) PyErr_SetString(PyExc_RuntimeError, problem.c_str());
    return failed == 0;
}

template <class Object>
Object* allocate(PyTypeObject* type) {
    return reinterpret_cast<Object*>(type->tp_alloc(type, 0));
}

}  // namespace
}  // namespace radixrt
