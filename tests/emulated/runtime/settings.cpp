#include "settings.h"

#include <cstdlib>
#include <string_view>

namespace emulated {
namespace {

double number(const char* name, double otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? std::atof(text) : otherwise;
}

Peers peers() {
  const char* text = std::getenv("EMULATED_PEERS");
  const std::string_view word = text != nullptr ? text : "";
  if (word == "none") return Peers::kNone;
  return word == "wrong" ? Peers::kWrong : Peers::kRight;
}

}  // namespace

const Settings& settings() {
  static const Settings read{
      .devices = static_cast<int>(number("EMULATED_DEVICES", 1)),
      .device_bytes = static_cast<std::size_t>(number("EMULATED_GIB", 8) * (1ull << 30)),
      .jitter_us = number("EMULATED_JITTER_US", 0),
      .seed = static_cast<std::uint64_t>(number("EMULATED_SEED", 0)),
      .link_gb_s = number("EMULATED_LINK_GB_S", 0),
      .peers = peers(),
      .cudart = static_cast<int>(number("EMULATED_CUDART", 13000)),
      .log = number("EMULATED_LOG", 0) != 0,
      .backtrace = number("EMULATED_BACKTRACE", 0) != 0,
  };
  return read;
}

}  // namespace emulated
