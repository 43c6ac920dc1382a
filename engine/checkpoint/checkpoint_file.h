// A checkpoint as a file: bytes of any kind, behind them a line with their number and SHA-256. A
// reader of zip archives, as libtorch's are, passes over that line. One thread at a time. Errors
// name the file and the fix; a full disk is Busy.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include <weft/base/descriptor.h>
#include <weft/base/error.h>
#include <weft/engine/codec/digest.h>

namespace weft::checkpoint {

// Written beside the file as FILE.new and then put into its place: whenever this process ends, the
// file is the old one or the new one, whole. What a killed process has left there the next one
// overwrites.
class Draft {
 public:
  // Throws where the file could not be replaced: no such folder, no permission, not a regular file,
  // another writer.
  explicit Draft(const std::string& file);
  // Removes what has not been published.
  ~Draft();
  Draft(const Draft&) = delete;
  Draft& operator=(const Draft&) = delete;

  // Throws nothing, since libtorch calls it: publish() throws for it.
  void write(const void* data, std::size_t bytes) noexcept;
  // Returns when the file is on the disk.
  void publish();

 private:
  void put(const char* data, std::size_t bytes) noexcept;
  [[noreturn]] void fail(const std::string& why, int number) const;
  void open_aside();

  std::string named_;  // as the caller wrote it
  std::string file_;   // what links lead to
  std::string aside_;
  Descriptor aside_file_;
  codec::Digest digest_;
  std::size_t bytes_ = 0;
  int failed_ = 0;  // errno of the first failure
};

// Whether there is such a file, folder or whatever. Throws where the system does not say.
bool is_file(const std::string& file);

class Reader {
 public:
  // Throws where there is no file, or its end is not that of a checkpoint.
  explicit Reader(const std::string& file);
  // Of what was written, without the line behind it.
  std::size_t bytes() const { return bytes_; }
  // Fills bytes() of memory. Throws where they are not those that were written.
  void read(void* memory);

 private:
  void get(char* memory, std::size_t bytes, std::size_t offset) const;
  std::string named_;
  Descriptor file_;
  std::size_t bytes_ = 0;
  std::string digest_;
};

}  // namespace weft::checkpoint
