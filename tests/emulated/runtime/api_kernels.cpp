// Kernels: those of the emulated ops run; of real ones only the one behind torch.cuda._sleep, the others are
// counted.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "calls.h"
#include "device_memory.h"
#include "journal.h"
#include "streams.h"

using namespace emulated;

namespace {

std::mutex names_mutex;
std::unordered_map<const void*, std::string>& names() {
  static auto* the = new std::unordered_map<const void*, std::string>;
  return *the;
}

struct Configuration {
  dim3 grid, block;
  std::size_t shared;
  void* stream;
};
thread_local std::vector<Configuration> configurations;

cudaError_t launch(const void* function, void** arguments, cudaStream_t handle) {
  need_context();
  RETURN_IF_FAULTED();
  Stream* stream = streams().find(handle);
  if (stream == nullptr) return answer(cudaErrorInvalidResourceHandle);
  std::string name = "without a name";
  {
    const std::lock_guard lock(names_mutex);
    if (const auto at = names().find(function); at != names().end()) name = at->second;
  }
  // at::cuda::sleep(cycles); a cycle is a nanosecond here.
  if (name.find("spin_kernel") != std::string::npos) {
    const std::chrono::nanoseconds time(*static_cast<std::int64_t*>(arguments[0]));
    stream->put({"sleep", [time] { std::this_thread::sleep_for(time); }});
    return cudaSuccess;
  }
  journal().count("unemulated kernel " + name);
  stream->put({name, [] {}});
  return cudaSuccess;
}

void check_device(const Stream& stream, const std::string& name, const std::vector<Range>& ranges) {
  if (stream.device != current_device())
    journal().complain(name + " is launched on a stream of device " + std::to_string(stream.device) +
                       " while device " + std::to_string(current_device()) + " is current");
  for (const Range& range : ranges) {
    if (range.bytes == 0 || !device_memory().owns(range.address)) continue;
    if (!device_memory().in_block(range.address, range.bytes)) {
      journal().complain(name + " reaches outside a device block");
    } else if (const int device = device_memory().device_of(range.address); device != stream.device) {
      journal().complain(name + " on device " + std::to_string(stream.device) + " uses memory of device " +
                         std::to_string(device));
    }
  }
}

// As on a GPU: the kernel fails on its stream, and nothing works in this process from then on.
bool writes_read_only(const std::vector<Range>& ranges) {
  return std::any_of(ranges.begin(), ranges.end(), [](const Range& range) {
    return range.written && range.bytes != 0 && !device_memory().writable(range.address);
  });
}

int unsupported() { return cudaErrorNotSupported; }

}  // namespace

extern "C" {

void emuLaunch(void* handle, const std::string& name, std::function<void()> run,
               const std::vector<Range>& ranges) {
  Stream* stream = streams().find(static_cast<cudaStream_t>(handle));
  if (stream == nullptr) {
    journal().complain(name + " is launched on a stream that does not exist");
    return;
  }
  check_device(*stream, name, ranges);
  const bool captured = stream->captured() != cudaStreamCaptureStatusNone;
  journal().count(captured ? "kernels captured" : "kernels");
  if (writes_read_only(ranges)) {
    stream->put({name, [] { faults().fail(cudaErrorIllegalAddress); }});
    return;
  }
  stream->put({name, std::move(run)}, ranges);
}

void emuHang(void* handle) {
  // A release that comes before the stream gets there counts.
  const unsigned long releases = faults().releases();
  streams().find(static_cast<cudaStream_t>(handle))->put({"hang", [=] { faults().hang(releases); }});
}

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}

void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*, void*,
                            void*, int*) {
  const std::lock_guard lock(names_mutex);
  names()[function] = name;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared, void* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared, void* stream) {
  if (configurations.empty()) return answer(cudaErrorMissingConfiguration);
  const Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  std::memcpy(stream, &last.stream, sizeof last.stream);
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, std::size_t,
                               cudaStream_t stream) {
  return launch(kernel, arguments, stream);
}

cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments, std::size_t,
                             cudaStream_t stream) {
  return launch(function, arguments, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration, const void* function,
                                void** arguments) {
  return launch(function, arguments, configuration->stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void** arguments, std::size_t,
                                        cudaStream_t stream) {
  return launch(function, arguments, stream);
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  std::memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->binaryVersion = found->ptxVersion = 90;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, std::size_t) {
  *blocks = 2;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, std::size_t,
                                                                   unsigned) {
  *blocks = 2;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
  *function = reinterpret_cast<void*>(&unsupported);
  if (status != nullptr) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
}
