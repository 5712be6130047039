// What PyTorch asks of the driver itself; what is asked of it besides is in memory.cpp and work.cpp, and the
// rest of what PyTorch links to is generated and answers "not supported".
#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

extern "C" std::size_t emuComplaints(char* text, std::size_t room);

namespace {

constexpr int kSuccess = 0;
char context;  // its address stands for every device's primary context

// A process without PyTorch leaves its complaints in a file too (autoload.py).
void report() {
  char text[1 << 16];
  const char* folder = std::getenv("EMULATED_REPORTS");
  if (folder == nullptr || emuComplaints(text, sizeof text) <= 1) return;
  const std::string path = std::string(folder) + "/" + std::to_string(getpid()) + ".txt";
  if (std::FILE* file = std::fopen(path.c_str(), "wx")) {
    std::fprintf(file, "a process that uses the driver alone\n%s", text);
    std::fclose(file);
  }
}

}  // namespace

extern "C" {

int cuInit(unsigned) {
  static const int registered = std::atexit(report);
  return registered;
}

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

void emuDriverContext(bool set);

int cuCtxSetCurrent(void* made) {
  emuDriverContext(made != nullptr);
  return kSuccess;
}

int cuGetErrorString(int, const char** text) {
  *text = "emulated driver";
  return kSuccess;
}
}
