// What PyTorch asks of the driver itself; the rest of what it links to is generated and answers "not
// supported".
#include <dlfcn.h>

namespace {

constexpr int kSuccess = 0;
char context;  // its address stands for every device's primary context

}  // namespace

extern "C" {

int cuInit(unsigned) { return kSuccess; }

int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return kSuccess;
}

// The runtime knows: it makes a device's context at the first call that needs one.
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  using Ask = int (*)(int);
  const auto ask = reinterpret_cast<Ask>(dlsym(RTLD_DEFAULT, "emuHasContext"));
  *flags = 0;
  *active = ask != nullptr ? ask(device) : 0;
  return kSuccess;
}

int cuDevicePrimaryCtxRetain(void** found, int) {
  *found = &context;
  return kSuccess;
}

int cuCtxGetCurrent(void** found) {
  *found = &context;
  return kSuccess;
}

int cuCtxSetCurrent(void*) { return kSuccess; }

int cuGetErrorString(int, const char** text) {
  *text = "emulated driver";
  return kSuccess;
}
}
