// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <string>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <weft/base/error.h>
#include <weft/base/fork_mutex.h>
#include <weft/base/make_error.h>
#include <weft/base/mutex.h>
#include <weft/profiling/trace/progress.h>

namespace weft::trace {

namespace {

// Whether the page is a new one from weft-run, or one in which this rank has counted already.
bool is_ours(const Progress& page) {
  return page.magic == Progress::kMagic ||
         (page.magic == 0 && page.steps == 0 && page.operations == 0 && page.bytes == 0 &&
          page.failures == 0);
}

constinit Progress own;
constinit ForkMutex publishing(ForkOrder::Counts);
std::string published WEFT_GUARDED_BY(publishing);  // the file of publish_progress()
std::atomic<Progress*> current{&own};

}  // namespace

Progress& progress() noexcept { return *current.load(std::memory_order_acquire); }

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "unknown";
}

void publish_progress(const char* file) {
  MutexLock lock(publishing);
  if (published == file) return;
  const std::string what = std::string("WEFT_STATUS_FILE is '") + file + "', which weft-run sets";
  const int descriptor = ::open(file, O_RDWR | O_CLOEXEC);
  if (descriptor < 0) throw system_error(Blame::Caller, what, errno);
  const bool is_large = ::lseek(descriptor, 0, SEEK_END) >= static_cast<off_t>(sizeof(Progress));
  void* page = is_large ? ::mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED,
                                 descriptor, 0)
                        : MAP_FAILED;
  const int number = is_large ? errno : EINVAL;
  ::close(descriptor);
  if (page == MAP_FAILED) throw system_error(Blame::Caller, what, number);
  auto* const shared = static_cast<Progress*>(page);
  if (!is_ours(*shared)) {
    ::munmap(page, sizeof(Progress));
    throw system_error(Blame::Caller, what, EINVAL);
  }
  shared->magic = Progress::kMagic;
  Progress& before = progress();
  shared->steps += before.steps;
  shared->operations += before.operations;
  shared->bytes += before.bytes;
  shared->failures += before.failures;
  published = file;
  current.store(shared, std::memory_order_release);
}

}  // namespace weft::trace
