// Python containers compared with an earlier look at them, by identity, and a log of the code that a thread
// runs.

#include <c10/util/python_stub.h>
#include <torch/csrc/autograd/function.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_set>
#include <vector>

// Of Python's C interface, declared here: its headers need not be installed. Callers hold the GIL.
extern "C" {
void Py_IncRef(PyObject* object);
void Py_DecRef(PyObject* object);
void PyErr_Clear();
PyObject* PyObject_GenericGetDict(PyObject* object, void* context);
int PyObject_RichCompareBool(PyObject* left, PyObject* right, int operation);
PyObject* PyDict_GetItemWithError(PyObject* dict, PyObject* key);
int PyDict_Next(PyObject* dict, std::ptrdiff_t* position, PyObject** key, PyObject** value);
PyObject* PyList_GetItem(PyObject* list, std::ptrdiff_t index);
std::ptrdiff_t PyList_Size(PyObject* list);
int PyList_Append(PyObject* list, PyObject* item);
PyObject* PyBool_FromLong(long value);
PyObject* PyCell_Get(PyObject* cell);
PyObject* PyFrame_GetCode(PyObject* frame);
PyObject* PyFrame_GetGlobals(PyObject* frame);
void PyEval_SetProfile(int (*function)(PyObject*, PyObject*, int, PyObject*), PyObject* argument);
}

namespace {

// As in native/change_watch.py.
enum class Kind : std::int64_t {
  kAttributes = 0,  // an object's own __dict__: keys and values in order
  kDict = 1,        // keys and values in order
  kList = 2,        // items
  kCell = 3,        // what a closure's cell holds
  kNames = 4,       // some names of a dict: name and value in turn
  kEqual = 5,       // anything with ==: one copy
};

// An owner and what it held. The references are borrowed: Python's collector could not see through owned
// ones, and a model that is watched from itself would live for ever. Whoever sets a container keeps owner and
// contents alive.
struct Container {
  Kind kind;
  PyObject* owner;
  std::vector<PyObject*> expected;
};

struct Watch {
  PyObject* anything;  // stands for a value that does not matter
  PyObject* absent;    // stands for a value that is not there
  std::vector<Container> containers;

  bool fits(PyObject* expected, PyObject* value) const {
    return expected == value || expected == anything || (value == nullptr && expected == absent);
  }

  bool same_dict(PyObject* dict, const std::vector<PyObject*>& expected) const {
    PyObject *key = nullptr, *value = nullptr;
    std::size_t seen = 0;
    for (std::ptrdiff_t position = 0; PyDict_Next(dict, &position, &key, &value) != 0; seen += 2) {
      if (seen + 2 > expected.size() || expected[seen] != key || !fits(expected[seen + 1], value))
        return false;
    }
    return seen == expected.size();
  }

  bool same_list(PyObject* list, const std::vector<PyObject*>& expected) const {
    if (PyList_Size(list) != static_cast<std::ptrdiff_t>(expected.size())) return false;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      if (!fits(expected[i], PyList_GetItem(list, static_cast<std::ptrdiff_t>(i)))) return false;
    }
    return true;
  }

  bool same_names(PyObject* dict, const std::vector<PyObject*>& expected) const {
    for (std::size_t i = 0; i < expected.size(); i += 2) {
      if (!fits(expected[i + 1], PyDict_GetItemWithError(dict, expected[i]))) return false;
    }
    return true;
  }

  bool same(const Container& container) const {
    switch (container.kind) {
      case Kind::kAttributes: {
        PyObject* dict = PyObject_GenericGetDict(container.owner, nullptr);
        if (dict == nullptr) break;
        const bool result = same_dict(dict, container.expected);
        Py_DecRef(dict);
        return result;
      }
      case Kind::kDict:
        return same_dict(container.owner, container.expected);
      case Kind::kList:
        return same_list(container.owner, container.expected);
      case Kind::kCell: {
        PyObject* value = PyCell_Get(container.owner);
        const bool result = fits(container.expected[0], value);
        if (value != nullptr) Py_DecRef(value);
        return result;
      }
      case Kind::kNames:
        return same_names(container.owner, container.expected);
      case Kind::kEqual: {
        constexpr int kEq = 2;
        const int equal = PyObject_RichCompareBool(container.owner, container.expected[0], kEq);
        if (equal < 0) break;
        return equal == 1;
      }
    }
    // What cannot be compared has changed; the caller's second look says how.
    PyErr_Clear();
    return false;
  }
};

