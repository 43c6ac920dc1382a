// SPDX-License-Identifier: Apache-2.0
#include <optional>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <weft/base/descriptor.h>
#include <weft/engine/launch/worker_group.h>

namespace weft::launch {
namespace {

int next_descriptor() { return Descriptor(::open("/dev/null", O_RDONLY)).get(); }

TEST(WorkerGroup, LackOfDescriptorsIsBusyAndLeaksNone) {
  Options options;
  options.command = {"true"};
  const int before = next_descriptor();
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  const rlimit tight{static_cast<rlim_t>(before) + 3,
                     limit.rlim_max};  // room for stdout's pipe and one end of stderr's
  ::setrlimit(RLIMIT_NOFILE, &tight);
  std::optional<Blame> blame;
  try {
    const WorkerGroup workers(options, {});
  } catch (const Error& error) {
    blame = error.blame();
  }
  ::setrlimit(RLIMIT_NOFILE, &limit);
  EXPECT_EQ(blame, Blame::Busy);
  EXPECT_EQ(next_descriptor(), before);
}

}  // namespace
}  // namespace weft::launch
