// The messages of disco_accel/store/messages.py, of which this library sends one kind. Little-endian, as all
// machines are that CUDA runs on.
#pragma once
#include <cstddef>
#include <cstdint>

namespace disco::interpose {

inline constexpr std::uint8_t kVersion = 1;
inline constexpr std::uint8_t kFirstClass = 32;

struct Request {
  std::uint8_t version, opcode;
  std::uint16_t device;
  std::uint32_t number;
  std::int64_t amount;
  std::uint64_t object;
  std::int64_t max_useful;
  std::uint8_t dtype, dimensions, zeros[6];
  std::int64_t shape[8];
};
static_assert(sizeof(Request) == 104 && offsetof(Request, amount) == 8 && offsetof(Request, dtype) == 32 &&
              offsetof(Request, shape) == 40);

struct Reply {
  std::uint8_t version, status;
  std::uint16_t device;
  std::uint32_t number;
  std::int64_t amount;
  std::uint64_t object;
  std::uint8_t dtype, dimensions, zeros[6];
  std::int64_t figures[8];
  char text[192];
};
static_assert(sizeof(Reply) == 288 && offsetof(Reply, text) == 96);

// `bytes` more (negative: less) of `device` are held by this process. The store answers only to refuse.
inline Request first_class(int device, std::int64_t bytes) {
  Request message = {};
  message.version = kVersion;
  message.opcode = kFirstClass;
  message.device = static_cast<std::uint16_t>(device);
  message.amount = bytes;
  return message;
}

inline bool refuses(const Reply& reply, std::size_t size) {
  return size != sizeof(Reply) || reply.status != 0;
}

}  // namespace disco::interpose
