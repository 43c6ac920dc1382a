// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <utility>

#include <fcntl.h>

#include <weft/base/make_error.h>
#include <weft/engine/checkpoint/checkpoint_file.h>
#include <weft/engine/checkpoint/open_folder.h>

namespace weft::checkpoint {

OpenFolder::OpenFolder(std::string path)
    : path_(std::move(path)), handle_(::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
  if (!handle_) {
    throw system_error(blame_of(errno), "the checkpoint's folder '" + path_ + "' cannot be opened",
                       errno);
  }
}

}  // namespace weft::checkpoint
