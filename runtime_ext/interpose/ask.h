// What is asked of CUDA to count right, in the words of the layer that the program called. An answer that
// fails leaves no trace in the program: the runtime's last error is as it was.
#pragma once
#include "calls.h"

namespace disco::interpose {

class Ask {
 public:
  Ask(Library& library, Layer layer, bool per_thread = false);

  // Whether the runtime has no error that the program has yet to see, which a failing query would replace.
  bool quiet() const { return quiet_; }
  // Forget the error of a call or a query that failed in here. Only where all was quiet before.
  void forget();

  // -1: none
  int device();
  int device_of(void* stream);
  // The device's memory; 0 if it does not say.
  std::uint64_t total(int device);
  // Also if it does not say.
  bool capturing(void* stream);
  // The pool that a device's asynchronous allocations come from.
  bool pool_of(int device, void** pool);
  bool attribute(void* pool, int attribute, std::uint64_t* value);
  // The current context; 0 in the runtime, which has one for each device.
  std::uint64_t context();

 private:
  bool driver_layer() const { return layer_ == Layer::kDriver; }
  Id by_layer(Id runtime, Id driver) const { return driver_layer() ? driver : runtime; }
  Id of_stream(Id runtime, Id runtime_per_thread, Id driver, Id driver_per_thread) const {
    return per_thread_ ? by_layer(runtime_per_thread, driver_per_thread) : by_layer(runtime, driver);
  }
  template <typename... Arguments>
  bool ask(Id id, Arguments... arguments) {
    auto* const function = library_.get<int(Arguments...)>(id);
    if (function == nullptr) return false;
    if (function(arguments...) == kSuccess) return true;
    if (quiet_) forget();
    return false;
  }

  Library& library_;
  Layer layer_;
  bool per_thread_;
  bool quiet_ = true;
};

// A counted allocation of `bytes` on the current device (or on `device`). `entry`, called when it is made,
// says what it is: kind, key and bytes.
template <typename Call, typename MakeEntry>
int allocate(Ask& ask, std::uint64_t bytes, Call call, MakeEntry entry) {
  const Scope scope;
  if (!scope.outermost()) return patiently(call);
  read_visible_devices();
  const int device = ask.device();
  const Claim asked = claim(device, bytes, ask.total(device));
  Scope::call() = {asked, asked.heard};
  const int code = ask.quiet() ? patiently(call) : call();
  if (code != kSuccess) {
    withdraw(asked);
    return code;
  }
  if (ask.quiet()) ask.forget();
  Entry made = entry();
  made.device = static_cast<std::int16_t>(device);
  made.owner = ask.context();
  settle(asked, made);
  return code;
}

// The same from a pool (nullptr: the current one of the stream's device), of which counts what it has
// reserved.
template <typename Call>
int allocate_in_stream(Ask& ask, void** address, std::uint64_t bytes, void* pool, void* stream, Call call);

// Count anew what a pool has reserved, or all pools.
void sample_pool(Ask& ask, std::uint64_t pool, int device, const Claim& claim);
void sample_pools(Ask& ask);

// Frees what `key` stands for, linear memory of a pool or not.
template <typename Free>
int free_pointer(Ask& ask, std::uint64_t key, Free free) {
  const Scope scope;
  if (!scope.outermost()) return free();
  Entry entry;
  const int code = release(Kind::kPointer, key, free, &entry);
  if (code == kSuccess && entry.pooled && ask.quiet()) sample_pool(ask, entry.owner, entry.device, {});
  return code;
}

template <typename Free>
int free_in_stream(Ask& ask, std::uint64_t key, void* stream, Free free) {
  // What a graph will free is still there.
  if (ask.quiet() && ask.capturing(stream)) return free();
  return free_pointer(ask, key, free);
}

template <typename Destroy>
int destroy_pool(std::uint64_t pool, Destroy destroy) {
  const Scope scope;
  if (!scope.outermost()) return destroy();
  const Sampling nobody_asks_it_meanwhile;
  Entry entry;
  const bool known = take(Kind::kPool, pool, &entry);
  const int code = destroy();
  if (known && code == kSuccess) pool_gone(entry);
  if (known && code != kSuccess) put_back(entry);
  return code;
}

template <typename Wait>
int synchronize(Library& library, Layer layer, Wait wait) {
  const Scope scope;
  const int code = wait();
  // Pools give back at such moments what they do not keep.
  if (scope.outermost() && code == kSuccess && pools_in_use()) {
    Ask ask(library, layer);
    if (ask.quiet()) sample_pools(ask);
  }
  return code;
}

template <typename Call>
int allocate_in_stream(Ask& ask, void** address, std::uint64_t bytes, void* pool, void* stream, Call call) {
  const Scope scope;
  if (!scope.outermost()) return patiently(call);
  // Such memory is a graph's.
  if (ask.quiet() && ask.capturing(stream)) return call();
  read_visible_devices();
  int device = ask.quiet() ? ask.device_of(stream) : ask.device();
  const bool known = ask.quiet() && (pool != nullptr ? (pool_device(number(pool), &device), true)
                                                     : device >= 0 && ask.pool_of(device, &pool));
  std::uint64_t reserved = 0, used = 0;
  const bool by_pool =
      known && ask.attribute(pool, kReservedNow, &reserved) && ask.attribute(pool, kUsedNow, &used);
  const std::uint64_t room = by_pool && reserved > used ? reserved - used : 0;
  const Claim asked = claim(device, bytes > room ? bytes - room : 0, ask.total(device));
  Scope::call() = {asked, asked.heard};
  const int code = ask.quiet() ? patiently(call) : call();
  if (code != kSuccess) {
    withdraw(asked);
    return code;
  }
  if (ask.quiet()) ask.forget();
  const Entry made{.kind = Kind::kPointer,
                   .pooled = by_pool,
                   .device = static_cast<std::int16_t>(device),
                   .key = number(*address),
                   .bytes = bytes,
                   .owner = by_pool ? number(pool) : 0};
  settle(by_pool ? Claim{} : asked, made);
  if (by_pool) sample_pool(ask, number(pool), device, asked);
  return code;
}

}  // namespace disco::interpose
