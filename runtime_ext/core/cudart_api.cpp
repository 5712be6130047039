// The CUDA runtime's functions, found at run time, and memory that is registered with it.
#include <dlfcn.h>

#include "copy_batch.h"
#include "cuda_device.h"
#include "current_device.h"

namespace disco {
namespace {

// Values of the CUDA runtime's ABI; the tests compare them with its headers where those are installed.
constexpr unsigned kHostRegisterPortable = 1;
constexpr unsigned kHostRegisterReadOnly = 8;
constexpr int kReadOnlyRegistrationSupported = 113;  // an attribute of a device

template <typename Function>
void resolve(void* library, Function*& function, const char* name) {
  void* symbol = dlsym(library, name);
  if (symbol == nullptr)
    throw CudaError(name, -1, std::string(name) + " is missing from the CUDA runtime library");
  function = reinterpret_cast<Function*>(symbol);
}

void* find_runtime() {
  if (dlsym(RTLD_DEFAULT, "cudaEventQuery") != nullptr) return RTLD_DEFAULT;
  for (const char* name : {"libcudart.so.13", "libcudart.so.12", "libcudart.so"}) {
    if (void* library = dlopen(name, RTLD_LAZY | RTLD_LOCAL); library != nullptr) return library;
  }
  throw CudaError(
      "dlopen", -1,
      "no CUDA runtime: tried the running process, libcudart.so.13, libcudart.so.12 and libcudart.so");
}

// Null where the driver does not have it.
template <typename Function>
void resolve_driver(Function*& function, const char* name) {
  void* symbol = dlsym(RTLD_DEFAULT, name);
  if (symbol == nullptr) {
    if (void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL); driver != nullptr)
      symbol = dlsym(driver, name);
  }
  function = reinterpret_cast<Function*>(symbol);
}

template <typename Function>
void resolve_if_there(void* library, Function*& function, const char* name) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
}

GraphApi load_graph_api(void* library) {
  GraphApi api;
  resolve_if_there(library, api.begin_capture, "cudaStreamBeginCapture");
  resolve_if_there(library, api.end_capture, "cudaStreamEndCapture");
  resolve_if_there(library, api.is_capturing, "cudaStreamIsCapturing");
  resolve_if_there(library, api.instantiate, "cudaGraphInstantiateWithFlags");
  resolve_if_there(library, api.launch, "cudaGraphLaunch");
  resolve_if_there(library, api.exec_destroy, "cudaGraphExecDestroy");
  resolve_if_there(library, api.destroy, "cudaGraphDestroy");
  resolve_if_there(library, api.nodes, "cudaGraphGetNodes");
  resolve_if_there(library, api.node_type, "cudaGraphNodeGetType");
  resolve_if_there(library, api.memcpy_parameters, "cudaGraphMemcpyNodeGetParams");
  resolve_if_there(library, api.pointer_attributes, "cudaPointerGetAttributes");
  resolve_if_there(library, api.event_record_with_flags, "cudaEventRecordWithFlags");
  resolve_if_there(library, api.launch_host_function, "cudaLaunchHostFunc");
  resolve_if_there(library, api.memory_info, "cudaMemGetInfo");
  return api;
}

// Throws CudaError.
void require_read_only_registration(const CudartApi& api) {
  int device = 0, supported = 0;
  int code = api.get_device(&device);
  if (code == kSuccess) code = api.device_attribute(&supported, kReadOnlyRegistrationSupported, device);
  if (code != kSuccess)
    throw CudaError("cudaDeviceGetAttribute", code, cuda_error_text(api, "cudaDeviceGetAttribute", code));
  if (supported == 0)
    throw CudaError("cudaHostRegister", -1, "this device cannot register memory that it may only read");
}

}  // namespace

CudaError::CudaError(const std::string& call, int code, const std::string& text)
    : std::runtime_error(text), call_(call), code_(code) {}

CudartApi CudartApi::load() {
  void* library = find_runtime();
  CudartApi api;
  resolve(library, api.get_device, "cudaGetDevice");
  resolve(library, api.set_device, "cudaSetDevice");
  resolve(library, api.stream_create, "cudaStreamCreateWithFlags");
  resolve(library, api.stream_destroy, "cudaStreamDestroy");
  resolve(library, api.stream_synchronize, "cudaStreamSynchronize");
  resolve(library, api.stream_wait_event, "cudaStreamWaitEvent");
  resolve(library, api.event_create, "cudaEventCreateWithFlags");
  resolve(library, api.event_destroy, "cudaEventDestroy");
  resolve(library, api.event_record, "cudaEventRecord");
  resolve(library, api.event_query, "cudaEventQuery");
  resolve(library, api.event_elapsed, "cudaEventElapsedTime");
  resolve(library, api.memcpy_async, "cudaMemcpyAsync");
  resolve(library, api.memcpy_peer_async, "cudaMemcpyPeerAsync");
  resolve(library, api.can_access_peer, "cudaDeviceCanAccessPeer");
  resolve(library, api.enable_peer_access, "cudaDeviceEnablePeerAccess");
  resolve(library, api.device_attribute, "cudaDeviceGetAttribute");
  resolve(library, api.host_register, "cudaHostRegister");
  resolve(library, api.host_unregister, "cudaHostUnregister");
  resolve(library, api.get_last_error, "cudaGetLastError");
  resolve(library, api.error_string, "cudaGetErrorString");
  resolve_driver(api.primary_context_state, "cuDevicePrimaryCtxGetState");
  api.graphs = load_graph_api(library);
  api.batches = load_batch_api(library, reinterpret_cast<const void*>(api.memcpy_async));
  return api;
}

PinnedRegion::PinnedRegion(const CudartApi& api, void* begin, std::size_t bytes, Access access)
    : api_(api), begin_(begin) {
  unsigned flags = kHostRegisterPortable;
  if (access == Access::kRead) {
    require_read_only_registration(api_);
    flags |= kHostRegisterReadOnly;
  }
  if (const int code = api_.host_register(begin, bytes, flags); code != kSuccess) {
    throw CudaError(
        "cudaHostRegister", code,
        cuda_error_text(api_, "cudaHostRegister", code) + " (" + std::to_string(bytes) + " bytes)");
  }
}

PinnedRegion::~PinnedRegion() { api_.host_unregister(begin_); }

}  // namespace disco
