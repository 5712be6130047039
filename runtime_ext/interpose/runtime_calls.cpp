// The runtime's calls (cudaMalloc and its kin). Types as in CUDA's headers, handles as void*.
#include "ask.h"
#include "wrappers.h"

namespace disco::interpose {
namespace {

struct Extent {
  std::size_t width, height, depth;
};

struct PitchedPointer {
  void* address;
  std::size_t pitch, xsize, ysize;
};

struct ChannelFormat {
  int x, y, z, w, kind;
};

constexpr std::uint64_t kPitchGuess = 512;  // what rows are rounded up to, before the call says

std::uint64_t guessed_pitch(std::uint64_t width) {
  return (width + kPitchGuess - 1) / kPitchGuess * kPitchGuess;
}

std::uint64_t texel_bytes(const ChannelFormat* format) {
  return format == nullptr ? 0
                           : static_cast<std::uint64_t>(format->x + format->y + format->z + format->w) / 8;
}

std::uint64_t rows(const Extent& extent) { return extent.height * (extent.depth == 0 ? 1 : extent.depth); }

template <typename Call>
int allocate_array(Library& library, Kind kind, void** handle, std::uint64_t bytes, unsigned flags,
                   Call call) {
  if (flags & kUnbacked) bytes = 0;
  Ask ask(library, Layer::kRuntime);
  return allocate(ask, bytes, call,
                  [&] { return Entry{.kind = kind, .key = number(*handle), .bytes = bytes}; });
}

template <typename Call>
int allocate_linear(Library& library, void** address, std::uint64_t bytes, Call call) {
  Ask ask(library, Layer::kRuntime);
  return allocate(ask, bytes, call,
                  [&] { return Entry{.kind = Kind::kPointer, .key = number(*address), .bytes = bytes}; });
}

template <typename Free>
int free_handle(Kind kind, void* handle, Free free) {
  const Scope scope;
  Entry entry;
  return scope.outermost() ? release(kind, number(handle), free, &entry) : free();
}

}  // namespace

DISCO_RUNTIME_CALL(cudaMalloc, (void** address, std::size_t bytes), (address, bytes)) {
  return allocate_linear(library, address, bytes, [&] { return real(address, bytes); });
}

DISCO_RUNTIME_CALL(cudaMallocManaged, (void** address, std::size_t bytes, unsigned flags),
                   (address, bytes, flags)) {
  return allocate_linear(library, address, bytes, [&] { return real(address, bytes, flags); });
}

DISCO_RUNTIME_CALL(cudaMallocPitch,
                   (void** address, std::size_t* pitch, std::size_t width, std::size_t height),
                   (address, pitch, width, height)) {
  Ask ask(library, Layer::kRuntime);
  return allocate(
      ask, guessed_pitch(width) * height, [&] { return real(address, pitch, width, height); },
      [&] { return Entry{.kind = Kind::kPointer, .key = number(*address), .bytes = *pitch * height}; });
}

DISCO_RUNTIME_CALL(cudaMalloc3D, (PitchedPointer * pointer, Extent extent), (pointer, extent)) {
  Ask ask(library, Layer::kRuntime);
  return allocate(
      ask, guessed_pitch(extent.width) * rows(extent), [&] { return real(pointer, extent); },
      [&] {
        return Entry{
            .kind = Kind::kPointer, .key = number(pointer->address), .bytes = pointer->pitch * rows(extent)};
      });
}

DISCO_RUNTIME_CALL(cudaMallocArray,
                   (void** array, const ChannelFormat* format, std::size_t width, std::size_t height,
                    unsigned flags),
                   (array, format, width, height, flags)) {
  return allocate_array(library, Kind::kArray, array, array_bytes(texel_bytes(format), width, height, 0, 1),
                        flags, [&] { return real(array, format, width, height, flags); });
}

DISCO_RUNTIME_CALL(cudaMalloc3DArray,
                   (void** array, const ChannelFormat* format, Extent extent, unsigned flags),
                   (array, format, extent, flags)) {
  const auto bytes = array_bytes(texel_bytes(format), extent.width, extent.height, extent.depth, 1);
  return allocate_array(library, Kind::kArray, array, bytes, flags,
                        [&] { return real(array, format, extent, flags); });
}

DISCO_RUNTIME_CALL(cudaMallocMipmappedArray,
                   (void** array, const ChannelFormat* format, Extent extent, unsigned levels,
                    unsigned flags),
                   (array, format, extent, levels, flags)) {
  const auto bytes = array_bytes(texel_bytes(format), extent.width, extent.height, extent.depth, levels);
  return allocate_array(library, Kind::kMipmap, array, bytes, flags,
                        [&] { return real(array, format, extent, levels, flags); });
}

#define DISCO_STREAM_CALLS(allocation, from_pool, freeing, synchronizing, per_thread)           \
  DISCO_RUNTIME_CALL(allocation, (void** address, std::size_t bytes, void* stream),             \
                     (address, bytes, stream)) {                                                \
    Ask ask(library, Layer::kRuntime, per_thread);                                              \
    return allocate_in_stream(ask, address, bytes, nullptr, stream,                             \
                              [&] { return real(address, bytes, stream); });                    \
  }                                                                                             \
  DISCO_RUNTIME_CALL(from_pool, (void** address, std::size_t bytes, void* pool, void* stream),  \
                     (address, bytes, pool, stream)) {                                          \
    Ask ask(library, Layer::kRuntime, per_thread);                                              \
    return allocate_in_stream(ask, address, bytes, pool, stream,                                \
                              [&] { return real(address, bytes, pool, stream); });              \
  }                                                                                             \
  DISCO_RUNTIME_CALL(freeing, (void* address, void* stream), (address, stream)) {               \
    Ask ask(library, Layer::kRuntime, per_thread);                                              \
    return free_in_stream(ask, number(address), stream, [&] { return real(address, stream); }); \
  }                                                                                             \
  DISCO_RUNTIME_CALL(synchronizing, (void* stream), (stream)) {                                 \
    return synchronize(library, Layer::kRuntime, [&] { return real(stream); });                 \
  }

DISCO_STREAM_CALLS(cudaMallocAsync, cudaMallocFromPoolAsync, cudaFreeAsync, cudaStreamSynchronize, false)
DISCO_STREAM_CALLS(cudaMallocAsync_ptsz, cudaMallocFromPoolAsync_ptsz, cudaFreeAsync_ptsz,
                   cudaStreamSynchronize_ptsz, true)

DISCO_RUNTIME_CALL(cudaDeviceSynchronize, (), ()) {
  return synchronize(library, Layer::kRuntime, [&] { return real(); });
}

DISCO_RUNTIME_CALL(cudaFree, (void* address), (address)) {
  Ask ask(library, Layer::kRuntime);
  return free_pointer(ask, number(address), [&] { return real(address); });
}

DISCO_RUNTIME_CALL(cudaFreeArray, (void* array), (array)) {
  return free_handle(Kind::kArray, array, [&] { return real(array); });
}

DISCO_RUNTIME_CALL(cudaFreeMipmappedArray, (void* array), (array)) {
  return free_handle(Kind::kMipmap, array, [&] { return real(array); });
}

DISCO_RUNTIME_CALL(cudaMemPoolCreate, (void** pool, const PoolProps* props), (pool, props)) {
  const Scope scope;
  const int code = real(pool, props);
  if (scope.outermost() && code == kSuccess)
    add_pool(number(*pool), props->location_type == kDeviceLocation ? props->location : -1);
  return code;
}

DISCO_RUNTIME_CALL(cudaMemPoolDestroy, (void* pool), (pool)) {
  return destroy_pool(number(pool), [&] { return real(pool); });
}

DISCO_RUNTIME_CALL(cudaMemPoolTrimTo, (void* pool, std::size_t keep), (pool, keep)) {
  return synchronize(library, Layer::kRuntime, [&] { return real(pool, keep); });
}

DISCO_RUNTIME_CALL(cudaDeviceReset, (), ()) {
  const Scope scope;
  if (!scope.outermost()) return real();
  const int device = Ask(library, Layer::kRuntime).device();
  const Sampling nobody_asks_pools_meanwhile;
  const int code = real();
  if (code == kSuccess) device_reset(device);
  return code;
}

#define DISCO_ENTRY_POINT(name)                                                                          \
  DISCO_RUNTIME_CALL(name, (const char* symbol, void** function, unsigned long long flags, int* status), \
                     (symbol, function, flags, status)) {                                                \
    const int code = real(symbol, function, flags, status);                                              \
    if (code == kSuccess && function != nullptr)                                                         \
      *function = counted_driver_call(symbol, *function, kKnown, flags);                                 \
    return code;                                                                                         \
  }
DISCO_ENTRY_POINT(cudaGetDriverEntryPoint)
DISCO_ENTRY_POINT(cudaGetDriverEntryPoint_ptsz)

#define DISCO_ENTRY_POINT_BY_VERSION(name, default_flags)                                                   \
  DISCO_RUNTIME_CALL(                                                                                       \
      name, (const char* symbol, void** function, unsigned version, unsigned long long flags, int* status), \
      (symbol, function, version, flags, status)) {                                                         \
    const int code = real(symbol, function, version, flags, status);                                        \
    if (code == kSuccess && function != nullptr)                                                            \
      *function = counted_driver_call(symbol, *function, static_cast<int>(version),                         \
                                      flags == 0 ? default_flags : flags);                                  \
    return code;                                                                                            \
  }
DISCO_ENTRY_POINT_BY_VERSION(cudaGetDriverEntryPointByVersion, 0)
DISCO_ENTRY_POINT_BY_VERSION(cudaGetDriverEntryPointByVersion_ptsz, kPerThreadFlag)

void* runtime_wrapper(Id id) {
  switch (id) {
#define DISCO_CASE(name) \
  case Id::name:         \
    return reinterpret_cast<void*>(&found_##name);
    DISCO_RUNTIME_CALLS(DISCO_CASE)
#undef DISCO_CASE
    default:
      return nullptr;
  }
}

}  // namespace disco::interpose
