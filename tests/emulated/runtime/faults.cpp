#include "faults.h"

#include <algorithm>

namespace emulated {

void Faults::arm(const std::string& text, long nth, int code) {
  const std::lock_guard lock(mutex_);
  armed_.push_back({text, nth, code});
}

void Faults::meet(const std::string& name) {
  bool hangs = false;
  unsigned long releases = 0;
  {
    const std::lock_guard lock(mutex_);
    releases = releases_;
    for (Armed& one : armed_) {
      if (name.find(one.text) == std::string::npos || --one.left != 0) continue;
      if (one.code == 0) hangs = true;
      if (one.code != 0) sticky_ = one.code;
    }
    std::erase_if(armed_, [](const Armed& one) { return one.left <= 0; });
  }
  if (hangs) hang(releases);
}

unsigned long Faults::releases() {
  const std::lock_guard lock(mutex_);
  return releases_;
}

void Faults::hang(unsigned long releases) {
  std::unique_lock lock(mutex_);
  ++hanging_;
  released_.wait(lock, [&] { return releases_ != releases; });
  --hanging_;
}

void Faults::release() {
  const std::lock_guard lock(mutex_);
  armed_.clear();
  sticky_ = 0;
  ++releases_;
  released_.notify_all();
}

Faults& faults() {
  static auto* the = new Faults;
  return *the;
}

}  // namespace emulated
