// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <csignal>
#include <cstdio>

#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/tests/conformance/connection/child.h>

namespace weft::conformance {

Child::Child(const std::function<void(Child& self)>& body, std::chrono::seconds lifetime)
    : lifetime_(lifetime) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    throw system_error(Blame::Busy, "socketpair", errno);
  std::fflush(nullptr);
  process_ = ::fork();
  if (process_ < 0) throw system_error(Blame::Busy, "fork", errno);
  socket_ = ends[process_ == 0 ? 1 : 0];
  ::close(ends[process_ == 0 ? 0 : 1]);
  if (process_ == 0) live(body);
}

void Child::live(const std::function<void(Child& self)>& body) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  ::alarm(static_cast<unsigned>(lifetime_.count()));
  int code = 0;
  try {
    body(*this);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "child: %s\n", error.what());
    code = 1;
  }
  if (testing::Test::HasFailure()) code = 1;
  std::fflush(nullptr);
  ::_exit(code);
}

Child::~Child() {
  kill();
  ::close(socket_);
}

void Child::say(const std::string& line) const {
  const std::string text = line + "\n";
  [[maybe_unused]] const auto sent = ::send(socket_, text.data(), text.size(), MSG_NOSIGNAL);
}

std::string Child::hear() {
  for (;;) {
    if (const auto end = heard_.find('\n'); end != std::string::npos) {
      const std::string line = heard_.substr(0, end);
      heard_.erase(0, end + 1);
      return line;
    }
    char buffer[256];
    const auto count = ::read(socket_, buffer, sizeof buffer);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return {};
    heard_.append(buffer, static_cast<std::size_t>(count));
  }
}

void Child::kill() {
  if (process_ <= 0) return;
  ::kill(process_, SIGKILL);
  reap(/*must_be_well=*/false);
}

void Child::signal(int number) const {
  if (process_ > 0) ::kill(process_, number);
}

void Child::expect_success() { reap(/*must_be_well=*/true); }

void Child::reap(bool must_be_well) {
  int status = 0;
  while (::waitpid(process_, &status, 0) < 0 && errno == EINTR) {
  }
  process_ = 0;
  if (must_be_well && status != 0) ADD_FAILURE() << "the child ended with status " << status;
}

}  // namespace weft::conformance
