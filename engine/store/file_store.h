// SPDX-License-Identifier: Apache-2.0
// The store of a job that meets through a file: c10d's FileStore, except that the last rank
// reliably removes the file.
#pragma once

#include <string>

#include <torch/csrc/distributed/c10d/FileStore.hpp>

namespace weft::group {

// Python ranks with a FileStore of their own may share the file. Throws what FileStore throws.
c10::intrusive_ptr<c10d::FileStore> open_job_file(const std::string& path, int world_size);

}  // namespace weft::group
