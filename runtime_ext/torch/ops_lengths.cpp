// Ops that depend on a length, such as that of a cache: each number in their arguments is affine in it.
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../core/scope.h"
#include "ops.h"
#include "ops_decode.h"

namespace disco {
namespace {

using c10::IValue;

// The parts of an encoded call at one length.
constexpr std::size_t kArguments = 0;
constexpr std::size_t kResults = 1;
constexpr std::size_t kSizes = 2;
constexpr std::size_t kParts = 3;

// The value `below` the longest length, of values at the longest and at the shortest, `span` below it.
IValue between(const IValue& longest, const IValue& shortest, std::int64_t below, std::int64_t span) {
  if (longest.isTuple()) {
    const c10::ArrayRef<IValue> one = tuple_elements(longest);
    const c10::ArrayRef<IValue> other = tuple_elements(shortest);
    if (one.size() != other.size()) bad_argument("a call has another form at another length");
    std::vector<IValue> values;
    values.reserve(one.size());
    for (std::size_t i = 0; i < one.size(); ++i) values.push_back(between(one[i], other[i], below, span));
    return c10::ivalue::Tuple::create(std::move(values));
  }
  if (!longest.isInt()) return longest;
  return longest.toInt() - (longest.toInt() - shortest.toInt()) / span * below;
}

}  // namespace

void OpTable::set_varying(std::int32_t index, IValue longest, IValue shortest) {
  PreparedOp& op = ops_.at(index);
  if (op.rng) bad_argument(op.label + ": draws random numbers, and depends on a length");
  const c10::ArrayRef<IValue> large = tuple_elements(longest);
  const c10::ArrayRef<IValue> small = tuple_elements(shortest);
  if (large.size() != kParts || small.size() != kParts) bad_argument(op.label + ": no encoded call");
  const c10::ArrayRef<IValue> most = tuple_elements(large[kSizes]);
  const c10::ArrayRef<IValue> least = tuple_elements(small[kSizes]);
  bool within = most.size() == op.schedule.size() && least.size() == most.size();
  for (std::size_t i = 0; within && i < most.size(); ++i) {
    within = most[i].toInt() == static_cast<std::int64_t>(op.schedule[i].nbytes) && least[i].toInt() >= 0 &&
             least[i].toInt() <= most[i].toInt();
  }
  if (!within) bad_argument(op.label + ": allocates more at a smaller length than at the longest");
  op.varies = true;
  varying_.push_back({static_cast<std::size_t>(index), std::move(longest), std::move(shortest)});
}

PreparedOp OpTable::at_length(const PreparedOp& op, const IValue& encoded) const {
  const c10::ArrayRef<IValue> parts = tuple_elements(encoded);
  PreparedOp made = prepared(op.handle, parts[kArguments], op.label);
  const c10::ArrayRef<IValue> places = tuple_elements(parts[kResults]);
  for (std::size_t i = 0; i < op.results.size(); ++i) {
    made.results.push_back(expected(op.results[i].mode, places.at(i), made));
  }
  const c10::ArrayRef<IValue> sizes = tuple_elements(parts[kSizes]);
  for (std::size_t i = 0; i < op.schedule.size(); ++i) {
    made.schedule.push_back({op.schedule[i].ptr, static_cast<std::size_t>(sizes.at(i).toInt())});
  }
  made.loose = op.loose;
  made.scheduled = op.scheduled;
  made.varies = true;
  return made;
}

void OpTable::set_length(std::int64_t below, std::int64_t span) {
  if (span < 1 || below < 0 || below > span) bad_argument("a length that the plan is not for");
  const Place before = place_;
  const Finally back([&] { place_ = before; });
  std::vector<PreparedOp> made;
  made.reserve(varying_.size());
  for (const VaryingOp& varying : varying_) {
    const PreparedOp& op = ops_[varying.op];
    place_ = op.place;
    made.push_back(at_length(op, between(varying.longest, varying.shortest, below, span)));
  }
  for (std::size_t i = 0; i < made.size(); ++i) ops_[varying_[i].op] = std::move(made[i]);
  // Of the calls before: each length would leave some behind.
  std::erase_if(tensors_, [](const auto& entry) { return entry.second.use_count() == 1; });
}

void OpTable::resize_external(std::int64_t storage, std::size_t nbytes) {
  external_bytes(storage);
  storages_[static_cast<std::size_t>(storage)].unsafeGetStorageImpl()->set_nbytes(nbytes);
}

}  // namespace disco
