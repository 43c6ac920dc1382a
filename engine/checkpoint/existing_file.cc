// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <utility>

#include <climits>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <weft/base/make_error.h>
#include <weft/engine/checkpoint/checkpoint_file.h>
#include <weft/engine/checkpoint/existing_file.h>
#include <weft/engine/checkpoint/new_file.h>

namespace weft::checkpoint {

ExistingFile::ExistingFile(std::string path) : path_(std::move(path)) {
  // O_NONBLOCK, because opening a pipe without a writer would block.
  file_ = Descriptor(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  if (!file_ || ::fstat(file_.get(), &status) != 0) {
    if (errno == ENOENT) {
      throw Error(Blame::Caller, "the checkpoint's file '" + path_ +
                                     "' is missing: put it back, or load another checkpoint");
    }
    throw system_error(blame_of(errno), "the checkpoint's file '" + path_ + "' cannot be read",
                       errno);
  }
  if (!S_ISREG(status.st_mode))
    throw Error(Blame::Caller, "the checkpoint's file '" + path_ + "' is not a regular file");
  bytes_ = static_cast<std::uint64_t>(status.st_size);
}

bool ExistingFile::go_past_page_cache() {
  direct_ = Descriptor(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_DIRECT));
  return static_cast<bool>(direct_);
}

std::uint64_t ExistingFile::alignment() const { return direct_ ? NewFile::kBlock : 1; }

void ExistingFile::prefetch(std::uint64_t offset, std::uint64_t bytes) const {
  // Advice: what it cannot do, read() does.
  ::posix_fadvise(file_.get(), static_cast<off_t>(offset), static_cast<off_t>(bytes),
                  POSIX_FADV_WILLNEED);
}

void ExistingFile::read(std::vector<iovec> memory, std::uint64_t offset) const {
  int from = direct_ ? direct_.get() : file_.get();
  for (std::size_t i = 0; i < memory.size() && offset < bytes_;) {
    const auto pieces = static_cast<int>(std::min<std::size_t>(memory.size() - i, IOV_MAX));
    const ssize_t got = ::preadv(from, &memory[i], pieces, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    // Some file systems open a file so and then refuse.
    if (got < 0 && errno == EINVAL && from != file_.get()) {
      from = file_.get();
      continue;
    }
    if (got < 0) {
      throw system_error(blame_of(errno), "the checkpoint's file '" + path_ + "' cannot be read",
                         errno);
    }
    if (got == 0) {
      throw Error(Blame::Caller,
                  "the checkpoint's file '" + path_ + "' became shorter while it was read");
    }
    offset += static_cast<std::uint64_t>(got);
    if (offset % NewFile::kBlock != 0) from = file_.get();  // what follows is not aligned
    for (auto left = static_cast<std::size_t>(got); left > 0;) {
      const std::size_t part = std::min(left, memory[i].iov_len);
      memory[i].iov_base = static_cast<char*>(memory[i].iov_base) + part;
      memory[i].iov_len -= part;
      left -= part;
      if (memory[i].iov_len == 0) ++i;
    }
  }
}

void ExistingFile::read(char* memory, std::uint64_t bytes, std::uint64_t offset) const {
  if (offset > bytes_ || bytes > bytes_ - offset) {
    throw Error(Blame::Caller,
                "the checkpoint's file '" + path_ + "' is shorter than its header says");
  }
  // Linux reads less than 2 GiB in one call.
  constexpr std::uint64_t kPiece = std::uint64_t{1} << 30;
  for (std::uint64_t at = 0; at < bytes; at += kPiece)
    read({{memory + at, std::min(kPiece, bytes - at)}}, offset + at);
}

void ExistingFile::refuse(const std::string& why) const {
  throw Error(Blame::Caller, "the checkpoint's file '" + path_ + "' is damaged: " + why +
                                 "; put back the file that was saved, or load another checkpoint");
}

}  // namespace weft::checkpoint
