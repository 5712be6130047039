#include "library.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>

#include <cstring>

namespace disco::interpose {

#define DISCO_TEXT(name, ...) #name,
static constexpr const char* kNames[] = {DISCO_RUNTIME_CALLS(DISCO_TEXT) DISCO_DRIVER_CALLS(DISCO_TEXT)
                                             DISCO_QUERIES(DISCO_TEXT)};
#undef DISCO_TEXT

const char* name_of(Id id) { return kNames[static_cast<int>(id)]; }

namespace {

constexpr int kRuntimes = 8;
constexpr int kCallers = 32;

char absent;  // its address stands for a function that a library lacks

Library the_driver;
Library runtimes[kRuntimes];
std::atomic<Library*> by_name{nullptr};
pthread_mutex_t adopting = PTHREAD_MUTEX_INITIALIZER;
pthread_mutex_t looking = PTHREAD_MUTEX_INITIALIZER;

__attribute__((constructor)) void start() {
  // A child starts without the threads that may have held them; what they guard is whole at any moment.
  pthread_atfork(nullptr, nullptr, [] {
    pthread_mutex_init(&adopting, nullptr);
    pthread_mutex_init(&looking, nullptr);
  });
}

// From the library of a caller to its runtime, once looked for.
struct Caller {
  std::atomic<const void*> base{nullptr};
  std::atomic<Library*> runtime{nullptr};
};
Caller callers[kCallers];

const void* base_of(const void* address, const char** file = nullptr) {
#ifdef DLFO_STRUCT_HAS_EH_DBASE
  // Takes no lock of the loader's, whom somebody may keep busy until this thread goes on.
  dl_find_object object;
  if (file == nullptr)
    return _dl_find_object(const_cast<void*>(address), &object) == 0 ? object.dlfo_map_start : nullptr;
#endif
  Dl_info info;
  if (dladdr(address, &info) == 0) return nullptr;
  if (file != nullptr) *file = info.dli_fname;
  return info.dli_fbase;
}

// A found function that is not this library's own.
void* foreign(void* function) { return function == nullptr || ours(function) ? nullptr : function; }

void* in_handle(void* handle, Id id) { return foreign(real_dlsym()(handle, name_of(id))); }

void* of_file(const char* file, Id id) {
  void* const handle = dlopen(file, RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) return nullptr;
  void* const found = in_handle(handle, id);
  dlclose(handle);
  return found;
}

// In the libraries that come after this one, then in each that is loaded, also where only its loader sees it.
void* anywhere(Id id) {
  if (void* const found = foreign(real_dlsym()(RTLD_NEXT, name_of(id)))) return found;
  struct Search {
    char files[64][512];
    int count = 0;
  };
  static constinit Search search{};  // too large for a stack; `looking` guards it
  pthread_mutex_lock(&looking);
  search.count = 0;
  // The loader's lock is held in there: open nothing.
  dl_iterate_phdr(
      [](dl_phdr_info* object, std::size_t, void* data) {
        auto* const into = static_cast<Search*>(data);
        const char* const name = object->dlpi_name;
        const char* const slash = name == nullptr ? nullptr : std::strrchr(name, '/');
        const char* const file = slash == nullptr ? name : slash + 1;
        if (file != nullptr && std::strncmp(file, "libcuda", 7) == 0 && std::strlen(name) < 512 &&
            into->count < 64)
          std::strcpy(into->files[into->count++], name);
        return 0;
      },
      &search);
  void* found = nullptr;
  for (int i = 0; i < search.count && found == nullptr; ++i) found = of_file(search.files[i], id);
  pthread_mutex_unlock(&looking);
  return found;
}

}  // namespace

bool ours(const void* address) { return base_of(address) == base_of(&absent); }

Dlsym real_dlsym() {
  static std::atomic<Dlsym> kept{nullptr};
  Dlsym found = kept.load(std::memory_order_acquire);
  if (found != nullptr) return found;
  // dlsym itself is what this library stands in front of. Its version differs by processor and age of the C
  // library.
  for (const char* version : {"GLIBC_2.2.5", "GLIBC_2.17", "GLIBC_2.34", "GLIBC_2.27", "GLIBC_2.0"}) {
    found = reinterpret_cast<Dlsym>(dlvsym(RTLD_NEXT, "dlsym", version));
    if (found != nullptr) break;
  }
  kept.store(found, std::memory_order_release);
  return found;
}

void* Library::find(Id id) {
  std::atomic<void*>& slot = functions_[static_cast<int>(id)];
  void* function = slot.load(std::memory_order_acquire);
  if (function == nullptr) {
    function = in_handle(handle_, id);
    slot.store(function == nullptr ? &absent : function, std::memory_order_release);
  }
  return function == &absent ? nullptr : function;
}

Library* adopt(Layer layer, void* function) {
  const char* file = nullptr;
  const void* const base = function == nullptr ? nullptr : base_of(function, &file);
  if (base == nullptr) return nullptr;
  Library* const first = layer == Layer::kDriver ? &the_driver : runtimes;
  Library* const last = layer == Layer::kDriver ? first + 1 : runtimes + kRuntimes;
  for (Library* known = first; known != last; ++known)
    if (known->is(base)) return known;
  // Opened before the lock: the loader may be busy with somebody who waits for it.
  void* const handle = dlopen(file, RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) return nullptr;
  pthread_mutex_lock(&adopting);
  Library* known = first;
  while (known != last && !known->is(base) && !known->is(nullptr)) ++known;
  if (known != last && known->is(nullptr)) {
    known->handle_ = handle;
    known->base_.store(base, std::memory_order_release);
  }
  pthread_mutex_unlock(&adopting);
  return known == last ? nullptr : known;
}

Library* adopt_driver(void* function) { return adopt(Layer::kDriver, function); }

Library* adopt_runtime(void* function) {
  Library* const found = adopt(Layer::kRuntime, function);
  Library* none = nullptr;
  if (found == nullptr) return nullptr;
  return by_name.compare_exchange_strong(none, found) || none == found ? found : nullptr;
}

Library* driver() {
  if (!the_driver.is(nullptr)) return &the_driver;
  return adopt_driver(anywhere(Id::cuMemAlloc_v2));
}

Library* runtime_by_name() { return by_name.load(std::memory_order_acquire); }

Library* runtime_of(const void* caller) {
  const void* const base = base_of(caller);
  for (const Caller& known : callers)
    if (base != nullptr && known.base.load(std::memory_order_acquire) == base)
      if (Library* const runtime = known.runtime.load(std::memory_order_acquire)) return runtime;
  // What the caller is linked to comes first: a process may have two runtimes, each in the sight of its users
  // alone.
  const char* file = nullptr;
  void* function = base_of(caller, &file) == nullptr ? nullptr : of_file(file, Id::cudaMalloc);
  if (function == nullptr) function = anywhere(Id::cudaMalloc);
  Library* const runtime = adopt(Layer::kRuntime, function);
  if (runtime == nullptr || base == nullptr) return runtime;
  for (Caller& free : callers) {
    const void* none = nullptr;
    if (!free.base.compare_exchange_strong(none, base)) {
      if (none == base) break;
      continue;
    }
    free.runtime.store(runtime, std::memory_order_release);
    break;
  }
  return runtime;
}

}  // namespace disco::interpose
