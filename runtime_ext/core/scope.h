// What holds when memory runs out: what a scope has raised is lowered, and an exception can still be told of.
#pragma once

#include <exception>
#include <new>
#include <string>
#include <utility>

namespace disco {

// Runs `undo` when its scope ends, however it ends.
template <typename Undo>
class [[nodiscard]] Finally {
 public:
  explicit Finally(Undo undo) : undo_(std::move(undo)) {}
  ~Finally() { undo_(); }
  Finally(const Finally&) = delete;
  Finally& operator=(const Finally&) = delete;

 private:
  Undo undo_;
};

// A string holds so few characters without an allocation.
inline constexpr const char* kOutOfMemory = "out of memory";

inline std::string copied(const char* text) noexcept {
  try {
    return text;
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}

inline std::string what_of(const std::exception& error) noexcept {
  return copied(dynamic_cast<const std::bad_alloc*>(&error) != nullptr ? kOutOfMemory : error.what());
}

}  // namespace disco
