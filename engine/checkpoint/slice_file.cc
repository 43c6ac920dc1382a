// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <future>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <weft/base/make_error.h>
#include <weft/engine/checkpoint/checkpoint_file.h>
#include <weft/engine/checkpoint/host_memory.h>
#include <weft/engine/checkpoint/new_file.h>
#include <weft/engine/checkpoint/slice_file.h>
#include <weft/engine/codec/digest.h>
#include <weft/engine/group/collective_error.h>

namespace weft::checkpoint {

namespace {

// Linux reads less than 2 GiB in one call.
constexpr std::uint64_t kPiece = std::uint64_t{8} << 20;
// So much is read and then added to a checksum while the processor's caches have it.
constexpr std::uint64_t kInCache = std::uint64_t{1} << 20;
// Files with so much data go past the page cache.
constexpr std::uint64_t kLarge = std::uint64_t{1} << 20;

std::string digest_of(const void* data, std::size_t bytes) {
  codec::Digest digest;
  digest.add(data, bytes);
  return digest.text();
}

// The checksums of each slice's chunks.
std::vector<std::vector<std::string>> checksums_of(const std::vector<SavedSlice>& slices,
                                                   const char* data) {
  std::vector<std::vector<std::string>> all;
  for (const SavedSlice& saved : slices) {
    all.emplace_back();
    for (std::uint64_t at = 0; at < saved.slice.bytes; at += kChunk) {
      const std::uint64_t chunk = std::min(kChunk, saved.slice.bytes - at);
      all.back().push_back(digest_of(data + saved.slice.begin + at, chunk));
    }
  }
  return all;
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
  const bool is_large = data_bytes >= kLarge;
  Header header;
  header.metadata = {{"format", "pt"}};
  for (const SavedSlice& saved : slices) header.slices.push_back(saved.slice);
  const std::string front = is_large ? encode(header, NewFile::kBlock) : encode(header);
  if (front.size() > kMostHeader) {
    throw Error(Blame::Caller, "the checkpoint's file '" + path +
                                   "' would have a header of over 100 MB, which no reader of "
                                   "safetensors takes: save fewer or larger tensors");
  }
  const auto* const bytes = static_cast<const char*>(data);
  NewFile file(path, is_large);
  // While this thread waits for the disk. Without a thread for it, get() computes them.
  auto checksums =
      std::async(is_large ? std::launch::async | std::launch::deferred : std::launch::deferred,
                 [&] { return checksums_of(slices, bytes); });
  const at::Tensor aligned = paged_bytes(front.size());
  std::memcpy(aligned.mutable_data_ptr(), front.data(), front.size());
  file.append(static_cast<const char*>(aligned.const_data_ptr()), front.size());
  file.append(bytes, data_bytes);
  file.finish();
  auto all = checksums.get();
  for (std::size_t i = 0; i < slices.size(); ++i) slices[i].checksums = std::move(all[i]);
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

void SliceFile::prefetch(const SavedSlice& saved, std::uint64_t from, std::uint64_t bytes) const {
  // Advice: what it cannot do, read() does.
  ::posix_fadvise(file_.get(), static_cast<off_t>(data_ + saved.slice.begin + from),
                  static_cast<off_t>(bytes), POSIX_FADV_WILLNEED);
}

void SliceFile::read(const SavedSlice& saved, std::uint64_t from, std::uint64_t bytes,
                     void* memory) const {
  auto* const to = static_cast<char*>(memory);
  const Slice& slice = saved.slice;
  const std::uint64_t data = data_ + slice.begin;
  if (saved.checksums.empty()) return get(file_, path_, to, bytes, data + from);
  std::vector<char> aside;  // for pieces of which only a part is wanted
  for (std::uint64_t chunk = from / kChunk * kChunk; chunk < from + bytes; chunk += kChunk) {
    const std::uint64_t end = std::min(chunk + kChunk, slice.bytes);
    if (end < from + bytes) prefetch(saved, end, std::min(kChunk, slice.bytes - end));
    codec::Digest digest;
    for (std::uint64_t at = chunk; at < end; at += kInCache) {
      const std::uint64_t piece = std::min(kInCache, end - at);
      const std::uint64_t first = std::max(at, from);
      const std::uint64_t last = std::min(at + piece, from + bytes);
      const bool is_whole = first == at && last == at + piece;
      if (!is_whole) aside.resize(kInCache);
      char* const place = is_whole ? to + (at - from) : aside.data();
      get(file_, path_, place, piece, data + at);
      digest.add(place, piece);
      if (!is_whole && first < last)
        std::memcpy(to + (first - from), place + (first - at), last - first);
    }
    if (digest.text() != saved.checksums[chunk / kChunk])
      damaged(path_, "the checksum of '" + slice.name + "' differs");
  }
}

}  // namespace weft::checkpoint
