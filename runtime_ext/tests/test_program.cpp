#include <gtest/gtest.h>

#include <cstddef>
#include <limits>

#include "support.h"

namespace disco::testing {
namespace {

VertexDesc kernel(std::int32_t op, std::uint8_t flags = 0) {
  VertexDesc vertex;
  vertex.op = op;
  vertex.flags = flags;
  return vertex;
}

VertexDesc input(std::uint8_t flags = 0) {
  VertexDesc vertex;
  vertex.kind = Kind::kInput;
  vertex.flags = flags;
  return vertex;
}

Program build(const std::vector<VertexDesc>& vertices, const std::vector<Edge>& edges) {
  Scene scene;
  scene.vertices = vertices;
  scene.edges = edges;
  return scene.program();
}

TEST(Program, BuilderSortsEdgesAndDropsRepeats) {
  const Program program = build({kernel(0), kernel(1), kernel(2)}, {{1, 2}, {0, 2}, {0, 1}, {0, 2}});
  EXPECT_EQ(program.in_degree, (std::vector<std::int32_t>{0, 1, 2}));
  EXPECT_EQ(program.successors, (std::vector<std::int32_t>{1, 2, 2}));
  EXPECT_EQ(program.successors_of(0).size(), 2U);
  EXPECT_EQ(program.validate(1), "");
}

TEST(Program, EmptyIsValid) { EXPECT_EQ(build({}, {}).validate(1), ""); }

TEST(Program, BuilderRefusesEdgesOutsideTheProgram) {
  EXPECT_THROW(build({kernel(0)}, {{0, 1}}), std::invalid_argument);
  EXPECT_THROW(build({kernel(0)}, {{-1, 0}}), std::invalid_argument);
}

TEST(Program, ValidateNamesTheVertexAtFault) {
  EXPECT_NE(build({kernel(0), kernel(1)}, {{1, 0}}).validate(1).find("vertex 1"), std::string::npos);
  EXPECT_NE(build({kernel(0), kernel(1)}, {{0, 0}}).validate(1).find("serial order"), std::string::npos);
  EXPECT_NE(build({kernel(0), input()}, {{0, 1}}).validate(1).find("cannot wait"), std::string::npos);
  EXPECT_NE(build({kernel(-1)}, {}).validate(1).find("no op"), std::string::npos);
  EXPECT_NE(build({kernel(0, kLate)}, {}).validate(1).find("only inputs"), std::string::npos);
  EXPECT_NE(build({input(kLate), kernel(0), kernel(1, kOut)}, {{0, 1}, {1, 2}}).validate(1).find("vertex 2"),
            std::string::npos);
  VertexDesc elsewhere = kernel(0);
  elsewhere.device = 1;
  EXPECT_NE(build({elsewhere}, {}).validate(1).find("device 1 of 1"), std::string::npos);
  VertexDesc changing = input();
  changing.flags = kChanges;
  EXPECT_NE(build({changing}, {}).validate(1).find("change states"), std::string::npos);
  VertexDesc copy;
  copy.kind = Kind::kCopy;
  copy.bytes = 8;
  EXPECT_NE(build({copy}, {}).validate(1).find("without addresses"), std::string::npos);
  copy.bytes = 0;
  copy.flags = kChanges;
  EXPECT_NE(build({copy}, {}).validate(1).find("change states"), std::string::npos);
  copy.direction = Direction::kDeviceToHost;
  EXPECT_EQ(build({copy}, {}).validate(1), "");
  copy.direction = static_cast<Direction>(3);
  EXPECT_NE(build({copy}, {}).validate(1).find("no such kind"), std::string::npos);
}

TEST(Program, ValidateChecksArraysMadeByHand) {
  Program program = build({kernel(0), kernel(1)}, {{0, 1}});
  program.in_degree[1] = 2;
  EXPECT_NE(program.validate(1).find("in_degree"), std::string::npos);
  program.in_degree[1] = 1;
  program.successors[0] = 9;
  EXPECT_NE(program.validate(1).find("does not exist"), std::string::npos);
  program.successor_begin.back() = 7;
  EXPECT_NE(program.validate(1).find("successor_begin"), std::string::npos);
  program.flags.pop_back();
  EXPECT_NE(program.validate(1).find("differ in length"), std::string::npos);
}

constexpr Direction kLoad = Direction::kHostToDevice;
constexpr Direction kBack = Direction::kDeviceToHost;
constexpr Direction kBetween = Direction::kPeer;

// Two arenas, host memory and a weight in one block, with room between them, to be named by offsets.
struct Registered {
  std::vector<std::byte> block = std::vector<std::byte>(1024);
  Memory memory{{{block.data(), 128}, {block.data() + 256, 128}},
                {block.data() + 512, 64},
                {{block.data() + 768, 16}, {block.data() + 784, 16}},
                {{block.data() + 800, 16}, {block.data() + 816, 16}}};

