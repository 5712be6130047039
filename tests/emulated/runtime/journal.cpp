#include "journal.h"

#include <execinfo.h>

#include <cstdio>
#include <cstdlib>

#include "settings.h"

namespace emulated {
namespace {

constexpr std::size_t kComplaintsKept = 200;

std::string where() {
  constexpr int kOwnFrames = 3;
  void* frames[24];
  const int depth = backtrace(frames, 24);
  char** names = backtrace_symbols(frames, depth);
  std::string text;
  for (int i = kOwnFrames; i < depth; ++i) text += std::string(" <- ") + names[i];
  std::free(names);
  return text;
}

}  // namespace

void Journal::count(const std::string& what, long by) {
  const std::lock_guard lock(mutex_);
  counts_[what] += by;
}

void Journal::complain(const std::string& what) {
  const std::string text = settings().backtrace ? what + where() : what;
  if (settings().log) std::fprintf(stderr, "emulated CUDA complains: %s\n", text.c_str());
  const std::lock_guard lock(mutex_);
  if (complaints_.size() < kComplaintsKept) complaints_.push_back(text);
}

void Journal::reset() {
  const std::lock_guard lock(mutex_);
  counts_.clear();
  complaints_.clear();
}

std::string Journal::counts() const {
  const std::lock_guard lock(mutex_);
  std::string text;
  for (const auto& [what, number] : counts_) text += what + '\t' + std::to_string(number) + '\n';
  return text;
}

std::string Journal::complaints() const {
  const std::lock_guard lock(mutex_);
  std::string text;
  for (const std::string& line : complaints_) text += line + '\n';
  return text;
}

Journal& journal() {
  static auto* the = new Journal;
  return *the;
}

}  // namespace emulated
