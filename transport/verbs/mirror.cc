#include <cerrno>

#include <sys/mman.h>
#include <unistd.h>

#include <weft/base/error.h>
#include <weft/transport/verbs/mirror.h>

namespace weft::transport::verbs {

Mirror::Mirror(std::size_t bytes) : bytes_(bytes) {
  const int memory = ::memfd_create("weft-verbs", MFD_CLOEXEC);
  if (memory < 0) throw system_error(Blame::Busy, "verbs: no memory for a ring", errno);
  // The second mapping takes the place of the first one's second half.
  void* whole = MAP_FAILED;
  if (::ftruncate(memory, static_cast<off_t>(bytes)) == 0) {
    whole = ::mmap(nullptr, 2 * bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
  }
  void* second = MAP_FAILED;
  if (whole != MAP_FAILED) {
    second =
        ::mmap(static_cast<std::byte*>(whole) + bytes, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory, 0);
  }
  const int number = errno;
  ::close(memory);
  if (second == MAP_FAILED) {
    if (whole != MAP_FAILED) ::munmap(whole, 2 * bytes);
    throw system_error(Blame::Busy, "verbs: no memory for a ring of " + std::to_string(bytes) + " bytes", number);
  }
  base_ = static_cast<std::byte*>(whole);
}

Mirror::~Mirror() { ::munmap(base_, 2 * bytes_); }

}  // namespace weft::transport::verbs
