// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/transport/shared_memory.h>

namespace weft::transport {

namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr std::size_t kStep = 64 << 10;

}  // namespace

Descriptor make_shared_memory(std::size_t bytes, const std::string& who) {
  return make_shared_memory(bytes, who, bytes);
}

Descriptor make_shared_memory(std::size_t bytes, const std::string& who, std::size_t allocated) {
  Descriptor memory(::memfd_create(("weft-" + who).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory) throw system_error(Blame::Busy, who + ": cannot create shared memory", errno);
  const auto fail = [&](int error) {
    throw system_error(Blame::Busy,
                       who + ": not enough memory for " + std::to_string((bytes + 1023) >> 10) +
                           " KiB of shared memory (see the memory limit of the container, and "
                           "ulimit -f; /dev/shm is not used)",
                       error);
  };
  if (::ftruncate(memory.get(), static_cast<off_t>(bytes)) != 0) fail(errno);
  // Allocate now: a shortage at the first access would be a SIGBUS. In steps, because before Linux
  // 6.14 any signal ends the call with nothing allocated, and a profiler's signals come every
  // millisecond.
  for (std::size_t done = 0; done < allocated;) {
    const std::size_t step = std::min(kStep, allocated - done);
    const int failed =
        ::posix_fallocate(memory.get(), static_cast<off_t>(done), static_cast<off_t>(step));
    if (failed != 0 && failed != EINTR) fail(failed);
    if (failed == 0) done += step;
  }
  if (::fcntl(memory.get(), F_ADD_SEALS, kSeals) != 0) {
    throw system_error(Blame::Busy, who + ": cannot seal shared memory", errno);
  }
  return memory;
}

// The kernel may have added seals of its own (vm.memfd_noexec).
bool is_shared_memory(const Descriptor& memory, std::size_t bytes) {
  struct stat about {};
  const int seals = ::fcntl(memory.get(), F_GET_SEALS);
  return seals >= 0 && (seals & kSeals) == kSeals && ::fstat(memory.get(), &about) == 0 &&
         about.st_size == static_cast<off_t>(bytes);
}

}  // namespace weft::transport
