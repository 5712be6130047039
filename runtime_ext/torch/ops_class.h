// The op table as a torchbind class: what disco_accel/measure and disco_accel/execute/program.py fill.
#pragma once

#include <torch/custom_class.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ops.h"
#include "planned_alloc.h"
#include "program_tables.h"

namespace disco {

inline std::size_t byte_count(std::int64_t nbytes) {
  if (nbytes < 0) throw std::invalid_argument("a size of " + std::to_string(nbytes) + " bytes");
  return static_cast<std::size_t>(nbytes);
}

struct TorchOps : torch::CustomClassHolder {
  explicit TorchOps(const std::string& device) : table(c10::Device(device)) {
    table.backend().install_allocator();
  }

  std::int64_t add_fixed(std::int64_t address, std::int64_t nbytes) {
    return table.add_fixed(reinterpret_cast<void*>(address), byte_count(nbytes));
  }
  std::int64_t add_external(std::int64_t nbytes) { return table.add_external(byte_count(nbytes)); }
  std::int64_t add_op(const std::string& name, const std::string& overload, const c10::IValue& args,
                      const std::string& label) {
    return table.add_op(name, overload, args, label);
  }
  // Where all is that is added from now on: a device of the table's kind, or in host memory beside it.
  void set_device(const std::string& device) { table.set_device(c10::Device(device)); }
  void set_host() {
    table.set_host();
    host_backend().install_allocator();
  }
  void expect_result(std::int64_t op, std::int64_t mode, const c10::IValue& where) {
    table.expect_result(checked(op), static_cast<ResultMode>(mode), where);
  }
  void set_schedule(std::int64_t op, const Ints& addresses, const Ints& sizes) {
    std::vector<PlannedBlock> blocks;
    for (std::size_t i = 0; i < addresses.size(); ++i) {
      blocks.push_back({reinterpret_cast<void*>(addresses[i]), byte_count(sizes.at(i))});
    }
    table.set_schedule(checked(op), std::move(blocks));
  }
  void set_loose(std::int64_t op, std::int64_t address, std::int64_t nbytes) {
    table.set_loose(checked(op), {reinterpret_cast<void*>(address), byte_count(nbytes)});
  }
  void set_rng(std::int64_t op, std::int64_t slot, bool replay) { table.set_rng(checked(op), slot, replay); }
  void set_varying(std::int64_t op, const c10::IValue& longest, const c10::IValue& shortest) {
    table.set_varying(checked(op), longest, shortest);
  }
  void set_length(std::int64_t below, std::int64_t span) { table.set_length(below, span); }
  void resize_external(std::int64_t storage, std::int64_t nbytes) {
    table.resize_external(storage, byte_count(nbytes));
  }
  void run(std::int64_t op) { table.run(checked(op)); }
  bool is_direct(std::int64_t op) const { return table.is_direct(checked(op)); }

  // (block sizes, born, freed, returned tensors, block of each returned tensor; undefined tensors have block
  // -2)
  std::tuple<Ints, Ints, Ints, std::vector<at::Tensor>, Ints> record(std::int64_t op) {
    const RecordedCall call = table.record(checked(op));
    Ints sizes, born, freed, where;
    std::vector<at::Tensor> tensors;
    for (const RecordedBlock& block : call.blocks) {
      sizes.push_back(static_cast<std::int64_t>(block.nbytes));
      born.push_back(block.born);
      freed.push_back(block.freed);
    }
    for (std::size_t i = 0; i < call.results.size(); ++i) {
      const bool defined = call.results[i].defined();
      where.push_back(defined ? call.result_blocks[i] : -2);
      if (defined) tensors.push_back(call.results[i]);
    }
    return {sizes, born, freed, tensors, where};
  }
  // Seconds of each of `repeats` runs.
  std::vector<double> time(std::int64_t op, std::int64_t repeats) {
    std::vector<double> seconds;
    for (std::int64_t i = 0; i < repeats; ++i) {
      const std::int64_t start = now_ns();
      table.run(checked(op));
      seconds.push_back(static_cast<double>(now_ns() - start) * 1e-9);
    }
    return seconds;
  }
  std::int32_t checked(std::int64_t op) const {
    if (op < 0 || op >= static_cast<std::int64_t>(table.size()))
      throw std::invalid_argument("no op " + std::to_string(op));
    return static_cast<std::int32_t>(op);
  }

  OpTable table;
};

}  // namespace disco
