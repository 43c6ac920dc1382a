// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <weft/base/make_error.h>
#include <weft/engine/checkpoint/checkpoint_file.h>
#include <weft/engine/checkpoint/slice_file.h>
#include <weft/engine/codec/digest.h>
#include <weft/engine/group/collective_error.h>

namespace weft::checkpoint {

namespace {

// Linux writes and reads less than 2 GiB in one call.
constexpr std::uint64_t kPiece = std::uint64_t{8} << 20;

std::string digest_of(const void* data, std::size_t bytes) {
  codec::Digest digest;
  digest.add(data, bytes);
  return digest.text();
}

[[noreturn]] void cannot_write(const std::string& path, int number) {
  const bool is_full = number == ENOSPC || number == EDQUOT;
  throw system_error(blame_of(number),
                     "the checkpoint's file '" + path + "' cannot be written" +
                         (is_full ? ", free some space on its disk" : ""),
                     number);
}

void put(const Descriptor& file, const std::string& path, const char* data, std::uint64_t bytes,
         std::uint64_t offset) {
  while (bytes > 0) {
    const ssize_t written =
        ::pwrite(file.get(), data, std::min(bytes, kPiece), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) cannot_write(path, errno);
    data += written;
    offset += static_cast<std::uint64_t>(written);
    bytes -= static_cast<std::uint64_t>(written);
  }
}

void get(const Descriptor& file, const std::string& path, char* memory, std::uint64_t bytes,
         std::uint64_t offset) {
  while (bytes > 0) {
    const ssize_t got =
        ::pread(file.get(), memory, std::min(bytes, kPiece), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0)
      throw system_error(blame_of(errno), "the checkpoint's file '" + path + "' cannot be read",
                         errno);
    if (got == 0) {
      throw Error(Blame::Caller,
                  "the checkpoint's file '" + path + "' became shorter while it was read");
    }
    memory += got;
    offset += static_cast<std::uint64_t>(got);
    bytes -= static_cast<std::uint64_t>(got);
  }
}

// Opens a regular file and returns its size.
Descriptor opened(const std::string& path, std::uint64_t& bytes) {
  // O_NONBLOCK, because opening a pipe without a writer would block.
  Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  if (!file || ::fstat(file.get(), &status) != 0) {
    if (errno == ENOENT) {
      throw Error(Blame::Caller, "the checkpoint's file '" + path +
                                     "' is missing: put it back, or load another checkpoint");
    }
    throw system_error(blame_of(errno), "the checkpoint's file '" + path + "' cannot be read",
                       errno);
  }
  if (!S_ISREG(status.st_mode))
    throw Error(Blame::Caller, "the checkpoint's file '" + path + "' is not a regular file");
  bytes = static_cast<std::uint64_t>(status.st_size);
  return file;
}

[[noreturn]] void damaged(const std::string& path, const std::string& why) {
  throw Error(Blame::Caller, "the checkpoint's file '" + path + "' is damaged: " + why +
                                 "; put back the file that was saved, or load another checkpoint");
}

}  // namespace

SavedFile write_slices(const std::string& folder, const std::string& name,
                       std::vector<SavedSlice> slices, const void* data, std::uint64_t data_bytes) {
  const std::string path = folder + "/" + name;
  Header header;
  header.metadata = {{"format", "pt"}};
  for (const SavedSlice& saved : slices) header.slices.push_back(saved.slice);
  const std::string front = encode(header);
  if (front.size() > kMostHeader) {
    throw Error(Blame::Caller, "the checkpoint's file '" + path +
                                   "' would have a header of over 100 MB, which no reader of "
                                   "safetensors takes: save fewer or larger tensors");
  }
  const Descriptor file(
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666));
  if (!file) cannot_write(path, errno);
  put(file, path, front.data(), front.size(), 0);
  const auto* const bytes = static_cast<const char*>(data);
  for (SavedSlice& saved : slices) {
    for (std::uint64_t at = 0; at < saved.slice.bytes; at += kChunk) {
      const std::uint64_t chunk = std::min(kChunk, saved.slice.bytes - at);
      const std::uint64_t place = saved.slice.begin + at;
      saved.checksums.push_back(digest_of(bytes + place, chunk));
      put(file, path, bytes + place, chunk, front.size() + place);
    }
  }
  if (::fsync(file.get()) != 0) cannot_write(path, errno);
  return {name, front.size() + data_bytes, front.size(), digest_of(front.data(), front.size()),
          std::move(slices)};
}

SavedFile index_of(const std::string& folder, const std::string& name) {
  const std::string path = folder + "/" + name;
  SavedFile saved;
  saved.name = name;
  const Descriptor file = opened(path, saved.bytes);
  const auto failure = group::error_of([&] {
    std::string text(std::min<std::uint64_t>(kHeaderLength, saved.bytes), '\0');
    get(file, path, text.data(), text.size(), 0);
    const std::uint64_t length = header_length(text, saved.bytes);
    text.resize(length);
    get(file, path, text.data(), length, kHeaderLength);
    saved.data = kHeaderLength + length;
    const Header header = parse_header(text, saved.bytes - saved.data);
    for (const Slice& slice : header.slices) saved.slices.push_back({slice, {}, ""});
  });
  if (failure) throw failure->within("the file '" + path + "' cannot be loaded");
  return saved;
}

SliceFile::SliceFile(const std::string& folder, const SavedFile& file)
    : path_(folder + "/" + file.name), data_(file.data) {
  std::uint64_t bytes = 0;
  file_ = opened(path_, bytes);
  if (bytes != file.bytes) {
    damaged(path_,
            "it has " + std::to_string(bytes) + " bytes instead of " + std::to_string(file.bytes));
  }
  if (file.header.empty()) return;
  if (file.data > kHeaderLength + kMostHeader) damaged(path_, "its header is over 100 MB");
  std::string front(file.data, '\0');
  get(file_, path_, front.data(), front.size(), 0);
  if (digest_of(front.data(), front.size()) != file.header)
    damaged(path_, "the checksum of its header differs");
}

void SliceFile::read(const SavedSlice& saved, std::uint64_t from, std::uint64_t bytes,
                     void* memory) const {
  auto* const to = static_cast<char*>(memory);
  const Slice& slice = saved.slice;
  const std::uint64_t data = data_ + slice.begin;
  if (saved.checksums.empty()) return get(file_, path_, to, bytes, data + from);
  std::vector<char> aside;  // a chunk of which only a part is wanted
  for (std::uint64_t begin = from / kChunk * kChunk; begin < from + bytes; begin += kChunk) {
    const std::uint64_t chunk = std::min(kChunk, slice.bytes - begin);
    const std::uint64_t first = std::max(begin, from);
    const std::uint64_t wanted = std::min(begin + chunk, from + bytes) - first;
    if (wanted < chunk) aside.resize(chunk);
    char* const place = wanted < chunk ? aside.data() : to + (begin - from);
    get(file_, path_, place, chunk, data + begin);
    if (digest_of(place, chunk) != saved.checksums[begin / kChunk])
      damaged(path_, "the checksum of '" + slice.name + "' differs");
    if (wanted < chunk) std::memcpy(to + (first - from), place + (first - begin), wanted);
  }
}

}  // namespace weft::checkpoint
