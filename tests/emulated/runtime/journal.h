// Counts of what was called, and complaints about what no correct program does.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace emulated {

class Journal {
 public:
  void count(const std::string& what, long by = 1);
  void complain(const std::string& what);
  void reset();
  std::string counts() const;      // lines "name<tab>number"
  std::string complaints() const;  // lines

 private:
  mutable std::mutex mutex_;
  std::map<std::string, long> counts_;
  std::vector<std::string> complaints_;
};

// Never destroyed: threads of streams outlive main().
Journal& journal();

}  // namespace emulated
