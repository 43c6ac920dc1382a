// SPDX-License-Identifier: Apache-2.0
// The folder of one checkpoint while its files are written. Files are made through its handle: once
// the folder was removed, because the save failed elsewhere, a rank or owner that is late can make
// no file in it, and none in a later folder of the same name either. Any thread may use it.
// Internal.
#pragma once

#include <string>

#include <weft/base/descriptor.h>

namespace weft::checkpoint {

class OpenFolder {
 public:
  // Throws Caller if the folder cannot be opened.
  explicit OpenFolder(std::string path);

  const std::string& path() const { return path_; }
  int handle() const { return handle_.get(); }

 private:
  std::string path_;
  Descriptor handle_;
};

}  // namespace weft::checkpoint
