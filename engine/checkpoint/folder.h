// SPDX-License-Identifier: Apache-2.0
// Finds, makes and removes the checkpoints of a job, FOLDER/NUMBER, and tells which of them are
// whole. Internal.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <weft/base/descriptor.h>
#include <weft/engine/checkpoint/manifest.h>

namespace weft::checkpoint {

// True if the path is a folder, also behind a link. Throws if the system cannot tell.
bool is_folder(const std::string& path);

// The checkpoint that load() of a path reads.
struct Found {
  std::string below;  // "" or "/NUMBER": the checkpoint is at the path and this
  Manifest manifest;
};
// The checkpoint at the path, or the newest whole one below it; a warning names newer ones that
// were cut off. Throws Caller if there is none.
Found find(const std::string& path);
// True if find() would find one. Does not read what it holds.
bool has_whole(const std::string& path);

// The right to write one new checkpoint. Owned by rank 0's save. This process gives the number of
// a save that failed to no later one.
class Numbered {
 public:
  // Makes the folder if only its last part is missing, and FOLDER/NUMBER in it. Removes what was
  // cut off before. Throws Busy while another process or group writes there.
  explicit Numbered(const std::string& folder);
  // Removes FOLDER/NUMBER unless it was published.
  ~Numbered();
  Numbered(const Numbered&) = delete;
  Numbered& operator=(const Numbered&) = delete;

  std::uint64_t number() const { return number_; }
  // Writes the manifest, which makes the checkpoint whole.
  void publish(const Manifest& manifest);
  // Removes whole checkpoints beyond the newest `keep`, and older ones that were cut off, which
  // remain where there are no locks. Failures are warnings.
  void remove_old(int keep) const;

 private:
  std::string folder_;
  Descriptor lock_;
  std::uint64_t number_ = 0;
  bool is_published_ = false;
};

// The name of a rank's file in FOLDER/NUMBER.
std::string file_name_of(int rank);

// Throws unless this rank can make files in the folder.
void check_folder_writable(const std::string& folder);

}  // namespace weft::checkpoint
