// Reads and checks what an engine is made from: the program's int64 tables, its memory, its external inputs.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "../core/program.h"
#include "ops.h"

namespace disco {

using Ints = std::vector<std::int64_t>;

// Transfer `vertex` reads external storage `storage`, or writes to it.
struct Copied {
  std::int64_t storage;
  std::int32_t vertex;
  bool writes;
};

// `vertices` is int64 [n, kVertexColumns], `edges` int64 [m, kEdgeColumns]. Throws std::invalid_argument.
Program read_program(const at::Tensor& vertices, const at::Tensor& edges);

// `copied` is int64 [k, kCopiedColumns]. Throws std::invalid_argument for a row that is no such transfer, or
// one of more bytes than the storage has.
std::vector<Copied> read_copied(const at::Tensor& copied, const Program& program, const OpTable& table);

// The stretches of memory under tensors: arenas by device, the host's arena, clean memory, homes of states.
Memory memory_of(const std::vector<at::Tensor>& arenas, const at::Tensor& host,
                 const std::vector<at::Tensor>& clean, const std::vector<at::Tensor>& states);

// The last word on a plan: whatever made it, nothing that it runs touches other memory than `memory`, and
// each op runs where it was put; `places`: by device. Throws std::invalid_argument.
void check_program(const Program& program, const OpTable& table, const Memory& memory,
                   const std::vector<Place>& places);

// What an external tensor must look like. Without `known_layout` only the dtype counts.
struct ExternalLayout {
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  Ints shape, stride;
  bool known_layout = false;
};

// Throws std::invalid_argument that says what `tensor` is and what was planned.
void check_layout(const at::Tensor& tensor, const ExternalLayout& planned);

}  // namespace disco
