#include <cerrno>
#include <random>
#include <string>

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <weft/cuda/poll.h>
#include <weft/transport/cuda_ipc/page.h>

namespace weft::transport::cuda_ipc {

namespace {

constexpr std::size_t kSpacing = 64;  // a cache line
constexpr std::size_t kWords = kMaxGpus * kSlots;
constexpr std::size_t kPageBytes = (kWords + 2) * kSpacing;  // behind the words: closed, and the key
// Nobody can make it shorter under those who have mapped it.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

void* map(int descriptor) {
  void* const memory = ::mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

}  // namespace

std::shared_ptr<Page> Page::make() {
  const int descriptor = ::memfd_create("weft-cuda-ipc", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (descriptor < 0) throw system_error(Blame::Busy, "cuda_ipc: no memory to share", errno);
  void* memory = nullptr;
  if (::ftruncate(descriptor, kPageBytes) == 0 && ::fcntl(descriptor, F_ADD_SEALS, kSeals) == 0) memory = map(descriptor);
  if (memory == nullptr) {
    const int number = errno;
    ::close(descriptor);
    throw system_error(Blame::Busy, "cuda_ipc: no memory to share", number);
  }
  const auto page = std::shared_ptr<Page>(new Page(descriptor, memory));
  std::random_device random;
  page->key() = std::uint64_t{random()} << 32 | random();
  return page;
}

std::shared_ptr<Page> Page::open(std::uint64_t process, const PageName& name) {
  const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(name.descriptor);
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK);  // whatever it may be by now
  const auto refuse = [&](const std::string& why, Blame blame = Blame::PeerLost) {
    if (descriptor >= 0) ::close(descriptor);
    throw Error(blame, "cuda_ipc: the page of process " + std::to_string(process) + " " + why);
  };
  if (descriptor < 0) {
    const bool may_not = errno == EACCES || errno == EPERM;
    refuse("cannot be opened: " + system_error(Blame::PeerLost, path, errno).text(),
           may_not ? Blame::Unsupported : Blame::PeerLost);
  }
  struct stat about {};
  const int seals = ::fcntl(descriptor, F_GET_SEALS);
  if (::fstat(descriptor, &about) != 0 || about.st_size != static_cast<off_t>(kPageBytes) || seals != kSeals ||
      about.st_uid != ::geteuid()) {
    refuse("is not one that Weft has made for this user");
  }
  void* const memory = map(descriptor);
  if (memory == nullptr) refuse("cannot be mapped");
  const auto page = std::shared_ptr<Page>(new Page(descriptor, memory));
  if (page->key() == name.key) return page;
  throw Error(Blame::PeerLost, "cuda_ipc: the page of process " + std::to_string(process) + " is gone");
}

Page::~Page() {
  ::munmap(memory_, kPageBytes);
  ::close(descriptor_);
}

std::atomic<std::uint32_t>& Page::word(std::size_t gpu, std::size_t slot) const {
  return *reinterpret_cast<std::atomic<std::uint32_t>*>(memory_ + (gpu * kSlots + slot) * kSpacing);
}

std::atomic<std::uint32_t>& Page::closed() const { return word(kMaxGpus, 0); }

std::uint64_t& Page::key() const { return *reinterpret_cast<std::uint64_t*>(memory_ + (kWords + 1) * kSpacing); }

Process::Process(std::uint64_t number)
    : number_(number), descriptor_(static_cast<int>(::syscall(SYS_pidfd_open, number, 0))) {
  if (descriptor_ >= 0 || errno == ESRCH) return;
  const bool may_not = errno == ENOSYS || errno == EPERM || errno == EACCES;
  throw system_error(may_not ? Blame::Unsupported : Blame::Busy, "cuda_ipc: cannot watch the peer's process", errno);
}

Process::~Process() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

bool Process::has_ended() const noexcept {
  if (descriptor_ < 0) return true;  // it had ended before
  pollfd ask{descriptor_, POLLIN, 0};
  return ::poll(&ask, 1, 0) == 1;
}

bool ReadFence::query() const noexcept {
  if (was_read() || is_gone_) return true;
  if (page_->closed().load(std::memory_order_acquire) != 0) return true;
  // A system call, so not every time.
  constexpr std::uint32_t kAskEvery = 256;
  if (asked_.fetch_add(1, std::memory_order_relaxed) % kAskEvery != kAskEvery - 1 || !peer_->has_ended()) return false;
  is_gone_ = true;
  return true;
}

bool ReadFence::synchronize(Deadline deadline) const noexcept {
  return cuda::poll_until([this] { return query(); }, deadline);
}

void ReadFence::wait(const cuda::StreamRef&) const {
  if (query()) return;
  throw Error(Blame::Unsupported,
              "a stream cannot wait for another process to have read a message; wait for its Op's done()");
}

}  // namespace weft::transport::cuda_ipc
