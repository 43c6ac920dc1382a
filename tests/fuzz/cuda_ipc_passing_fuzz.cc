// SPDX-License-Identifier: Apache-2.0
// For any bytes on the socket on which a peer passes descriptors: each descriptor that is kept was
// passed, is found once, and no other is left open. A failure is blamed on the peer or on this
// process's limits. The input is a script: a byte chooses each step, and its arguments follow.
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <weft/base/make_error.h>
#include <weft/transport/cuda_ipc/passing.h>

namespace weft::transport::cuda_ipc {
namespace {

constexpr std::size_t kFiles = 4;
constexpr std::size_t kMostBytes = 24;  // of one message: three numbers

// Made once: each message passes copies.
const std::array<Descriptor, kFiles>& files() {
  static const std::array<Descriptor, kFiles> made = [] {
    std::array<Descriptor, kFiles> all;
    for (Descriptor& file : all) file = Descriptor(::memfd_create("fuzz", MFD_CLOEXEC));
    return all;
  }();
  return made;
}

ino_t number_of(const Descriptor& file) {
  struct stat about {};
  if (::fstat(file.get(), &about) != 0) broken("a found descriptor is not open");
  return about.st_ino;
}

// A stranger's message: words that are complete numbers or not, with any number of descriptors.
void say(const Descriptor& socket, std::span<const std::uint8_t> words, std::size_t descriptors,
         std::size_t first) {
  iovec piece{const_cast<std::uint8_t*>(words.data()), words.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(8 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  if (descriptors > 0) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(descriptors * sizeof(int));
    cmsghdr* const part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(descriptors * sizeof(int));
    for (std::size_t i = 0; i < descriptors; ++i) {
      const int number = files()[(first + i) % kFiles].get();
      std::memcpy(CMSG_DATA(part) + i * sizeof(int), &number, sizeof number);
    }
  }
  const bool is_sent = ::sendmsg(socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0;
  if (!is_sent && errno != EAGAIN && errno != EPIPE && errno != ETOOMANYREFS)
    broken("a fuzzer cannot send to itself");
}

void check_found(TakingEnd& end, std::uint64_t allocation) {
  const Descriptor found = end.find(allocation);
  if (!found) return;
  const auto is_it = [&](const Descriptor& file) { return number_of(file) == number_of(found); };
  if (std::ranges::none_of(files(), is_it)) broken("a descriptor that was never passed");
  if (end.find(allocation)) broken("one descriptor is found twice");
}

void play(std::span<const std::uint8_t> script) {
  const ListeningSocket listening = listen_for_this_user("fuzz");
  TakingEnd end(static_cast<std::uint64_t>(::getpid()),
                static_cast<std::uint32_t>(listening.name.get()));
  Descriptor stranger = accept_from(listening.socket, "fuzz");
  bool goes_on = true;
  const auto byte = [&script]() -> std::uint8_t {
    if (script.empty()) return 0;
    const std::uint8_t value = script.front();
    script = script.subspan(1);
    return value;
  };
  while (!script.empty()) {
    switch (byte() % 5) {
      case 0: {  // as a well-behaved peer does
        const std::uint64_t allocation = byte();
        std::array<std::uint8_t, sizeof allocation> words;
        std::memcpy(words.data(), &allocation, sizeof allocation);
        if (stranger) say(stranger, words, 1, allocation);
        break;
      }
      case 1: {
        const std::size_t how = byte();
        const auto words = script.first(std::min({how % (kMostBytes + 1), script.size()}));
        script = script.subspan(words.size());
        if (stranger && !words.empty()) say(stranger, words, how / 32, how);
        break;
      }
      case 2: {
        const bool comes_more = end.take();
        if (comes_more && !goes_on) broken("an ended socket has more messages");
        goes_on = comes_more;
        break;
      }
      case 3: check_found(end, byte()); break;
      default:
        if (byte() > 200) stranger = Descriptor();
        break;
    }
  }
  end.take();
  if (end.failure() && !ends_connection(end.failure()->blame()) &&
      end.failure()->blame() != Blame::Busy) {
    broken("a stranger's message is not blamed on it");
  }
}

}  // namespace
}  // namespace weft::transport::cuda_ipc

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  using namespace weft;
  transport::cuda_ipc::files();
  const int lowest_before = ::dup(STDERR_FILENO);
  ::close(lowest_before);
  transport::cuda_ipc::play({data, bytes});
  const int lowest_after = ::dup(STDERR_FILENO);
  ::close(lowest_after);
  if (lowest_after != lowest_before) broken("a descriptor that was passed is left open");
  return 0;
}
