// Functions that a program asks for by name: dlsym, cuGetProcAddress and the runtime's way to that.
#include <dlfcn.h>

#include <cstring>

#include "wrappers.h"

namespace disco::interpose {
namespace {

struct DriverCall {
  Id id;
  const char* symbol;
  int first, end;
  bool per_thread;
};

constexpr DriverCall kDriverCalls[] = {
#define DISCO_ROW(name, symbol, first, end, per_thread) {Id::name, symbol, first, end, per_thread},
    DISCO_DRIVER_CALLS(DISCO_ROW)
#undef DISCO_ROW
};

constexpr Id kRuntimeCalls[] = {
#define DISCO_ID(name) Id::name,
    DISCO_RUNTIME_CALLS(DISCO_ID)
#undef DISCO_ID
};

void* by_name(void* function, const char* name) {
  for (const Id id : kRuntimeCalls)
    if (std::strcmp(name_of(id), name) == 0) return adopt_runtime(function) ? runtime_wrapper(id) : function;
  for (const DriverCall& call : kDriverCalls)
    if (std::strcmp(name_of(call.id), name) == 0)
      return adopt_driver(function) ? driver_wrapper(call.id) : function;
  return function;
}

bool counted(const char* name) {
  for (const Id id : kRuntimeCalls)
    if (std::strcmp(name_of(id), name) == 0) return true;
  for (const DriverCall& call : kDriverCalls)
    if (std::strcmp(name_of(call.id), name) == 0) return true;
  return false;
}

}  // namespace

void* counted_driver_call(const char* symbol, void* function, int version, unsigned long long flags) {
  if (symbol == nullptr || function == nullptr || ours(function)) return function;
  const bool per_thread = (flags & kPerThreadFlag) != 0;
  const DriverCall* chosen = nullptr;
  for (const DriverCall& call : kDriverCalls) {
    if (std::strcmp(call.symbol, symbol) != 0) continue;
    const bool exact = version >= call.first && version < call.end;
    Library* const library = adopt_driver(function);
    if (library == nullptr || (!exact && library->find(call.id) != function)) continue;
    if (chosen == nullptr || call.per_thread == per_thread) chosen = &call;
  }
  return chosen == nullptr ? function : driver_wrapper(chosen->id);
}

// What dlsym returns, or nullptr: the loader's own dlsym answers for `name`, which may be another than was
// asked.
struct Answer {
  void* function;
  const char* name;
};

extern "C" __attribute__((visibility("hidden"), used)) Answer disco_interpose_lookup(void* handle,
                                                                                     const char* name) {
  if (name == nullptr || name[0] != 'c' || name[1] != 'u' || handle == RTLD_NEXT || !counted(name))
    return {nullptr, name};
  void* const function = real_dlsym()(handle, name);
  if (function == nullptr) return {nullptr, name};
  if (!ours(function)) return {by_name(function, name), name};
  // A program that looks whether CUDA is there must not find this library in its place.
  void* const behind = real_dlsym()(RTLD_NEXT, name);
  if (behind == nullptr || ours(behind)) return {nullptr, "a function of CUDA, which is not loaded"};
  return {function, name};
}

extern "C" __attribute__((visibility("hidden"), used)) void* disco_interpose_real_dlsym() {
  return reinterpret_cast<void*>(real_dlsym());
}

}  // namespace disco::interpose

// The loader's dlsym answers by the place of its caller (RTLD_NEXT, RTLD_DEFAULT): it is entered by a jump,
// so that it returns to the program.
#if defined(__x86_64__)
asm(R"(
.text
.globl dlsym
.type dlsym, @function
dlsym:
  .cfi_startproc
  endbr64
  pushq %rdi
  .cfi_adjust_cfa_offset 8
  subq $16, %rsp
  .cfi_adjust_cfa_offset 16
  call disco_interpose_lookup
  movq %rdx, (%rsp)
  testq %rax, %rax
  jne 1f
  call disco_interpose_real_dlsym
  movq (%rsp), %rsi
  movq 16(%rsp), %rdi
  addq $24, %rsp
  .cfi_adjust_cfa_offset -24
  jmp *%rax
  .cfi_adjust_cfa_offset 24
1:
  addq $24, %rsp
  .cfi_adjust_cfa_offset -24
  ret
  .cfi_endproc
.size dlsym, .-dlsym
)");
#elif defined(__aarch64__)
asm(R"(
.text
.globl dlsym
.type dlsym, %function
dlsym:
  stp x29, x30, [sp, #-32]!
  str x0, [sp, #16]
  bl disco_interpose_lookup
  cbnz x0, 1f
  str x1, [sp, #24]
  bl disco_interpose_real_dlsym
  mov x16, x0
  ldr x0, [sp, #16]
  ldr x1, [sp, #24]
  ldp x29, x30, [sp], #32
  br x16
1:
  ldp x29, x30, [sp], #32
  ret
.size dlsym, .-dlsym
)");
#else
#error "dlsym is interposed on x86-64 and on 64-bit ARM alone"
#endif
