// SPDX-License-Identifier: Apache-2.0
// A program that a rank starts by exec inherits no descriptor of Weft or of the libraries below it.
#include <cstdio>
#include <set>
#include <stdexcept>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/ops/ones.h>

#include <weft/engine/call/function.h>
#include <weft/engine/group/process_group.h>
#include <weft/engine/launch/spawn.h>
#include <weft/engine/rpc/agent.h>
#include <weft/transport/registry.h>

namespace weft {
namespace {

// Descriptors of a program that is started now, such as "0 -> /dev/null", without the pipe that it
// prints to and the folder that it reads.
std::set<std::string> open_in_a_program() {
  FILE* const program = ::popen("exec ls -l /proc/self/fd", "r");
  if (program == nullptr) throw std::runtime_error("popen");
  std::set<std::string> found;
  for (char line[512]; std::fgets(line, sizeof line, program) != nullptr;) {
    const std::string text = line;
    const auto arrow = text.find(" -> ");
    if (arrow == std::string::npos || text.find("/proc/", arrow) != std::string::npos) continue;
    const std::string number =
        text.substr(text.rfind(' ', arrow - 1) + 1, arrow - text.rfind(' ', arrow - 1) - 1);
    if (number != "1") found.insert(text.substr(text.rfind(' ', arrow - 1) + 1));
  }
  ::pclose(program);
  return found;
}

void expect_nothing_inherited(const std::string& backend) {
  spawn(2, [&](int rank, int) {
    const auto before = open_in_a_program();
    auto group = init_process_group({.backend = backend, .device = c10::Device(c10::kCPU)});
    auto part = group.split(0, rank);
    for (ProcessGroup one : {group, part}) {
      const auto tensor = at::ones({100'000});
      one.all_reduce(tensor).wait();
      rank == 0 ? one.send(tensor, 1).wait() : one.recv(tensor, 0).wait();
      one.barrier().wait();
    }
    std::string text;
    for (const std::string& one : open_in_a_program()) text += before.contains(one) ? "" : one;
    if (!text.empty()) throw std::runtime_error("a program inherits " + text);
    group.barrier().wait();
  });
}

int twice(int number) { return 2 * number; }

void expect_nothing_of_an_agents(const std::string& transport) {
  rpc::expose<&twice>();
  spawn(2, [&](int rank, int) {
    const auto before = open_in_a_program();
    rpc::Agent agent = rpc::init("worker" + std::to_string(rank), {.transports = {transport}});
    const int doubled = agent.sync<&twice>("worker" + std::to_string(1 - rank), 21);
    std::string text;
    for (const std::string& one : open_in_a_program()) text += before.contains(one) ? "" : one;
    agent.shutdown();
    if (doubled != 42) throw std::runtime_error("wrong result");
    if (!text.empty()) throw std::runtime_error("a program inherits " + text);
  });
}

class InheritedDescriptors : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Backends, InheritedDescriptors,
                         testing::Values("gloo", "shm", "tcp", "verbs"),
                         [](const auto& backend) { return backend.param; });

TEST_P(InheritedDescriptors, IncludeNoneOfAGroup) {
  try {
    static_cast<void>(transport::open(GetParam()));
  } catch (const Error& error) {
    GTEST_SKIP() << error.what();
  }
  expect_nothing_inherited(GetParam());
}

TEST(DescriptorsOfAnAgent, AreNotInherited) {
  for (const std::string transport : {"shm", "tcp"}) expect_nothing_of_an_agents(transport);
}

}  // namespace
}  // namespace weft
