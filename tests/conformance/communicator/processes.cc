// SPDX-License-Identifier: Apache-2.0
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <weft/base/make_error.h>
#include <weft/tests/conformance/communicator/processes.h>
#include <weft/tests/harness/file_bootstrap.h>

namespace weft::conformance {

namespace {

// An alarm kills a rank that hangs after this time.
constexpr unsigned kSeconds = 100;

pid_t fork_rank(const std::function<void()>& body, const std::string& who) {
  std::fflush(nullptr);
  const pid_t process = ::fork();
  if (process < 0) throw system_error(Blame::Busy, "fork", errno);
  if (process > 0) return process;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  ::alarm(kSeconds);
  int code = 0;
  try {
    body();
    code = testing::Test::HasFailure() ? 1 : 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", who.c_str(), error.what());
    code = 1;
  }
  std::fflush(nullptr);
  ::_exit(code);
}

}  // namespace

void Processes::run_ranks(const std::function<void(Rank&)>& join,
                          const std::function<void(Rank&)>& body) const {
  std::string folder = std::filesystem::temp_directory_path() / "weft-claims-XXXXXX";
  ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  ::chmod(folder.c_str(), 0777);  // a setting may change a rank's user
  std::vector<pid_t> processes;
  for (int number = 0; number < ranks_; ++number) {
    const auto be = [&, number] {
      Rank rank;
      rank.rank = number;
      rank.size = ranks_;
      rank.store = std::make_shared<harness::FileBootstrap>(folder);
      rank.loop = std::make_shared<EventLoop>("rank " + std::to_string(number));
      join(rank);
      body(rank);
      leave(rank);
    };
    processes.push_back(fork_rank(be, "rank " + std::to_string(number)));
  }
  for (std::size_t rank = 0; rank < processes.size(); ++rank) {
    int status = 0;
    ::waitpid(processes[rank], &status, 0);
    EXPECT_EQ(status, 0) << "rank " << rank << " failed; its output is above";
  }
  std::filesystem::remove_all(folder);
}

}  // namespace weft::conformance
