// SPDX-License-Identifier: Apache-2.0
// A checkpoint as a file: bytes of any kind, then a line with their number and SHA-256. A reader of
// zip archives, as libtorch's are, ignores that line. One thread at a time. Errors name the file
// and the fix; a full disk is Busy.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include <weft/base/descriptor.h>
#include <weft/base/error.h>
#include <weft/engine/codec/digest.h>

namespace weft::checkpoint {

// Writes FILE.new and then renames it to FILE: whenever this process ends, FILE is the old one or
// the new one, complete. The FILE.new of a killed process is overwritten by the next Draft.
class Draft {
 public:
  // Throws if the file cannot be replaced: no such folder, no permission, not a regular file,
  // another writer.
  explicit Draft(const std::string& file);
  // Removes FILE.new unless it was published.
  ~Draft();
  Draft(const Draft&) = delete;
  Draft& operator=(const Draft&) = delete;

  // Throws nothing, because libtorch calls it; publish() throws its errors.
  void write(const void* data, std::size_t bytes) noexcept;
  // Returns when the file is on the disk; throws the first error.
  void publish();

 private:
  void put(const char* data, std::size_t bytes) noexcept;
  [[noreturn]] void fail(const std::string& why, int number) const;
  void open_aside();

  std::string named_;  // as the caller wrote it
  std::string file_;   // with symbolic links followed
  std::string aside_;  // file_ + ".new"
  Descriptor aside_file_;
  codec::Digest digest_;
  std::size_t bytes_ = 0;
  int failed_ = 0;  // errno of the first failure
};

// True if the path exists, also as a folder or another kind of file. Throws if the system cannot
// tell.
bool is_file(const std::string& file);

// Makes the path's name durable. Returns an errno, or 0, also where a file system cannot do that.
int sync_folder_of(const std::string& path);

// Busy for what passes or can be cleared, such as a full disk; Caller for the rest.
Blame blame_of(int number);

class Reader {
 public:
  // Throws if the file does not exist or does not end as a checkpoint does.
  explicit Reader(const std::string& file);
  // The number of bytes that were written, without the line at the end.
  std::size_t bytes() const { return bytes_; }
  // Fills bytes() of memory. Throws if they are not the bytes that were written.
  void read(void* memory);

 private:
  void get(char* memory, std::size_t bytes, std::size_t offset) const;
  std::string named_;
  Descriptor file_;
  std::size_t bytes_ = 0;
  std::string digest_;
};

}  // namespace weft::checkpoint
