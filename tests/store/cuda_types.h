// The types of a function, as far as a call depends on them: of each parameter and of the result its size,
// and whether it is a number with a point, a structure, or neither.
#pragma once
#include <cstddef>
#include <type_traits>

template <typename Type>
constexpr unsigned long kind_of() {
  if constexpr (std::is_void_v<Type>) {
    return 1;
  } else {
    return sizeof(Type) * 4 + (std::is_class_v<Type> ? 2 : std::is_floating_point_v<Type> ? 1 : 0);
  }
}

template <typename Function>
struct Types;
template <typename Result, typename... Parameters>
struct Types<Result(Parameters...)> {
  static constexpr unsigned long value() {
    unsigned long mixed = kind_of<Result>();
    ((mixed = mixed * 1009 + kind_of<Parameters>()), ...);
    return mixed;
  }
};
