// SPDX-License-Identifier: Apache-2.0
// A checkpoint's file that is read. Any thread may read. Errors name the file. Internal.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <sys/uio.h>

#include <weft/base/descriptor.h>

namespace weft::checkpoint {

class ExistingFile {
 public:
  // Throws Caller if the file is missing or not a regular one.
  explicit ExistingFile(std::string path);

  const std::string& path() const { return path_; }
  std::uint64_t bytes() const { return bytes_; }

  // Tries to make later reads go past the page cache (O_DIRECT), which copies nothing and leaves
  // other files in it. Returns false where the file system cannot do that.
  bool go_past_page_cache();
  // Offsets, lengths and memory of reads past the page cache must be multiples of this number; 1
  // while reads use the page cache.
  std::uint64_t alignment() const;

  // Makes the system begin to read some bytes into the page cache.
  void prefetch(std::uint64_t offset, std::uint64_t bytes) const;
  // Fills the memory with the bytes from `offset` on; what would be behind the end stays as it is.
  // Blocks. Throws Caller if the file has become shorter, Busy for a disk that fails.
  void read(std::vector<iovec> memory, std::uint64_t offset) const;
  void read(char* memory, std::uint64_t bytes, std::uint64_t offset) const;

  // Throws Caller: the file is not what was saved.
  [[noreturn]] void refuse(const std::string& why) const;

 private:
  const std::string path_;
  Descriptor file_;
  Descriptor direct_;  // empty while reads use the page cache
  std::uint64_t bytes_ = 0;
};

}  // namespace weft::checkpoint