  VertexDesc resident(std::int64_t dst, std::int64_t src, std::int64_t bytes) {
    VertexDesc vertex = copy(kLoad, dst, src, bytes);
    vertex.kind = Kind::kInput;
    return vertex;
  }
  VertexDesc copy(Direction direction, std::int64_t dst, std::int64_t src, std::int64_t bytes,
                  int device = 0) {
    VertexDesc vertex;
    vertex.kind = Kind::kCopy;
    vertex.direction = direction;
    vertex.device = device;
    vertex.dst = at(dst);
    vertex.src = at(src);
    vertex.bytes = bytes;
    return vertex;
  }
  VertexDesc change(std::int64_t dst, std::int64_t src, std::int64_t bytes) {
    VertexDesc vertex = copy(kBack, dst, src, bytes);
    vertex.flags = kChanges;
    return vertex;
  }
  void* at(std::int64_t offset) {
    return reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(block.data()) +
                                   static_cast<std::uintptr_t>(offset));
  }
  std::string judge(const VertexDesc& vertex) { return build({vertex}, {}).validate_memory(memory); }
};

TEST(Program, EveryCopyStaysInTheMemoryOfItsKind) {
  Registered at;
  EXPECT_EQ(at.judge(at.resident(112, 768, 16)), "");
  EXPECT_EQ(at.judge(at.copy(kLoad, 0, 512, 64)), "");
  EXPECT_EQ(at.judge(at.copy(kLoad, 96, 768, 32)), "");  // two weights, one behind the other
  EXPECT_EQ(at.judge(at.copy(kBack, 512, 64, 64)), "");
  EXPECT_EQ(at.judge(at.copy(kBetween, 256, 0, 128)), "");
  VertexDesc from_host = at.copy(kLoad, 0, 256, 128);
  EXPECT_EQ(at.judge(from_host), "");
  from_host.device = 1;  // whose lane brings it to that device
  EXPECT_NE(at.judge(from_host).find("writes"), std::string::npos);
  EXPECT_EQ(at.judge(at.copy(kLoad, -8, -8, 0)), "");
  const VertexDesc wrong[] = {
      at.resident(120, 768, 16),        // past the end of the arena
      at.resident(-8, 768, 16),         // before it
      at.resident(256, 768, 16),        // another device's arena
      at.resident(0, 512, 16),          // residents come from clean memory
      at.copy(kLoad, 0, 792, 16),       // past the end of a weight
      at.copy(kLoad, 0, 640, 16),       // memory of nobody
      at.copy(kLoad, 768, 512, 16),     // onto a weight
      at.copy(kBack, 568, 0, 16),       // past the end of the host's arena
      at.copy(kBack, 768, 0, 16),       // onto a weight
      at.copy(kBack, 512, 256, 16),     // from another device's
      at.copy(kBetween, 256, 768, 16),  // from the host
      at.copy(kBetween, 512, 0, 16),    // to the host
      at.copy(kBetween, 256, 120, 16),  // past the end of its source
      at.copy(kLoad, 0, 512, 64, 2),    // no such device
      at.copy(kBack, 512, 0, std::numeric_limits<std::int64_t>::max()),
      at.copy(kBack, std::numeric_limits<std::int64_t>::max(), 0, 16),
      at.copy(kBack, std::numeric_limits<std::int64_t>::min(), 0, 16),
      at.copy(kBack, 512, 0, -16),
  };
  for (const VertexDesc& vertex : wrong) EXPECT_NE(at.judge(vertex).find("vertex 0"), std::string::npos);
  EXPECT_NE(at.judge(wrong[0]).find("writes 16 bytes at"), std::string::npos);
  EXPECT_NE(at.judge(wrong[4]).find("reads 16 bytes at"), std::string::npos);
}

// Homes of states begin where the weights end, so that a copy which is a byte too long touches something
// else.
TEST(Program, OnlyCopiesThatChangeStatesWriteHomes) {
  Registered at;
  EXPECT_EQ(at.judge(at.change(800, 0, 16)), "");
  EXPECT_EQ(at.judge(at.change(816, 64, 16)), "");
  EXPECT_EQ(at.judge(at.change(512, 0, 64)), "");
  EXPECT_EQ(at.judge(at.copy(kLoad, 0, 816, 16)), "");
  EXPECT_EQ(at.judge(at.resident(0, 800, 16)), "");
  const VertexDesc wrong[] = {
      at.copy(kBack, 800, 0, 16),     // not known as a change
      at.change(784, 0, 16),          // onto a weight
      at.change(792, 0, 16),          // from a weight into a home
      at.change(808, 0, 16),          // from a home into the next
      at.change(824, 0, 16),          // past the end of a home
      at.change(800, 256, 16),        // from another device's arena
      at.copy(kLoad, 800, 512, 16),   // a reload onto a home
      at.copy(kLoad, 0, 808, 16),     // of two homes
      at.resident(0, 824, 16),        // past the end of a home
      at.copy(kLoad, 0, 784, 32),     // of a weight and a home
      at.copy(kBetween, 800, 0, 16),  // a transfer to a home
      at.copy(kBetween, 0, 800, 16),  // and from one
  };
  for (const VertexDesc& vertex : wrong) EXPECT_NE(at.judge(vertex).find("vertex 0"), std::string::npos);
}

TEST(Program, AHomeSharesMemoryWithNothing) {
  const VertexDesc none = kernel(0);
  for (const std::int64_t offset : {0, 120, 256, 383, 512, 575, 768, 783, 799, 784, 801, 815, 831}) {
    Registered at;
    at.memory.states.push_back({at.at(offset), 2});
    EXPECT_NE(at.judge(none).find("home of a state"), std::string::npos) << offset;
  }
  for (const std::int64_t offset : {384, 766, 832}) {
    Registered at;
    at.memory.states.push_back({at.at(offset), 2});
    EXPECT_EQ(at.judge(none), "") << offset;
  }
  Registered at;
  at.memory.states.push_back({at.at(700), 200});  // all around weights and homes
  EXPECT_NE(at.judge(none).find("home of a state"), std::string::npos);
  at.memory.states.back() = {at.at(800), 0};
  EXPECT_EQ(at.judge(none), "");
}

TEST(Program, MemoryThatIsNotRegisteredHoldsNothing) {
  const Ranges none({});
  int word = 0;
  EXPECT_TRUE(none.hold(nullptr, 0));
  EXPECT_FALSE(none.hold(&word, 1));
  const auto* top = reinterpret_cast<const void*>(std::numeric_limits<std::uintptr_t>::max() - 7);
  EXPECT_TRUE(Ranges({{top, 8}}).hold(top, 8));
  EXPECT_FALSE(Ranges({{top, 8}}).hold(top, 9));
}

TEST(Program, EngineRefusesAnInvalidProgram) {
  Scene scene;
  Checker checker(scene);
  EXPECT_THROW(Engine(build({kernel(-1)}, {}), host(), checker, {}), std::invalid_argument);
  EngineOptions options;
  options.lookahead = -1;
  EXPECT_THROW(Engine(build({kernel(0)}, {}), host(), checker, options), std::invalid_argument);
}

TEST(Schedule, AFixedOrderPutsWhatOpensTheGateFirst) {
  // 0 late, 1 waits for it, 2 is handed out: in serial order a single stream would wait for the gate for
  // ever.
  const Program program = build({input(kLate), kernel(0), kernel(1, kOut), kernel(2)}, {{0, 1}, {1, 3}});
  const auto devices = host();
  NoOps runner;
  const Schedule schedule(program, devices, runner, {});
  EXPECT_EQ(schedule.serial, (std::vector<std::int32_t>{2, 1, 3}));
}

}  // namespace
}  // namespace disco::testing
