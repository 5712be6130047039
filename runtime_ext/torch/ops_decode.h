// Parts of encoded arguments (native/op_encoding.py).
#pragma once

#include <ATen/core/ivalue.h>

#include <string>

namespace disco {

// Throws std::invalid_argument.
[[noreturn]] void bad_argument(const std::string& what);

// The elements of an encoded tuple. Throws std::invalid_argument for another value.
c10::ArrayRef<c10::IValue> tuple_elements(const c10::IValue& value);

}  // namespace disco