Watch& watch_at(std::int64_t address) { return *reinterpret_cast<Watch*>(address); }

struct CodeLog {
  std::array<std::unordered_set<PyObject*>, 2> seen;  // outside of backwards, and in them
  PyObject* entries = nullptr;
  bool collecting = false;
};

thread_local CodeLog code_log;

int note_call(PyObject* /*argument*/, PyObject* frame, int what, PyObject* /*value*/) {
  constexpr int kCall = 0;
  if (what != kCall || code_log.entries == nullptr || code_log.collecting) return 0;
  PyObject* code = PyFrame_GetCode(frame);
  int failed = 0;
  // The list keeps each code alive, so that no two can have the same address.
  const bool in_backward = static_cast<bool>(torch::autograd::get_current_node());
  if (code_log.seen[in_backward ? 1 : 0].insert(code).second) {
    PyObject* globals = PyFrame_GetGlobals(frame);
    PyObject* backward = PyBool_FromLong(in_backward ? 1 : 0);
    for (PyObject* item : {code, globals, backward}) failed |= PyList_Append(code_log.entries, item);
    Py_DecRef(backward);
    Py_DecRef(globals);
  }
  Py_DecRef(code);
  return failed;
}

}  // namespace

extern "C" {
std::int64_t disco_watch_new(PyObject* anything, PyObject* absent) {
  return reinterpret_cast<std::int64_t>(new Watch{anything, absent, {}});
}

void disco_watch_free(std::int64_t address) { delete &watch_at(address); }

// Container `index`, or one more at the end, is `owner`, which holds `expected`, a list.
void disco_watch_set(std::int64_t address, std::int64_t index, std::int64_t kind, PyObject* owner,
                     PyObject* expected) {
  Watch& watch = watch_at(address);
  Container container{static_cast<Kind>(kind), owner, {}};
  const std::ptrdiff_t count = PyList_Size(expected);
  container.expected.reserve(static_cast<std::size_t>(count));
  for (std::ptrdiff_t i = 0; i < count; ++i) {
    container.expected.push_back(PyList_GetItem(expected, i));
  }
  const auto place = static_cast<std::size_t>(index);
  if (place == watch.containers.size()) {
    watch.containers.push_back(std::move(container));
  } else {
    watch.containers[place] = std::move(container);
  }
}

// The first container from `start` on that holds something else now; -1 if none does.
std::int64_t disco_watch_first_change(std::int64_t address, std::int64_t start) {
  const Watch& watch = watch_at(address);
  for (std::size_t i = static_cast<std::size_t>(start); i < watch.containers.size(); ++i) {
    if (!watch.same(watch.containers[i])) return static_cast<std::int64_t>(i);
  }
  return -1;
}

// Append to the list `entries` each code that this thread begins to run from now on, its globals, and whether
// autograd runs a backward: once for either.
void disco_code_log_start(PyObject* entries) {
  Py_IncRef(entries);
  code_log.entries = entries;
  for (auto& seen : code_log.seen) seen.clear();
  PyEval_SetProfile(note_call, nullptr);
}

// Whether this thread collects garbage now: what collections run, finalizers above all, is no code of the
// thread's.
void disco_code_log_collecting(int collecting) { code_log.collecting = collecting != 0; }

void disco_code_log_stop() {
  PyEval_SetProfile(nullptr, nullptr);
  if (code_log.entries != nullptr) Py_DecRef(code_log.entries);
  code_log.entries = nullptr;
  for (auto& seen : code_log.seen) seen.clear();
}
}
