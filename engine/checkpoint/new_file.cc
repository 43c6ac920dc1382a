// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <mutex>

#include <fcntl.h>
#include <unistd.h>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/engine/checkpoint/checkpoint_file.h>
#include <weft/engine/checkpoint/new_file.h>

namespace weft::checkpoint {

namespace {

// Linux writes less than 2 GiB in one call. Larger calls are not faster.
constexpr std::uint64_t kPiece = std::uint64_t{16} << 20;

[[noreturn]] void cannot_write(const std::string& path, int number) {
  const bool is_full = number == ENOSPC || number == EDQUOT;
  throw system_error(blame_of(number),
                     "the checkpoint's file '" + path + "' cannot be written" +
                         (is_full ? ", free some space on its disk" : ""),
                     number);
}

bool is_aligned(const char* data) {
  return reinterpret_cast<std::uintptr_t>(data) % NewFile::kBlock == 0;
}

}  // namespace

NewFile::NewFile(std::string path, bool is_large) : NewFile(AT_FDCWD, path, path, is_large) {}

NewFile::NewFile(const OpenFolder& folder, const std::string& name, bool is_large)
    : NewFile(folder.handle(), name, folder.path() + "/" + name, is_large) {}

NewFile::NewFile(int folder, const std::string& name, std::string path, bool is_large)
    : path_(std::move(path)) {
  constexpr int kFlags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  if (is_large) {
    file_ = Descriptor(::openat(folder, name.c_str(), kFlags | O_DIRECT, 0666));
    is_direct_ = static_cast<bool>(file_);
    // Some file systems make the file and then refuse.
    if (!is_direct_ && errno == EINVAL) {
      ::unlinkat(folder, name.c_str(), 0);
      refuse_direct(EINVAL);
    }
  }
  if (!file_) file_ = Descriptor(::openat(folder, name.c_str(), kFlags, 0666));
  if (file_) return;
  const bool is_removed = folder != AT_FDCWD && (errno == ENOENT || errno == ESTALE);
  if (!is_removed) cannot_write(path_, errno);
  throw Error(Blame::Caller, "the checkpoint's file '" + path_ +
                                 "' cannot be written: its folder was removed, because the save "
                                 "has failed elsewhere or a program has removed it");
}

void NewFile::use_page_cache() {
  is_direct_ = false;
  if (!file_) return;
  const int flags = ::fcntl(file_.get(), F_GETFL);
  if (flags < 0 || ::fcntl(file_.get(), F_SETFL, flags & ~O_DIRECT) != 0)
    cannot_write(path_, errno);
}

void NewFile::refuse_direct(int reason) {
  static std::once_flag told;
  std::call_once(told, [&] {
    log::info("checkpoint::save_async: the file system of '" + path_ +
              "' refuses direct I/O (O_DIRECT: " + std::strerror(reason) +
              "); files are written through the page cache");
  });
  use_page_cache();
}

void NewFile::put(const char* data, std::uint64_t bytes) {
  while (bytes > 0) {
    const ssize_t written =
        ::pwrite(file_.get(), data, std::min(bytes, kPiece), static_cast<off_t>(end_));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0 && errno == EINVAL && is_direct_) {
      refuse_direct(errno);
      continue;
    }
    if (written <= 0) cannot_write(path_, written < 0 ? errno : EIO);
    data += written;
    end_ += static_cast<std::uint64_t>(written);
    bytes -= static_cast<std::uint64_t>(written);
  }
}

void NewFile::append(const char* data, std::uint64_t bytes) {
  if (!is_direct_) return put(data, bytes);
  if (!rest_.empty() || !is_aligned(data)) {
    use_page_cache();
    put(rest_.data(), rest_.size());
    rest_.clear();
    return put(data, bytes);
  }
  const std::uint64_t blocks = bytes / kBlock * kBlock;
  put(data, blocks);
  if (is_direct_) {
    rest_.assign(data + blocks, bytes - blocks);
  } else {
    put(data + blocks, bytes - blocks);
  }
}

void NewFile::finish() {
  if (!rest_.empty()) {
    use_page_cache();
    put(rest_.data(), rest_.size());
  }
  if (::fsync(file_.get()) != 0) cannot_write(path_, errno);
}

}  // namespace weft::checkpoint
