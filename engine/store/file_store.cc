// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <string_view>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <weft/base/log.h>
#include <weft/engine/store/file_store.h>

namespace weft::group {

namespace {

// Counters that FileStore keeps in the file beside its users' keys.
struct Counts {
  long open = -1;    // stores that are open, in all processes
  long closed = -1;  // stores that have been closed
};

// Reads the counters. The file is a sequence of keys and values, each preceded by its length (32
// bits, in the machine's byte order); of two values of one key the later counts. Returns nullopt
// for any other content.
std::optional<Counts> counts_in(std::string_view file) {
  const auto next = [&file]() -> std::optional<std::string_view> {
    std::uint32_t length = 0;
    if (file.size() < sizeof length) return std::nullopt;
    std::memcpy(&length, file.data(), sizeof length);
    file.remove_prefix(sizeof length);
    if (file.size() < length) return std::nullopt;
    const auto text = file.substr(0, length);
    file.remove_prefix(length);
    return text;
  };
  Counts counts;
  while (!file.empty()) {
    const auto key = next();
    const auto value = key ? next() : std::nullopt;
    if (!value) return std::nullopt;
    if (*key == "refcount/") counts.open = std::strtol(std::string(*value).c_str(), nullptr, 10);
    if (*key == "cleanup/") counts.closed = std::strtol(std::string(*value).c_str(), nullptr, 10);
  }
  return counts;
}

// Removes the file if this was the last store. FileStore's own destructor may fail to: it counts
// "closed" and "no longer open" in two steps, and if two processes take turns at them, neither sees
// both counts complete.
class Removal {
 public:
  Removal(std::string path, int world_size) : path_(std::move(path)), world_size_(world_size) {}
  Removal(const Removal&) = delete;
  Removal& operator=(const Removal&) = delete;
  ~Removal() {
    const int descriptor = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) return;  // already removed
    remove_if_last(descriptor);
    ::close(descriptor);
  }

 private:
  void remove_if_last(int descriptor) const {
    while (::flock(descriptor, LOCK_EX) != 0) {
      if (errno != EINTR) return complain("locked");
    }
    // Another process may have removed the file while this one waited for the lock, and the next
    // job may have made a new one.
    struct stat locked {};
    struct stat named {};
    if (::fstat(descriptor, &locked) != 0 || ::stat(path_.c_str(), &named) != 0) return;
    if (locked.st_ino != named.st_ino || locked.st_dev != named.st_dev) return;
    std::string file(static_cast<std::size_t>(locked.st_size), '\0');
    std::size_t read = 0;
    while (read < file.size()) {
      const auto count =
          ::pread(descriptor, file.data() + read, file.size() - read, static_cast<off_t>(read));
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return complain("read");
      read += static_cast<std::size_t>(count);
    }
    const auto counts = counts_in(file);
    if (!counts) {
      log::warn("file://" + path_ + " is not removed: its content is not that of a job's store");
    } else if (counts->open == 0 && counts->closed >= world_size_ && ::unlink(path_.c_str()) != 0 &&
               errno != ENOENT) {
      complain("removed");
    }
  }

  void complain(const char* what) const {
    log::warn("file://" + path_ + " cannot be " + what + " (" + std::strerror(errno) +
              "): remove it before the next job takes that path");
  }

  const std::string path_;
  const int world_size_;
};

// Removal is the first base, so that it is destroyed last.
class JobFile : private Removal, public c10d::FileStore {
 public:
  JobFile(const std::string& path, int world_size)
      : Removal(path, world_size), FileStore(path, kNeverRemoves) {}

 private:
  static constexpr int kNeverRemoves = -1;
};

}  // namespace

c10::intrusive_ptr<c10d::FileStore> open_job_file(const std::string& path, int world_size) {
  return c10::make_intrusive<JobFile>(path, world_size);
}

}  // namespace weft::group
