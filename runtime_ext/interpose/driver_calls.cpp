// The driver's calls (cuMemAlloc and its kin). Types as in CUDA's headers, handles as void*.
#include "ask.h"
#include "wrappers.h"

namespace disco::interpose {
namespace {

using Address = unsigned long long;

struct ArrayDescriptor {
  std::size_t width, height;
  int format;
  unsigned channels;
};

struct Array3DDescriptor {
  std::size_t width, height, depth;
  int format;
  unsigned channels, flags;
};

// The part of CUmemAllocationProp that is read here.
struct AllocationProps {
  int type, handle_types, location_type, location;
};

// Of CUarray_format: compressed and planar ones count as a byte for each channel.
std::uint64_t texel_bytes(int format, unsigned channels) {
  switch (format) {
    case 0x02:
    case 0x09:
    case 0x10:
      return 2ull * channels;
    case 0x03:
    case 0x0a:
    case 0x20:
      return 4ull * channels;
    default:
      return channels;
  }
}

template <typename Descriptor>
std::uint64_t bytes_of(const Descriptor* array, unsigned levels) {
  if (array == nullptr) return 0;
  const std::uint64_t texel = texel_bytes(array->format, array->channels);
  if constexpr (requires { array->depth; }) {
    if (array->flags & kUnbacked) return 0;
    return array_bytes(texel, array->width, array->height, array->depth, levels);
  } else {
    return array_bytes(texel, array->width, array->height, 0, levels);
  }
}

template <typename Call>
int allocate_linear(Library& library, Address* address, std::uint64_t bytes, Call call) {
  Ask ask(library, Layer::kDriver);
  return allocate(ask, bytes, call,
                  [&] { return Entry{.kind = Kind::kPointer, .key = *address, .bytes = bytes}; });
}

template <typename Call>
int allocate_array(Library& library, Kind kind, void** handle, std::uint64_t bytes, Call call) {
  Ask ask(library, Layer::kDriver);
  return allocate(ask, bytes, call,
                  [&] { return Entry{.kind = kind, .key = number(*handle), .bytes = bytes}; });
}

template <typename Free>
int free_handle(Kind kind, void* handle, Free free) {
  const Scope scope;
  Entry entry;
  return scope.outermost() ? release(kind, number(handle), free, &entry) : free();
}

void freed_all(const Entry* gone, int count) {
  for (int i = 0; i < count; ++i) freed(gone[i]);
}

}  // namespace

DISCO_DRIVER_CALL(cuMemAlloc_v2, (Address * address, std::size_t bytes), (address, bytes)) {
  return allocate_linear(library, address, bytes, [&] { return real(address, bytes); });
}

DISCO_DRIVER_CALL(cuMemAllocManaged, (Address * address, std::size_t bytes, unsigned flags),
                  (address, bytes, flags)) {
  return allocate_linear(library, address, bytes, [&] { return real(address, bytes, flags); });
}

DISCO_DRIVER_CALL(cuMemAllocPitch_v2,
                  (Address * address, std::size_t* pitch, std::size_t width, std::size_t height,
                   unsigned element),
                  (address, pitch, width, height, element)) {
  Ask ask(library, Layer::kDriver);
  return allocate(
      ask, (width + 511) / 512 * 512 * height, [&] { return real(address, pitch, width, height, element); },
      [&] { return Entry{.kind = Kind::kPointer, .key = *address, .bytes = *pitch * height}; });
}

#define DISCO_STREAM_CALLS(allocation, from_pool, freeing, synchronizing, per_thread)            \
  DISCO_DRIVER_CALL(allocation, (Address * address, std::size_t bytes, void* stream),            \
                    (address, bytes, stream)) {                                                  \
    Ask ask(library, Layer::kDriver, per_thread);                                                \
    return allocate_in_stream(ask, reinterpret_cast<void**>(address), bytes, nullptr, stream,    \
                              [&] { return real(address, bytes, stream); });                     \
  }                                                                                              \
  DISCO_DRIVER_CALL(from_pool, (Address * address, std::size_t bytes, void* pool, void* stream), \
                    (address, bytes, pool, stream)) {                                            \
    Ask ask(library, Layer::kDriver, per_thread);                                                \
    return allocate_in_stream(ask, reinterpret_cast<void**>(address), bytes, pool, stream,       \
                              [&] { return real(address, bytes, pool, stream); });               \
  }                                                                                              \
  DISCO_DRIVER_CALL(freeing, (Address address, void* stream), (address, stream)) {               \
    Ask ask(library, Layer::kDriver, per_thread);                                                \
    return free_in_stream(ask, address, stream, [&] { return real(address, stream); });          \
  }                                                                                              \
  DISCO_DRIVER_CALL(synchronizing, (void* stream), (stream)) {                                   \
    return synchronize(library, Layer::kDriver, [&] { return real(stream); });                   \
  }

DISCO_STREAM_CALLS(cuMemAllocAsync, cuMemAllocFromPoolAsync, cuMemFreeAsync, cuStreamSynchronize, false)
DISCO_STREAM_CALLS(cuMemAllocAsync_ptsz, cuMemAllocFromPoolAsync_ptsz, cuMemFreeAsync_ptsz,
                   cuStreamSynchronize_ptsz, true)

DISCO_DRIVER_CALL(cuCtxSynchronize, (), ()) {
  return synchronize(library, Layer::kDriver, [&] { return real(); });
}

DISCO_DRIVER_CALL(cuMemFree_v2, (Address address), (address)) {
  Ask ask(library, Layer::kDriver);
  return free_pointer(ask, address, [&] { return real(address); });
}

DISCO_DRIVER_CALL(cuArrayCreate_v2, (void** array, const ArrayDescriptor* descriptor), (array, descriptor)) {
  return allocate_array(library, Kind::kArray, array, bytes_of(descriptor, 1),
                        [&] { return real(array, descriptor); });
}

DISCO_DRIVER_CALL(cuArray3DCreate_v2, (void** array, const Array3DDescriptor* descriptor),
                  (array, descriptor)) {
  return allocate_array(library, Kind::kArray, array, bytes_of(descriptor, 1),
                        [&] { return real(array, descriptor); });
}

DISCO_DRIVER_CALL(cuMipmappedArrayCreate,
                  (void** array, const Array3DDescriptor* descriptor, unsigned levels),
                  (array, descriptor, levels)) {
  return allocate_array(library, Kind::kMipmap, array, bytes_of(descriptor, levels),
                        [&] { return real(array, descriptor, levels); });
}

DISCO_DRIVER_CALL(cuArrayDestroy, (void* array), (array)) {
  return free_handle(Kind::kArray, array, [&] { return real(array); });
}

DISCO_DRIVER_CALL(cuMipmappedArrayDestroy, (void* array), (array)) {
  return free_handle(Kind::kMipmap, array, [&] { return real(array); });
}

DISCO_DRIVER_CALL(cuMemCreate,
                  (Address * handle, std::size_t bytes, const AllocationProps* props,
                   unsigned long long flags),
                  (handle, bytes, props, flags)) {
  const auto call = [&] { return real(handle, bytes, props, flags); };
  const Scope scope;
  if (!scope.outermost()) return patiently(call);
  read_visible_devices();
  const int device = props != nullptr && props->location_type == kDeviceLocation ? props->location : -1;
  const Claim asked = claim(device, bytes, Ask(library, Layer::kDriver).total(device));
  Scope::call() = {asked, asked.heard};
  const int code = patiently(call);
  if (code != kSuccess) {
    withdraw(asked);
  } else if (device >= 0) {
    settle_object(asked, *handle, device, bytes);
  }
  return code;
}

DISCO_DRIVER_CALL(cuMemRelease, (Address handle), (handle)) {
  const Scope scope;
  if (!scope.outermost()) return real(handle);
  Entry gone;
  const int count = drop_handle(handle, &gone);
  const int code = real(handle);
  freed_all(&gone, count);
  return code;
}

DISCO_DRIVER_CALL(cuMemMap,
                  (Address address, std::size_t bytes, std::size_t offset, Address handle,
                   unsigned long long flags),
                  (address, bytes, offset, handle, flags)) {
  const Scope scope;
  const int code = real(address, bytes, offset, handle, flags);
  if (scope.outermost() && code == kSuccess) add_mapping(address, bytes, handle);
  return code;
}

DISCO_DRIVER_CALL(cuMemUnmap, (Address address, std::size_t bytes), (address, bytes)) {
  const Scope scope;
  if (!scope.outermost()) return real(address, bytes);
  Entry gone[kMostDropped];
  int count = drop_mappings(address, bytes, gone, kMostDropped);
  const int code = real(address, bytes);
  freed_all(gone, count);
  while (count == kMostDropped) {
    count = drop_mappings(address, bytes, gone, kMostDropped);
    freed_all(gone, count);
  }
  return code;
}

DISCO_DRIVER_CALL(cuMemRetainAllocationHandle, (Address * handle, void* address), (handle, address)) {
  const Scope scope;
  const int code = real(handle, address);
  if (scope.outermost() && code == kSuccess) add_handle(number(address), *handle);
  return code;
}

DISCO_DRIVER_CALL(cuMemPoolCreate, (void** pool, const PoolProps* props), (pool, props)) {
  const Scope scope;
  const int code = real(pool, props);
  if (scope.outermost() && code == kSuccess)
    add_pool(number(*pool), props->location_type == kDeviceLocation ? props->location : -1);
  return code;
}

DISCO_DRIVER_CALL(cuMemPoolDestroy, (void* pool), (pool)) {
  return destroy_pool(number(pool), [&] { return real(pool); });
}

DISCO_DRIVER_CALL(cuMemPoolTrimTo, (void* pool, std::size_t keep), (pool, keep)) {
  return synchronize(library, Layer::kDriver, [&] { return real(pool, keep); });
}

DISCO_DRIVER_CALL(cuCtxDestroy_v2, (void* context), (context)) {
  const Scope scope;
  const int code = real(context);
  if (scope.outermost() && code == kSuccess) context_gone(number(context));
  return code;
}

DISCO_DRIVER_CALL(cuDevicePrimaryCtxRetain, (void** context, int device), (context, device)) {
  const int code = real(context, device);
  if (code == kSuccess) primary_context(device, number(*context));
  return code;
}

DISCO_DRIVER_CALL(cuDevicePrimaryCtxReset_v2, (int device), (device)) {
  const Scope scope;
  if (!scope.outermost()) return real(device);
  const Sampling nobody_asks_pools_meanwhile;
  const int code = real(device);
  if (code == kSuccess) device_reset(device);
  return code;
}

DISCO_DRIVER_CALL(cuDevicePrimaryCtxRelease_v2, (int device), (device)) {
  const Scope scope;
  if (!scope.outermost()) return real(device);
  const Sampling nobody_asks_pools_meanwhile;
  const int code = real(device);
  auto* const state = library.get<int(int, unsigned*, int*)>(Id::cuDevicePrimaryCtxGetState);
  unsigned flags = 0;
  int active = 1;
  // The last one who lets go of it resets it.
  if (code == kSuccess && state != nullptr && state(device, &flags, &active) == kSuccess && active == 0)
    device_reset(device);
  return code;
}

DISCO_DRIVER_CALL(cuGetProcAddress,
                  (const char* symbol, void** function, int version, unsigned long long flags),
                  (symbol, function, version, flags)) {
  const int code = real(symbol, function, version, flags);
  if (code == kSuccess && function != nullptr)
    *function = counted_driver_call(symbol, *function, version, flags);
  return code;
}

DISCO_DRIVER_CALL(cuGetProcAddress_v2,
                  (const char* symbol, void** function, int version, unsigned long long flags, int* status),
                  (symbol, function, version, flags, status)) {
  const int code = real(symbol, function, version, flags, status);
  if (code == kSuccess && function != nullptr)
    *function = counted_driver_call(symbol, *function, version, flags);
  return code;
}

void* driver_wrapper(Id id) {
  switch (id) {
#define DISCO_CASE(name, ...) \
  case Id::name:              \
    return reinterpret_cast<void*>(&found_##name);
    DISCO_DRIVER_CALLS(DISCO_CASE)
#undef DISCO_CASE
    default:
      return nullptr;
  }
}

}  // namespace disco::interpose
