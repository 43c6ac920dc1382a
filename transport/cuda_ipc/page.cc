// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <random>
#include <string>

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <weft/base/make_error.h>
#include <weft/cuda/poll.h>
#include <weft/transport/cuda_ipc/page.h>
#include <weft/transport/shared_memory.h>

namespace weft::transport::cuda_ipc {

namespace {

constexpr std::size_t kSpacing = 64;  // a cache line
constexpr std::size_t kWords = kMaxGpus * kSlots;
// After the words: closed() and the key.
constexpr std::size_t kPageBytes = (kWords + 2) * kSpacing;

void* map(const Descriptor& descriptor) {
  void* const memory =
      ::mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor.get(), 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

}  // namespace

std::shared_ptr<Page> Page::make() {
  Descriptor descriptor = make_shared_memory(kPageBytes, "cuda_ipc");
  void* const memory = map(descriptor);
  if (memory == nullptr)
    throw system_error(Blame::Busy, "cuda_ipc: cannot map shared memory", errno);
  const auto page = std::shared_ptr<Page>(new Page(std::move(descriptor), memory));
  std::random_device random;
  page->key() = std::uint64_t{random()} << 32 | random();
  return page;
}

std::shared_ptr<Page> Page::open(std::uint64_t process, const PageName& name) {
  const std::string path =
      "/proc/" + std::to_string(process) + "/fd/" + std::to_string(name.descriptor);
  // The descriptor may refer to any kind of file by now, hence O_NONBLOCK.
  Descriptor descriptor(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK));
  const auto refuse = [&](const std::string& why, Blame blame = Blame::PeerLost) {
    throw Error(blame, "cuda_ipc: the page of process " + std::to_string(process) + " " + why);
  };
  if (!descriptor) {
    const bool may_not = errno == EACCES || errno == EPERM;
    refuse("cannot be opened: " + system_error(Blame::PeerLost, path, errno).text(),
           may_not ? Blame::Unsupported : Blame::PeerLost);
  }
  struct stat about {};
  if (!is_shared_memory(descriptor, kPageBytes) || ::fstat(descriptor.get(), &about) != 0 ||
      about.st_uid != ::geteuid()) {
    refuse("is not a page that Weft made for this user");
  }
  void* const memory = map(descriptor);
  if (memory == nullptr) refuse("cannot be mapped");
  const auto page = std::shared_ptr<Page>(new Page(std::move(descriptor), memory));
  if (page->key() != name.key) refuse("was closed");
  return page;
}

Page::~Page() { ::munmap(memory_, kPageBytes); }

std::atomic<std::uint32_t>& Page::word(std::size_t gpu, std::size_t slot) const {
  return *reinterpret_cast<std::atomic<std::uint32_t>*>(memory_ + (gpu * kSlots + slot) * kSpacing);
}

std::atomic<std::uint32_t>& Page::closed() const { return word(kMaxGpus, 0); }

std::uint64_t& Page::key() const {
  return *reinterpret_cast<std::uint64_t*>(memory_ + (kWords + 1) * kSpacing);
}

Process::Process(std::uint64_t number)
    : number_(number), descriptor_(static_cast<int>(::syscall(SYS_pidfd_open, number, 0))) {
  if (descriptor_ || errno == ESRCH) return;
  const bool may_not = errno == ENOSYS || errno == EPERM || errno == EACCES;
  throw system_error(may_not ? Blame::Unsupported : Blame::Busy,
                     "cuda_ipc: cannot watch the peer's process", errno);
}

bool Process::has_ended() const noexcept {
  if (!descriptor_) return true;  // it had ended before the constructor ran
  pollfd ask{descriptor_.get(), POLLIN, 0};
  return ::poll(&ask, 1, 0) == 1;
}

bool ReadFence::query() const noexcept {
  if (was_read() || is_gone_) return true;
  if (page_->closed().load(std::memory_order_acquire) != 0) return true;
  // Not at every call, as has_ended() is a system call.
  constexpr std::uint32_t kAskEvery = 256;
  if (asked_.fetch_add(1, std::memory_order_relaxed) % kAskEvery != kAskEvery - 1 ||
      !peer_->has_ended())
    return false;
  is_gone_ = true;
  return true;
}

bool ReadFence::synchronize(Deadline deadline) const noexcept {
  return cuda::poll_until([this] { return query(); }, deadline);
}

void ReadFence::wait(const cuda::StreamRef&) const {
  if (query()) return;
  throw Error(
      Blame::Unsupported,
      "a stream cannot wait for another process to have read a message; wait for its Op's done()");
}

}  // namespace weft::transport::cuda_ipc
