#include "program_tables.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "engine_settings.h"

namespace disco {
namespace {

std::string text_of(c10::ArrayRef<std::int64_t> values) {
  std::string text = "[";
  for (const std::int64_t value : values) text += (text.size() > 1 ? ", " : "") + std::to_string(value);
  return text + "]";
}

bool same_strides(const at::Tensor& tensor, const Ints& stride) {
  for (std::int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1 && tensor.stride(d) != stride[static_cast<std::size_t>(d)]) return false;
  }
  return true;
}

void check_table(const at::Tensor& table, std::int64_t columns, const char* name) {
  if (table.scalar_type() != at::kLong || !table.device().is_cpu() || !table.is_contiguous() ||
      table.dim() != 2 || table.size(1) != columns) {
    throw std::invalid_argument(std::string(name) + " must be a contiguous int64 table [n, " +
                                std::to_string(columns) + "] on the CPU");
  }
}

// `value` as a T; what does not fit in its Whole is refused, not cut.
template <typename T, typename Whole = T>
T narrow(std::int64_t value, const char* what) {
  if (value < std::numeric_limits<Whole>::min() || value > std::numeric_limits<Whole>::max()) {
    throw std::invalid_argument(std::string("program: ") + what + " " + std::to_string(value));
  }
  return static_cast<T>(value);
}

Range range_of(const at::Tensor& tensor) {
  return {tensor.const_data_ptr(), static_cast<std::int64_t>(tensor.nbytes())};
}

}  // namespace

Program read_program(const at::Tensor& vertices, const at::Tensor& edges) {
  check_table(vertices, kVertexColumns, "vertices");
  check_table(edges, kEdgeColumns, "edges");
  ProgramBuilder builder;
  builder.reserve(static_cast<std::size_t>(vertices.size(0)), static_cast<std::size_t>(edges.size(0)));
  const auto* row = vertices.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < vertices.size(0); ++i, row += kVertexColumns) {
    builder.add({narrow<Kind, std::uint8_t>(row[0], "kind"), narrow<std::int32_t>(row[1], "device"),
                 narrow<std::int32_t>(row[3], "op"), reinterpret_cast<void*>(row[4]),
                 reinterpret_cast<const void*>(row[5]), row[6], narrow<std::uint8_t>(row[8], "flags"),
                 row[2] < 0 ? Direction::kHostToDevice : narrow<Direction, std::uint8_t>(row[2], "lane"),
                 row[7]});
  }
  const auto* edge = edges.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < edges.size(0); ++i, edge += kEdgeColumns) {
    builder.edge(narrow<std::int32_t>(edge[0], "edge"), narrow<std::int32_t>(edge[1], "edge"));
  }
  return std::move(builder).build();
}

std::vector<Copied> read_copied(const at::Tensor& copied, const Program& program, const OpTable& table) {
  check_table(copied, kCopiedColumns, "copied");
  std::vector<Copied> rows;
  const auto* row = copied.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < copied.size(0); ++i, row += kCopiedColumns) {
    if (row[1] < 0 || row[1] >= program.size() || program.kind[row[1]] != Kind::kCopy ||
        static_cast<std::size_t>(program.bytes[row[1]]) > table.external_bytes(row[0])) {
      throw std::invalid_argument("vertex " + std::to_string(row[1]) +
                                  " is no transfer within external storage " + std::to_string(row[0]));
    }
    rows.push_back({row[0], static_cast<std::int32_t>(row[1]), row[2] != 0});
  }
  const auto by_storage = [](const Copied& a, const Copied& b) { return a.storage < b.storage; };
  std::stable_sort(rows.begin(), rows.end(), by_storage);
  return rows;
}

Memory memory_of(const std::vector<at::Tensor>& arenas, const at::Tensor& host,
                 const std::vector<at::Tensor>& clean, const std::vector<at::Tensor>& states) {
  Memory memory;
  for (const at::Tensor& arena : arenas) memory.arenas.push_back(range_of(arena));
  memory.host = range_of(host);
  for (const at::Tensor& weights : clean) memory.clean.push_back(range_of(weights));
  for (const at::Tensor& home : states) memory.states.push_back(range_of(home));
  return memory;
}

void check_program(const Program& program, const OpTable& table, const Memory& memory,
                   const std::vector<Place>& places) {
  std::string message = program.validate(static_cast<int>(memory.arenas.size()));
  if (message.empty()) message = program.validate_memory(memory);
  if (!message.empty()) throw std::invalid_argument(message);
  for (std::int32_t v = 0; v < program.size(); ++v) {
    if (program.kind[v] == Kind::kKernel && static_cast<std::size_t>(program.op[v]) >= table.size()) {
      throw std::invalid_argument("vertex " + std::to_string(v) + " (kernel): no op " +
                                  std::to_string(program.op[v]));
    }
    if (program.kind[v] == Kind::kKernel && table.place(program.op[v]) != places.at(program.device[v])) {
      throw std::invalid_argument("vertex " + std::to_string(v) + " (kernel): device " +
                                  std::to_string(program.device[v]) + " does not run " +
                                  table.label(program.op[v]));
    }
  }
  table.check_memory(memory, places);
}

void check_layout(const at::Tensor& tensor, const ExternalLayout& planned) {
  if (tensor.scalar_type() != planned.dtype) {
    throw std::invalid_argument(std::string("is ") + c10::toString(tensor.scalar_type()) +
                                ", the plan reads " + c10::toString(planned.dtype));
  }
  if (!planned.known_layout) return;
  if (tensor.sizes() != planned.shape) {
    throw std::invalid_argument("has shape " + text_of(tensor.sizes()) + ", the plan was made for " +
                                text_of(planned.shape));
  }
  if (tensor.numel() > 0 && !same_strides(tensor, planned.stride)) {
    throw std::invalid_argument("has strides " + text_of(tensor.strides()) + ", the plan was made for " +
                                text_of(planned.stride));
  }
}

}  // namespace disco
