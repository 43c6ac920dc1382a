// SPDX-License-Identifier: Apache-2.0
// Parts of the timeline come from other machines, by way of the store. Any contents are either
// refused or merged, and the result is JSON. The input consists of two parts with a zero byte
// between them.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <span>
#include <string>

#include <nlohmann/json.hpp>

#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/profiling/trace/merge.h>
#include <weft/profiling/trace/timeline.h>
#include <weft/tests/harness/folder.h>

namespace {

void write(const std::string& path, std::span<const std::uint8_t> bytes) {
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()), std::ssize(bytes));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  using namespace weft;
  static const harness::Folder folder;
  static const std::string file = folder.path() + "/timeline.json";
  static const std::string parts = trace::timeline::folder_of_parts(file);
  // Makes the files again: file systems take many times as long to write over a file.
  std::filesystem::remove_all(parts);
  std::filesystem::remove(file);
  std::filesystem::create_directories(parts);
  const std::span input(data, bytes);
  const auto first = static_cast<std::size_t>(std::ranges::find(input, 0) - input.begin());
  write(parts + "/job.0", input.first(first));
  write(parts + "/job.1", input.subspan(std::min(first + 1, bytes)));
  try {
    if (trace::timeline::merge(file).parts > 2) broken("more parts than there are files");
  } catch (const Error& error) {
    if (error.blame() != Blame::Caller)
      broken("a part that cannot be read is not blamed on the caller");
    return 0;
  }
  std::ifstream merged(file);
  if (!nlohmann::json::accept(merged)) broken("the merged timeline is not JSON");
  return 0;
}
