// Faults and hangs that a test asks for, and the sticky error that a fault leaves behind.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <vector>

namespace emulated {

class Faults {
 public:
  // The `nth` work whose name contains `text` fails with `code`, or hangs if that is 0.
  void arm(const std::string& text, long nth, int code);
  // Called by a stream's thread before each piece of work; returns when nothing holds it.
  void meet(const std::string& name);
  unsigned long releases();           // how often release() was called
  void hang(unsigned long releases);  // returns once it was called more often
  void release();                     // everything goes on, as if nothing had happened
  void fail(int code) { sticky_ = code; }
  int sticky() const { return sticky_; }
  int hanging() const { return hanging_; }  // streams

 private:
  struct Armed {
    std::string text;
    long left;
    int code;
  };
  std::mutex mutex_;
  std::condition_variable released_;
  unsigned long releases_ = 0;
  std::vector<Armed> armed_;
  std::atomic<int> sticky_{0}, hanging_{0};
};

Faults& faults();

}  // namespace emulated
