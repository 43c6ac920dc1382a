// SPDX-License-Identifier: Apache-2.0
#include <cerrno>

#include <sys/mman.h>

#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/transport/shared_memory.h>
#include <weft/transport/verbs/mirror.h>

namespace weft::transport::verbs {

Mirror::Mirror(std::size_t bytes) : bytes_(bytes) {
  const Descriptor memory = make_shared_memory(bytes, "verbs");
  const auto map = [&](void* at, std::size_t size, int flags) {
    return ::mmap(at, size, PROT_READ | PROT_WRITE, MAP_SHARED | flags, memory.get(), 0);
  };
  // The second mapping replaces the second half of the first.
  void* const whole = map(nullptr, 2 * bytes, 0);
  if (whole != MAP_FAILED &&
      map(static_cast<std::byte*>(whole) + bytes, bytes, MAP_FIXED) != MAP_FAILED) {
    base_ = static_cast<std::byte*>(whole);
    return;
  }
  const int number = errno;
  if (whole != MAP_FAILED) ::munmap(whole, 2 * bytes);
  throw system_error(Blame::Busy, "verbs: cannot map a ring of " + std::to_string(bytes) + " bytes",
                     number);
}

Mirror::~Mirror() { ::munmap(base_, 2 * bytes_); }

}  // namespace weft::transport::verbs
