// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <weft/base/make_error.h>
#include <weft/engine/checkpoint/checkpoint_file.h>

namespace weft::checkpoint {

namespace {

// "\nweft-checkpoint 0001 00000000000000123456 <SHA-256>\n"
constexpr std::string_view kBegin = "\nweft-checkpoint ";
constexpr std::string_view kVersion = "0001";
constexpr std::size_t kDigits = 20;
constexpr std::size_t kHash = 64;
constexpr std::size_t kLine = kBegin.size() + kVersion.size() + 1 + kDigits + 1 + kHash + 1;
// Linux writes and reads less than 2 GiB in one call.
constexpr std::size_t kPiece = 1u << 30;

std::string last_line(std::size_t bytes, const std::string& digest) {
  std::string number = std::to_string(bytes);
  number.insert(0, kDigits - number.size(), '0');
  return std::string(kBegin) + std::string(kVersion) + " " + number + " " + digest + "\n";
}

std::string folder_of(const std::string& file) {
  const std::string folder = std::filesystem::path(file).parent_path();
  return folder.empty() ? "." : folder;
}

// Follows symbolic links at the end of the path, so that a link stays one. Their target need not
// exist yet.
std::string behind_links(std::filesystem::path path) {
  std::error_code none;
  for (int links = 0; links < 40; ++links) {
    const auto target = std::filesystem::read_symlink(path, none);
    if (none) break;
    path = target.is_absolute() ? target : path.parent_path() / target;
  }
  return path;
}

}  // namespace

Blame blame_of(int number) {
  if (is_shortage(number)) return Blame::Busy;
  switch (number) {
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
    case EIO:
    case EAGAIN: return Blame::Busy;
    default: return Blame::Caller;
  }
}

int sync_folder_of(const std::string& path) {
  const Descriptor folder(::open(folder_of(path).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  return folder && ::fsync(folder.get()) != 0 && errno != EINVAL ? errno : 0;
}

// --- Draft

Draft::Draft(const std::string& file) : named_(file) {
  if (file.empty()) fail("it has no name", 0);
  file_ = behind_links(file);
  aside_ = file_ + ".new";
  struct stat old {};
  const bool is_there = ::stat(file_.c_str(), &old) == 0;
  if (!is_there && errno != ENOENT) fail("", errno);
  std::error_code unknown;
  if (!is_there && !std::filesystem::exists(folder_of(file_), unknown) && !unknown) {
    fail("there is no folder '" + folder_of(file_) + "' on this machine; make it first", 0);
  }
  if (is_there && S_ISDIR(old.st_mode)) fail("it is a folder", 0);
  if (is_there && !S_ISREG(old.st_mode)) fail("it is not a regular file", 0);
  // rename() would replace a read-only file, so writability is checked here.
  if (is_there && ::faccessat(AT_FDCWD, file_.c_str(), W_OK, AT_EACCESS) != 0) fail("", errno);
  open_aside();
  if (is_there && ::fchmod(aside_file_.get(), old.st_mode & 07777) != 0) {
    const int number = errno;
    ::unlink(aside_.c_str());
    fail("", number);
  }
}

// Opens the file at the path `aside_` and locks it while it is being written; the lock ends with
// the process.
void Draft::open_aside() {
  for (;;) {
    aside_file_ = Descriptor(
        ::open(aside_.c_str(), O_WRONLY | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666));
    if (!aside_file_) fail("", errno);
    // A file system without locks: the file is written without one.
    if (::flock(aside_file_.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
      throw Error(Blame::Busy, "the checkpoint '" + named_ +
                                   "' cannot be written: another process is writing it");
    }
    // Between open() and flock() another writer may have renamed or removed the file.
    struct stat locked {};
    struct stat named {};
    if (::fstat(aside_file_.get(), &locked) != 0) fail("", errno);
    if (!S_ISREG(locked.st_mode)) fail("'" + aside_ + "' is not a regular file; remove it", 0);
    if (::lstat(aside_.c_str(), &named) != 0 || named.st_ino != locked.st_ino ||
        named.st_dev != locked.st_dev)
      continue;
    if (::ftruncate(aside_file_.get(), 0) != 0) fail("", errno);
    return;
  }
}

Draft::~Draft() {
  if (aside_file_) ::unlink(aside_.c_str());
}

void Draft::write(const void* data, std::size_t bytes) noexcept {
  put(static_cast<const char*>(data), bytes);
  digest_.add(data, bytes);
  bytes_ += bytes;
}

void Draft::put(const char* data, std::size_t bytes) noexcept {
  while (bytes > 0 && failed_ == 0) {
    const ssize_t written = ::write(aside_file_.get(), data, std::min(bytes, kPiece));
    if (written <= 0) {
      const int number = written < 0 ? errno : EIO;
      if (number != EINTR) failed_ = number;
    } else {
      data += written;
      bytes -= static_cast<std::size_t>(written);
    }
  }
}

void Draft::publish() {
  const std::string line = last_line(bytes_, digest_.text());
  put(line.data(), line.size());
  if (failed_ == 0 && ::fsync(aside_file_.get()) != 0) failed_ = errno;
  if (failed_ == 0 && ::rename(aside_.c_str(), file_.c_str()) != 0) failed_ = errno;
  if (failed_ != 0) fail("", failed_);
  aside_file_ = Descriptor();
  if (const int number = sync_folder_of(file_)) fail("", number);
}

void Draft::fail(const std::string& why, int number) const {
  const std::string text = "the checkpoint '" + named_ + "' cannot be written";
  if (number == 0) throw Error(Blame::Caller, text + ": " + why);
  throw system_error(blame_of(number), text, number);
}

// --- Reader

bool is_file(const std::string& file) {
  struct stat status {};
  if (::stat(file.c_str(), &status) == 0) return true;
  if (errno == ENOENT || errno == ENOTDIR) return false;
  throw system_error(blame_of(errno), "cannot check whether the checkpoint '" + file + "' exists",
                     errno);
}

Reader::Reader(const std::string& file) : named_("the checkpoint '" + file + "'") {
  // O_NONBLOCK, because opening a pipe without a writer would block.
  file_ = Descriptor(::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  if (!file_ && errno == ENOENT) {
    std::error_code unknown;
    const std::string here = std::filesystem::current_path(unknown).string();
    throw Error(Blame::Caller, named_ + " cannot be read: No such file or directory" +
                                   (file.starts_with('/') || unknown ? "" : " in " + here) +
                                   "; checkpoint::exists() says whether there is one");
  }
  if (!file_ || ::fstat(file_.get(), &status) != 0)
    throw system_error(blame_of(errno), named_ + " cannot be read", errno);
  if (!S_ISREG(status.st_mode)) throw Error(Blame::Caller, named_ + " is not a regular file");
  const auto size = static_cast<std::size_t>(status.st_size);
  std::string line(std::min(size, kLine), '\0');
  get(line.data(), line.size(), size - line.size());
  if (line.size() < kLine || !line.starts_with(kBegin)) {
    throw Error(Blame::Caller, named_ + " is not a Weft checkpoint, or is truncated");
  }
  const std::string_view version = std::string_view(line).substr(kBegin.size(), kVersion.size());
  if (version != kVersion) {
    throw Error(Blame::Caller, named_ + " is damaged, or of version " + std::string(version) +
                                   ", which this Weft cannot read");
  }
  bytes_ = size - kLine;
  digest_ = line.substr(kLine - kHash - 1, kHash);
  if (line != last_line(bytes_, digest_)) throw Error(Blame::Caller, named_ + " is damaged");
}

void Reader::read(void* memory) {
  get(static_cast<char*>(memory), bytes_, 0);
  codec::Digest digest;
  digest.add(memory, bytes_);
  if (digest.text() != digest_)
    throw Error(Blame::Caller, named_ + " is damaged: its bytes are not those that were written");
}

void Reader::get(char* memory, std::size_t bytes, std::size_t offset) const {
  while (bytes > 0) {
    const ssize_t got =
        ::pread(file_.get(), memory, std::min(bytes, kPiece), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw system_error(blame_of(errno), named_ + " cannot be read", errno);
    if (got == 0) throw Error(Blame::Caller, named_ + " became shorter while it was read");
    memory += got;
    bytes -= static_cast<std::size_t>(got);
    offset += static_cast<std::size_t>(got);
  }
}

}  // namespace weft::checkpoint
