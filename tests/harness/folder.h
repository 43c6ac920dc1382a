// SPDX-License-Identifier: Apache-2.0
// A folder for one test. The destructor removes it.
#pragma once

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <string>

#include <weft/base/error.h>
#include <weft/base/make_error.h>

namespace weft::harness {

class Folder {
 public:
  Folder() {
    if (::mkdtemp(path_.data()) == nullptr)
      throw system_error(Blame::Busy, "no folder for the test", errno);
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_ = std::filesystem::temp_directory_path() / "weft-test-XXXXXX";
};

}  // namespace weft::harness
