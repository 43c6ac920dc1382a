// SPDX-License-Identifier: Apache-2.0
// A listener of shm takes a segment only if exactly one sealed segment of the right size was passed
// with the right bytes; it refuses everything else that a stranger sends, and no descriptor is left
// open. The first byte chooses the descriptors that are passed, the others are sent as they are.
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/transport/shm/segment.h>

namespace weft::transport::shm {
namespace {

Descriptor memory_of(std::size_t bytes, int seals) {
  Descriptor memory(memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (ftruncate(memory.get(), static_cast<off_t>(bytes)) != 0 ||
      fcntl(memory.get(), F_ADD_SEALS, seals) != 0) {
    broken("the fuzzer cannot make a file in memory");
  }
  return memory;
}

// Made once: each message passes copies.
const std::vector<Descriptor>& choices() {
  static const std::vector<Descriptor> all = [] {
    std::vector<Descriptor> made;
    made.emplace_back(::open("/dev/null", O_RDWR | O_CLOEXEC));
    made.push_back(memory_of(0, 0));
    made.push_back(memory_of(4096, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL));
    made.emplace_back(::dup(Segment::make().memory().get()));
    made.push_back(memory_of(static_cast<std::size_t>(::lseek(made.back().get(), 0, SEEK_END)), 0));
    return made;
  }();
  return all;
}

void say(int socket, const std::uint8_t* data, std::size_t bytes, unsigned which) {
  iovec piece{const_cast<std::uint8_t*>(data), bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(8 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  const std::size_t count = which / 8 % 7;  // of descriptors
  if (count > 0) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(count * sizeof(int));
    cmsghdr* const part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(count * sizeof(int));
    for (std::size_t i = 0; i < count; ++i) {
      const int number = choices()[(which + i) % choices().size()].get();
      std::memcpy(CMSG_DATA(part) + i * sizeof(int), &number, sizeof number);
    }
  }
  if (::sendmsg(socket, &message, MSG_NOSIGNAL) < 0) broken("a fuzzer cannot send to itself");
}

}  // namespace
}  // namespace weft::transport::shm

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  using namespace weft;
  using namespace weft::transport::shm;
  choices();
  const int lowest_before = ::dup(STDERR_FILENO);
  ::close(lowest_before);
  if (bytes > 1) {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0)
      broken("the fuzzer cannot make sockets");
    const Descriptor here(ends[0]);
    {
      const Descriptor there(ends[1]);
      say(there.get(), data + 1, bytes - 1, data[0]);
    }
    try {
      if (const auto segment = Segment::take_from(here)) segment->reader().peek(1);
    } catch (const Error& error) {
      if (error.blame() == Blame::Caller) broken("a stranger's message is blamed on the caller");
    }
  }
  const int lowest_after = ::dup(STDERR_FILENO);
  ::close(lowest_after);
  if (lowest_after != lowest_before) broken("a descriptor that was passed is left open");
  return 0;
}
