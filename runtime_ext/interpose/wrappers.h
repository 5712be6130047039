// How a wrapper is written, and how those who ask for a function by its name get it.
#pragma once
#include "library.h"

#define DISCO_LIST(...) __VA_OPT__(, ) __VA_ARGS__
#define DISCO_EXPORTED extern "C" __attribute__((visibility("default"))) int

// The body that follows has `library`, of CUDA, and `real`, its function. It is reached by the exported name,
// from those who are linked to a runtime, which need not be the same one for all, and from those who asked
// dlsym.
#define DISCO_RUNTIME_CALL(name, parameters, arguments)                                            \
  DISCO_EXPORTED name parameters;                                                                  \
  static int on_##name(Library& library, decltype(name)* real DISCO_LIST parameters);              \
  static int to_##name(Library* library DISCO_LIST parameters) {                                   \
    auto* const real = library == nullptr ? nullptr : library->get<decltype(name)>(Id::name);      \
    return real == nullptr ? kMissing : on_##name(*library, real DISCO_LIST arguments);            \
  }                                                                                                \
  DISCO_EXPORTED name parameters {                                                                 \
    return to_##name(runtime_of(__builtin_return_address(0)) DISCO_LIST arguments);                \
  }                                                                                                \
  static int found_##name parameters { return to_##name(runtime_by_name() DISCO_LIST arguments); } \
  static int on_##name([[maybe_unused]] Library& library, decltype(name)* real DISCO_LIST parameters)

// The same for the driver, of which a process has one.
#define DISCO_DRIVER_CALL(name, parameters, arguments)                                        \
  DISCO_EXPORTED name parameters;                                                             \
  static int on_##name(Library& library, decltype(name)* real DISCO_LIST parameters);         \
  static int found_##name parameters {                                                        \
    Library* const library = driver();                                                        \
    auto* const real = library == nullptr ? nullptr : library->get<decltype(name)>(Id::name); \
    return real == nullptr ? kMissing : on_##name(*library, real DISCO_LIST arguments);       \
  }                                                                                           \
  DISCO_EXPORTED name parameters { return found_##name arguments; }                           \
  static int on_##name([[maybe_unused]] Library& library, decltype(name)* real DISCO_LIST parameters)

namespace disco::interpose {

inline constexpr unsigned long long kPerThreadFlag = 2;  // CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM

// What stands for a function when somebody asks for it by name.
void* runtime_wrapper(Id id);
void* driver_wrapper(Id id);

// What stands for `function`, which the driver calls `symbol` in `version`: itself, unless it is one of those
// counted here. A version that is not known is taken by the function's address alone.
void* counted_driver_call(const char* symbol, void* function, int version, unsigned long long flags);

}  // namespace disco::interpose
