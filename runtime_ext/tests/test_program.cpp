#include <gtest/gtest.h>

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
  VertexDesc copy;
  copy.kind = Kind::kReload;
  copy.bytes = 8;
  EXPECT_NE(build({copy}, {}).validate(1).find("without addresses"), std::string::npos);
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
  const Schedule schedule(program, devices, {});
  EXPECT_EQ(schedule.serial, (std::vector<std::int32_t>{2, 1, 3}));
}

}  // namespace
}  // namespace disco::testing
