// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <cstdlib>

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sched.h>
#include <unistd.h>

#include <weft/base/make_error.h>
#include <weft/tests/transport/tcp/cable.h>

namespace weft::transport::tcp {

namespace {

bool shell(const std::string& command) {
  return std::system(("( " + command + " ) >/dev/null 2>&1").c_str()) == 0;
}

}  // namespace

bool forget(Descriptor socket) {
  const int on = 1;
  // A socket that is closed in this state sends nothing.
  return ::setsockopt(socket.get(), IPPROTO_TCP, TCP_REPAIR, &on, sizeof on) == 0;
}

void tell_line(int to, const std::string& line) {
  const std::string text = line + "\n";
  if (::write(to, text.data(), text.size()) != static_cast<ssize_t>(text.size()))
    throw system_error(Blame::PeerLost, "tell", errno);
}

std::string hear_line(const Child& child) {
  std::string line;
  for (char letter = child.hear(); letter != '\n' && letter != '\0'; letter = child.hear())
    line += letter;
  return line;
}

void wait_for_byte(int socket) {
  char letter = 0;
  if (::read(socket, &letter, 1) != 1) throw Error(Blame::PeerLost, "the test has ended");
}

Cable::Cable(const std::function<void(int)>& body) {
  if (::unshare(CLONE_NEWNET) != 0 && ::unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) {
    throw Error(Blame::Unsupported, "this process may not make network namespaces");
  }
  peer_ = std::make_unique<Child>([body](int parent) {
    if (::unshare(CLONE_NEWNET) != 0) throw system_error(Blame::Unsupported, "unshare", errno);
    tell_line(parent, "apart");
    wait_for_byte(parent);
    body(parent);
  });
  const std::string process = std::to_string(peer_->process());
  const std::string theirs = "nsenter -t " + process + " -n ip ";
  if (hear_line(*peer_) != "apart" ||
      !shell("ip link set lo up && ip link add name weft0 type veth peer name weft0 netns " +
             process + " && ip addr add 10.77.7.1/24 dev weft0 && ip link set weft0 up && " +
             theirs + "addr add 10.77.7.2/24 dev weft0 && " + theirs + "link set weft0 up && " +
             theirs + "link set lo up")) {
    throw Error(Blame::Unsupported,
                "this machine makes no cable between network namespaces (ip, nsenter, veth)");
  }
  peer_->say('x');
  heard_ = hear_line(*peer_);
}

void Cable::cut() { set("down"); }
void Cable::mend() { set("up"); }

void Cable::set(const std::string& state) {
  ASSERT_TRUE(
      shell("nsenter -t " + std::to_string(peer_->process()) + " -n ip link set weft0 " + state));
}

std::unique_ptr<Cable> lay_cable(const std::function<void(int)>& body, std::string& why_not) {
  try {
    return std::make_unique<Cable>(body);
  } catch (const Error& error) {
    why_not = error.text();
    return nullptr;
  }
}

}  // namespace weft::transport::tcp
