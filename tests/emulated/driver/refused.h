// A call that is to fail: EMULATED_REFUSE is "cuMemCreate 801", the name of a function and its answer.
#pragma once

#include <cstdlib>
#include <cstring>

inline int refused(const char* call) {
  const char* text = std::getenv("EMULATED_REFUSE");
  const std::size_t length = std::strlen(call);
  if (text == nullptr || std::strncmp(text, call, length) != 0 || text[length] != ' ') return 0;
  return std::atoi(text + length);
}

#define RETURN_IF_REFUSED(call)                                                        \
  do {                                                                                 \
    if (const int code = refused(call); code != 0) return static_cast<CUresult>(code); \
  } while (false)
