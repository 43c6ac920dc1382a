// SPDX-License-Identifier: Apache-2.0
#include <array>

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <weft/base/end_of_process.h>

namespace weft {
namespace {

// Forks a child that lives until its input ends, closes this process's end of a connection, and
// tells whether the peer has seen it end by then.
bool peer_sees_end(bool is_marked) {
  std::array<int, 2> connection{}, input{};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, connection.data()), 0);
  EXPECT_EQ(::pipe(input.data()), 0);
  pid_t child = 0;
  {
    const EndOfProcess end(is_marked ? connection[0] : -1);
    child = ::fork();
    if (child == 0) {
      ::close(input[1]);
      char byte = 0;
      ::alarm(20);
      static_cast<void>(!::read(input[0], &byte, 1));
      ::_exit(0);
    }
  }
  ::close(connection[0]);
  pollfd seen{connection[1], POLLIN, 0};
  const bool has_ended = ::poll(&seen, 1, is_marked ? 10'000 : 50) == 1;
  for (const int one : {connection[1], input[0], input[1]}) ::close(one);
  ::waitpid(child, nullptr, 0);
  return has_ended;
}

TEST(EndOfProcess, IsSeenByThePeerWhileAForkedChildLives) { EXPECT_TRUE(peer_sees_end(true)); }

TEST(EndOfProcess, LeavesOtherSocketsToTheChild) { EXPECT_FALSE(peer_sees_end(false)); }

}  // namespace
}  // namespace weft
