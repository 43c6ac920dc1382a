// SPDX-License-Identifier: Apache-2.0
// A file that is written once, from its beginning to its end. Large ones go past the page cache
// (O_DIRECT), which copies nothing and leaves other files in it. One thread at a time. Internal.
#pragma once

#include <cstdint>
#include <string>

#include <weft/base/descriptor.h>
#include <weft/engine/checkpoint/open_folder.h>

namespace weft::checkpoint {

class NewFile {
 public:
  // Data that begins at a multiple of so many bytes, in the file and in memory, can be written past
  // the page cache.
  static constexpr std::uint64_t kBlock = 4096;

  // `is_large`: worth going past the page cache, where the file system can do that. Throws Caller
  // if the file cannot be made, or exists.
  NewFile(std::string path, bool is_large);
  // The same for a file in that folder. Throws Caller, too, if the folder was removed.
  NewFile(const OpenFolder& folder, const std::string& name, bool is_large);

  // Appends the bytes. Throws Busy for a full disk.
  void append(const char* data, std::uint64_t bytes);
  // Returns when the file is on the disk.
  void finish();

 private:
  NewFile(int folder, const std::string& name, std::string path, bool is_large);
  void put(const char* data, std::uint64_t bytes);
  void use_page_cache();
  // The same because the system refuses to go past it; says so once.
  void refuse_direct(int reason);

  const std::string path_;
  Descriptor file_;
  bool is_direct_ = false;
  std::uint64_t end_ = 0;  // of what was written, a multiple of kBlock while is_direct_
  std::string rest_;       // of the appended bytes, shorter than kBlock
};

}  // namespace weft::checkpoint
