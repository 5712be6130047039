// What Python encodes an op's arguments as (native/op_encoding.py), turned into the values of its schema.
#include "ops_decode.h"

#include <ATen/core/List.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <stdexcept>
#include <utility>

#include "ops.h"
#include "wrapped_numbers.h"

namespace disco {

using c10::IValue;
using c10::TypeKind;

void bad_argument(const std::string& what) { throw std::invalid_argument(what); }

c10::ArrayRef<IValue> tuple_elements(const IValue& value) {
  if (!value.isTuple()) bad_argument("expected an encoded tuple, got " + value.tagKind());
  return value.toTupleRef().elements().asArrayRef();
}

namespace {

std::vector<std::int64_t> int_tuple(const IValue& value) {
  std::vector<std::int64_t> out;
  for (const IValue& element : tuple_elements(value)) out.push_back(element.toInt());
  return out;
}

c10::ScalarType scalar_type(const std::string& name) {
  const auto& names = c10::getStringToDtypeMap();
  const auto found = names.find(name);
  if (found == names.end()) bad_argument("unknown dtype '" + name + "'");
  return found->second;
}

std::int64_t layout_number(const std::string& name) {
  if (name == "strided") return static_cast<std::int64_t>(c10::Layout::Strided);
  bad_argument("layout '" + name + "' is not supported: only strided is");
}

std::int64_t memory_format_number(const std::string& name) {
  if (name == "contiguous_format") return static_cast<std::int64_t>(c10::MemoryFormat::Contiguous);
  if (name == "preserve_format") return static_cast<std::int64_t>(c10::MemoryFormat::Preserve);
  if (name == "channels_last") return static_cast<std::int64_t>(c10::MemoryFormat::ChannelsLast);
  if (name == "channels_last_3d") return static_cast<std::int64_t>(c10::MemoryFormat::ChannelsLast3d);
  bad_argument("unknown memory format '" + name + "'");
}

}  // namespace

// A call was captured on the table's device, and runs where it is put.
c10::Device OpTable::decode_device(const std::string& name) const {
  const c10::Device device(name);
  return device == device_ && place_.side == Side::kDevice ? place_.device : device;
}

IValue OpTable::decode_enum(const std::string& kind, const std::string& value) const {
  if (kind == "dtype") return static_cast<std::int64_t>(scalar_type(value));
  if (kind == "layout") return layout_number(value);
  if (kind == "device") return decode_device(value);
  if (kind == "memory_format") return memory_format_number(value);
  bad_argument("unknown enum kind '" + kind + "'");
}

at::Tensor OpTable::decode_tensor(c10::ArrayRef<IValue> encoded) const {
  std::vector<std::int64_t> key{encoded.at(1).toInt(),
                                static_cast<std::int64_t>(scalar_type(encoded.at(2).toStringRef())),
                                encoded.at(5).toInt()};
  for (const std::size_t part : {3U, 4U}) {
    const std::vector<std::int64_t> numbers = int_tuple(encoded.at(part));
    key.insert(key.end(), numbers.begin(), numbers.end());
  }
  const auto found = tensors_.find(key);
  if (found != tensors_.end()) return found->second;
  return tensors_.emplace(std::move(key), make_tensor(encoded)).first->second;
}

at::Tensor OpTable::make_tensor(c10::ArrayRef<IValue> encoded) const {
  const std::int64_t storage = encoded.at(1).toInt();
  const c10::ScalarType dtype = scalar_type(encoded.at(2).toStringRef());
  const std::vector<std::int64_t> shape = int_tuple(encoded.at(3));
  const std::vector<std::int64_t> stride = int_tuple(encoded.at(4));
  const std::int64_t offset = encoded.at(5).toInt();
  std::int64_t extent = offset + 1;
  bool empty = false;
  if (offset < 0) bad_argument("a tensor begins before its storage");
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] < 0 || stride.at(d) < 0) bad_argument("a tensor has a negative size or stride");
    extent += (shape[d] - 1) * stride.at(d);
    empty = empty || shape[d] == 0;
  }
  if (!empty && static_cast<std::size_t>(extent) * c10::elementSize(dtype) > storages_.at(storage).nbytes()) {
    bad_argument("a tensor reaches past the " + std::to_string(storages_[storage].nbytes()) +
                 " bytes of its storage");
  }
  // An inference tensor has no autograd keys and no version counter: nothing in a step can reach autograd.
  const c10::InferenceMode inference;
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storages_[storage]), c10::DispatchKeySet(backend_of(places_[storage].side).key()),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(shape, stride, offset);
  return tensor;
}

IValue OpTable::decode_list(c10::ArrayRef<IValue> encoded, const c10::TypePtr& element) const {
  std::vector<IValue> values;
  for (std::size_t i = 1; i < encoded.size(); ++i) values.push_back(decode(encoded[i], element));
  c10::impl::GenericList list(element->kind() == TypeKind::SymIntType ? c10::TypePtr(c10::IntType::get())
                                                                      : element);
  for (IValue& value : values) list.push_back(std::move(value));
  return list;
}

IValue OpTable::decode(const IValue& encoded, const c10::TypePtr& type) const {
  if (type->kind() == TypeKind::OptionalType) {
    if (encoded.isNone()) return encoded;
    return decode(encoded, type->castRaw<c10::OptionalType>()->getElementType());
  }
  if (encoded.isTuple()) {
    const c10::ArrayRef<IValue> parts = tuple_elements(encoded);
    const std::string& tag = parts.at(0).toStringRef();
    if (tag == "tensor") return decode_tensor(parts);
    if (tag == "enum") return decode_enum(parts.at(1).toStringRef(), parts.at(2).toStringRef());
    if (tag != "list") bad_argument("unknown tag '" + tag + "'");
    if (type->kind() != TypeKind::ListType) bad_argument("a list given for " + type->str());
    return decode_list(parts, type->castRaw<c10::ListType>()->getElementType());
  }
  switch (type->kind()) {
    case TypeKind::FloatType:
      if (encoded.isInt()) return static_cast<double>(encoded.toInt());
      if (encoded.isDouble()) return encoded;
      break;
    case TypeKind::IntType:
    case TypeKind::SymIntType:
      if (encoded.isInt()) return encoded;
      if (encoded.isBool()) return static_cast<std::int64_t>(encoded.toBool());
      break;
    case TypeKind::BoolType:
      if (encoded.isBool()) return encoded;
      break;
    case TypeKind::NumberType:
      if (encoded.isScalar()) return encoded;
      break;
    case TypeKind::StringType:
      if (encoded.isString()) return encoded;
      break;
    case TypeKind::DeviceObjType:
      if (encoded.isString()) return decode_device(encoded.toStringRef());
      break;
    case TypeKind::ListType:
      // Schemas such as `int[1] dim` take a bare number.
      return decode_list(std::array{IValue("list"), encoded},
                         type->castRaw<c10::ListType>()->getElementType());
    case TypeKind::TensorType:
      // An undefined tensor: what a kernel gets for an optional gradient.
      if (encoded.isNone()) return at::Tensor();
      if (encoded.isScalar()) return wrapped_number(encoded.toScalar());
      break;
    default:
      break;
  }
  bad_argument("a value of kind " + encoded.tagKind() + " given for " + type->str());
}

}  // namespace disco
