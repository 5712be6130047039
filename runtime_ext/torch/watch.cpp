#include "watch.h"

#include <c10/util/python_stub.h>

#include <algorithm>
#include <cstddef>
#include <utility>

// Of Python's stable interface, declared here: its headers need not be installed. Callers hold the GIL.
extern "C" {
PyObject* PyObject_GenericGetDict(PyObject* object, void* context);
void Py_DecRef(PyObject* object);
PyObject* PyDict_GetItemWithError(PyObject* dict, PyObject* key);
int PyDict_Next(PyObject* dict, std::ptrdiff_t* position, PyObject** key, PyObject** value);
PyObject* PyList_GetItem(PyObject* list, std::ptrdiff_t index);
std::ptrdiff_t PyList_Size(PyObject* list);

// Whether each of `objects` has, in its own __dict__, under each of `names` the very object that stands in
// `values`, object by object; `absent` stands for none. All are lists. -1: a Python error is set.
int disco_same_attributes(PyObject* objects, PyObject* names, PyObject* values, PyObject* absent) {
  const std::ptrdiff_t count = PyList_Size(objects);
  const std::ptrdiff_t width = PyList_Size(names);
  if (PyList_Size(values) != count * width) return 0;
  for (std::ptrdiff_t i = 0; i < count; ++i) {
    PyObject* dict = PyObject_GenericGetDict(PyList_GetItem(objects, i), nullptr);
    if (dict == nullptr) return -1;
    bool same = true;
    for (std::ptrdiff_t j = 0; j < width && same; ++j) {
      PyObject* found = PyDict_GetItemWithError(dict, PyList_GetItem(names, j));
      same = (found == nullptr ? absent : found) == PyList_GetItem(values, i * width + j);
    }
    Py_DecRef(dict);
    if (!same) return 0;
  }
  return 1;
}

// Whether the dicts of the list `dicts` hold the very keys and values of the list `entries`, each key before
// its value.
int disco_same_entries(PyObject* dicts, PyObject* entries) {
  const std::ptrdiff_t count = PyList_Size(dicts);
  const std::ptrdiff_t expected = PyList_Size(entries);
  std::ptrdiff_t seen = 0;
  for (std::ptrdiff_t i = 0; i < count; ++i) {
    PyObject* dict = PyList_GetItem(dicts, i);
    PyObject *key = nullptr, *value = nullptr;
    for (std::ptrdiff_t position = 0; PyDict_Next(dict, &position, &key, &value) != 0; seen += 2) {
      if (seen + 2 > expected) return 0;
      if (PyList_GetItem(entries, seen) != key || PyList_GetItem(entries, seen + 1) != value) return 0;
    }
  }
  return seen == expected ? 1 : 0;
}
}

extern "C" {
int disco_same_layouts(std::int64_t watched) {
  return static_cast<int>(reinterpret_cast<const disco::WatchedLayouts*>(watched)->same());
}

// Whether none of `count` integers of `width` bytes each is zero.
int disco_no_zero(std::int64_t data, std::int64_t count, std::int64_t width) {
  const auto* bytes = reinterpret_cast<const char*>(data);
  for (const char* end = bytes + count * width; bytes != end; bytes += width) {
    if (std::all_of(bytes, bytes + width, [](char byte) { return byte == 0; })) return 0;
  }
  return 1;
}
}

namespace disco {
namespace {

std::int64_t kind(const at::Tensor& tensor) {
  const auto dtype = static_cast<std::int64_t>(tensor.scalar_type());
  return (dtype << 1 | static_cast<std::int64_t>(tensor.requires_grad())) << 32 | tensor.dim();
}

}  // namespace

WatchedLayouts::WatchedLayouts(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {
  for (const at::Tensor& tensor : tensors_) {
    seen_.push_back(kind(tensor));
    seen_.insert(seen_.end(), tensor.sizes().begin(), tensor.sizes().end());
  }
}

bool WatchedLayouts::same() const {
  auto at = seen_.begin();
  for (const at::Tensor& tensor : tensors_) {
    // Equal kinds have as many dimensions.
    if (*at++ != kind(tensor)) return false;
    if (!std::equal(tensor.sizes().begin(), tensor.sizes().end(), at)) return false;
    at += tensor.dim();
  }
  return true;
}

}  // namespace disco
